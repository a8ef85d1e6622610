"""The command line. stdout is data, stderr is progress and errors; NO_COLOR is respected."""

from __future__ import annotations

import importlib
import os
import re
import sys
import threading
from types import ModuleType
from typing import Annotated, Any, cast

import typer

from isthmus import __version__
from isthmus.api.stop import terminable
from isthmus.cli import (
    cluster_commands,
    dashboard_commands,
    device_commands,
    doctor_commands,
    first_files,
    fleet_commands,
    generation_commands,
    job_commands,
    lists,
    run_commands,
    serve_commands,
    site_commands,
)
from isthmus.errors import InternalError, IsthmusError, UserError
from isthmus.sanitize import error_line

app = typer.Typer(
    name="isthmus",
    help="Train one model on machines that are far apart, unequal, and joined by slow links.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # a tenth of a second, and square brackets would be taken for styles
    context_settings={"max_content_width": 120},
)
GROUPS = (
    first_files,
    job_commands,
    lists,
    run_commands,
    generation_commands,
    dashboard_commands,
    serve_commands,
    cluster_commands,
    fleet_commands,
    device_commands,
    site_commands,
    doctor_commands,
)
"""In the order of the help."""
NEEDING_POSIX = (generation_commands, serve_commands, cluster_commands, fleet_commands, device_commands)
for group in GROUPS:
    app.registered_commands += group.app.registered_commands

_UsageError = cast("type[Exception]", typer.BadParameter.__bases__[0])
"""Click's, or that of the copy of click that later typers bring along: typer exports no common name for it."""


def commands() -> dict[str, Any]:
    """By name, as typer makes them for its click, of which it exports no types."""
    return cast("Any", typer.main.get_command(app)).commands


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"isthmus {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line; one line on stderr and an exit code for every error that is ours to explain."""
    debug = "--debug" in sys.argv
    arguments = [a for a in sys.argv[1:] if a != "--debug"]
    try:
        sys.path.insert(0, os.getcwd())  # a job may name the user's own `package.module:callable`
        refuse_system(arguments, os.name)
        with terminable():
            code = app(arguments, prog_name="isthmus", standalone_mode=False)
    except _UsageError as e:
        usage = cast("typer.BadParameter", e)
        usage.message = re.sub(r"isthmus1-[\w-]+", "isthmus1-...", usage.message)  # a ticket in argv is not logged too
        usage.show()
        code = 2
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted", file=sys.stderr)
        code = 130
    except Exception as e:
        if debug:
            raise
        if isinstance(e, ModuleNotFoundError):
            extensions = importlib.import_module("isthmus.extensions")  # it reads what is installed
            missing = extensions.what_is_missing(_called(arguments), e)
            e = e if missing is None else UserError(missing)
        sys.stderr.write(f"error: {error_line(e)}\n")  # at once: threads may still speak, and `print` writes twice
        family = UserError if isinstance(e, OSError) else InternalError
        code = e.exit_code if isinstance(e, IsthmusError) else family.exit_code
    if code == 130 and any(thread.name == "planning" for thread in threading.enumerate()):
        sys.stderr.flush()
        os._exit(code)  # a planner is in a solver still: the interpreter would abort while it ends
    sys.exit(code if isinstance(code, int) else 0)


def refuse_system(arguments: list[str], system: str) -> None:
    """UserError for a command that another system than POSIX cannot carry out, by Python's name for it."""
    needing = {"train", *(name for module in NEEDING_POSIX for name in _names(module))}
    if system != "posix" and needing & set(arguments[:1]):
        raise UserError(f"{_called(arguments)} needs Linux or macOS: on Windows use WSL")


def _names(group: ModuleType) -> list[str]:
    """Of its commands."""
    return [
        command.name or typer.main.get_command_name(command.callback.__name__)
        for command in group.app.registered_commands
    ]


def _called(arguments: list[str]) -> str:
    """The command, as messages name it."""
    known = [name for group in GROUPS for name in _names(group)]
    return " ".join(["isthmus", *(word for word in arguments[:1] if word in known)])
