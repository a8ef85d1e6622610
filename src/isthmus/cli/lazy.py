"""Commands that are imported when they are called: most of them need torch or scipy, which take seconds to import."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import typer
from rich.markup import escape
from typer.core import TyperGroup

Commands = Mapping[str, Mapping[str, str]]
"""By the module of `isthmus.cli` that has them in its Typer `app`: names and help, in the order of the help."""


def lazy_app(told: str, commands: Commands) -> typer.Typer:
    """A command line of these; `told` is its own help."""

    class Lazy(TyperGroup):
        """Its commands know their help alone until one is called."""

        # click's types, or those of the copy of click that later typers bring along: typer exports no names for them
        def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
            name, known, rest = super().resolve_command(ctx, args)
            return name, known and load(known.name or "", commands), rest

    app = typer.Typer(
        name="isthmus", cls=Lazy, help=told, no_args_is_help=True, add_completion=False,
        pretty_exceptions_enable=False,
    )  # fmt: skip
    for named in commands.values():
        for name, help_text in named.items():
            app.command(name=name, help=escape(help_text))(_not_loaded)
    return app


def load(name: str, commands: Commands) -> Any:
    """The command itself, as typer makes it for its click."""
    where = next(module for module, named in commands.items() if name in named)
    module = importlib.import_module(f"isthmus.cli.{where}")
    found = typer.main.get_command(module.app)
    # a module may have one command
    command: Any = found.commands[name] if isinstance(found, TyperGroup) else found
    documented: list[Any] = [command, *(p for p in command.params if getattr(p, "help", None))]
    for one in documented:  # words in square brackets would be taken for rich's markup, and left out
        one.help = escape(one.help or "")
    return command


def _not_loaded() -> None:
    raise AssertionError("what is called is loaded before")
