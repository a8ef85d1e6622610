"""Commands that are imported when they are called: most of them need torch or scipy, which take seconds to import."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from isthmus import __version__

Commands = Mapping[str, Mapping[str, str]]
"""By the module of `isthmus.cli` that has them in its Typer `app`: names and help, in the order of the help."""


def lazy_app(help_text: str, commands: Commands) -> typer.Typer:
    """A command line of these; `help_text` is its own help."""

    class Lazy(TyperGroup):
        """Its commands know their help alone until one is called."""

        # click's types, or those of the copy of click that later typers bring along: typer exports no names for them
        def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
            name, known, rest = super().resolve_command(ctx, args)
            return name, known and load(known.name or "", commands), rest

    app = typer.Typer(
        name="isthmus",
        cls=Lazy,
        help=help_text,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # a tenth of a second, and square brackets would be taken for styles
        context_settings={"max_content_width": 120},
    )
    app.callback()(_options)
    for named in commands.values():
        for name, help_text in named.items():
            app.command(name=name, help=help_text)(_not_loaded)
    return app


def load(name: str, commands: Commands) -> Any:
    """The command itself, as typer makes it for its click."""
    where = next(module for module, named in commands.items() if name in named)
    module = importlib.import_module(f"isthmus.cli.{where}")
    module.app.rich_markup_mode = None
    found = typer.main.get_command(module.app)
    return found.commands[name] if isinstance(found, TyperGroup) else found  # a module may have one command


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"isthmus {__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version.")
    ] = False,
) -> None:
    pass


def _not_loaded() -> None:
    raise AssertionError("what is called is loaded before")
