"""The command line. stdout is data, stderr is progress and errors; NO_COLOR is respected."""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import re
import sys
import threading
import warnings
from collections.abc import Sequence
from typing import Annotated, Any, cast

import typer
from typer.core import TyperGroup
from typer.models import CommandInfo

from isthmus import __version__
from isthmus.api.stop import terminable
from isthmus.cli import device_commands, first_files, fleet_commands, job_commands, lists, run_commands
from isthmus.errors import InternalError, IsthmusError, IsthmusWarning, UserError
from isthmus.sanitize import error_line


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


class _Grouped(TyperGroup):
    """The help under headings, each command with the first part of its sentence, which is never cut."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        rows: dict[str, list[tuple[str, str]]] = {}
        for group, heading in GROUPS.items():
            for command in group.app.registered_commands:
                if (listed := self.commands.get(_name(command))) is not None:
                    sentence = re.split(r"[;:.](?:\s|$)", " ".join((listed.help or "").split()))[0]
                    rows.setdefault(heading, []).append((_name(command), f"{sentence}."))
        widest = max((len(name) for found in rows.values() for name, _ in found), default=0)
        for heading, found in rows.items():
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(widest), text) for name, text in found])


def _app_of(registered: Sequence[CommandInfo]) -> typer.Typer:
    made = typer.Typer(
        cls=_Grouped,
        help="Train one model on machines that are far apart, unequal, and joined by slow links.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # a tenth of a second, and square brackets would be taken for styles
        context_settings={"max_content_width": 120},
    )
    made.callback()(_options)
    made.registered_commands = list(registered)
    return made


GROUPS = {  # each module's heading in the help, in its order
    first_files: "Begin",
    job_commands: "Plan and train on this machine",
    lists: "What there is",
    run_commands: "Runs",
    fleet_commands: "A fleet, on the coordinator's machine",
    device_commands: "A fleet, on a device's machine",
}
NEEDING_POSIX = {"train", "generate", "serve-model", "join"}
"""Commands that only Linux can carry out, besides those of a fleet's coordinator."""
app = _app_of([command for group in GROUPS for command in group.app.registered_commands])
_UsageError = cast("type[Exception]", typer.BadParameter.__bases__[0])
"""Click's, or that of the copy of click that later typers bring along: typer exports no common name for it."""


def commands() -> dict[str, Any]:
    """Return the commands by name, as typer makes them for its click, of which it exports no types."""
    return cast("Any", typer.main.get_command(app)).commands


def app_for(arguments: Sequence[str]) -> typer.Typer:
    """The command that is called; or all of them by name and help alone, as typer takes long over their options."""
    if "_ISTHMUS_COMPLETE" in os.environ:  # a shell asks what could follow what is typed
        return app
    called = [command for command in app.registered_commands if _name(command) in arguments[:1]]
    return _app_of(called or [_named(command) for command in app.registered_commands])


def _named(command: CommandInfo) -> CommandInfo:
    return CommandInfo(_name(command), callback=lambda: None, help=command.help or command.callback.__doc__)


_show = warnings.showwarning


def _shown(message: Warning | str, category: type[Warning], filename: str, lineno: int, *rest: Any) -> None:
    """A warning of ours in a line; others as Python does."""
    if issubclass(category, IsthmusWarning):
        sys.stderr.write(f"warning: {message}\n")
    else:
        _show(message, category, filename, lineno, *rest)


def main() -> None:
    """Run the command line; one line on stderr and an exit code for every error that is ours to explain."""
    warnings.showwarning = _shown
    arguments = [a for a in sys.argv[1:] if a != "--debug"]
    gc.set_threshold(700, 10, 100)  # ten times fewer full collections: while torch is imported they took 0.3 s
    atexit.register(gc.freeze)  # to look for cycles among half a million objects as the interpreter ends takes 0.5 s
    try:
        sys.path[:0] = [*(os.path.dirname(os.path.abspath(a)) for a in arguments if a.endswith(".toml")), os.getcwd()]
        refuse_system(arguments, sys.platform)
        with terminable():
            code = app_for(arguments)(arguments, prog_name="isthmus", standalone_mode=False)
    except _UsageError as e:
        sys.stderr.write(f"error: {_called(arguments)}: {usage_text(cast('typer.BadParameter', e).format_message())}\n")
        code = 2
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted", file=sys.stderr)
        code = 130
    except Exception as e:
        if "--debug" in sys.argv:
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


def usage_text(message: str) -> str:
    """Shorten a message of typer on arguments to one line. A ticket among them is not shown."""
    text = re.sub(r"isthmus1-[\w-]+", "isthmus1-...", " ".join(message.split()))
    for theirs, ours in (
        ("Input should be ", "expected "),
        ("Value error, ", ""),
        ("greater than or equal to", "at least"),
        ("less than or equal to", "at most"),
    ):
        text = text.replace(theirs, ours)
    return text.rstrip(".")


def refuse_system(arguments: list[str], system: str) -> None:
    """UserError for a command that another system than Linux cannot carry out, by Python's name for it."""
    needing = NEEDING_POSIX.union(map(_name, fleet_commands.app.registered_commands))
    if system != "linux" and needing & set(arguments[:1]):
        wsl = "on Windows use WSL; " if system == "win32" else ""
        raise UserError(f"{_called(arguments)} needs Linux: {wsl}`plan` and `simulate` work here")


def _name(command: CommandInfo) -> str:
    return command.name or typer.main.get_command_name(getattr(command.callback, "__name__", ""))


def _called(arguments: list[str]) -> str:
    """The command, as messages name it."""
    return " ".join(["isthmus", *(_name(c) for c in app.registered_commands if _name(c) in arguments[:1])])
