"""The command line. stdout is data, stderr is progress and errors; NO_COLOR is respected."""

from __future__ import annotations

import os
import re
import sys
import threading
from typing import TYPE_CHECKING, cast

import typer

from isthmus.api.stop import terminable
from isthmus.cli.lazy import lazy_app
from isthmus.cli.lazy_import import LazyImport
from isthmus.errors import InternalError, IsthmusError, UserError
from isthmus.sanitize import sanitize

if TYPE_CHECKING:
    from isthmus import extensions
else:
    extensions = LazyImport("isthmus.extensions")

COMMANDS = {
    "first_files": {
        "init": "Write a job, a fleet and a model of your own to begin with. Asks what no option says, on a terminal.",
        "example": "Copy an example into this folder.",
    },
    "job_commands": {
        "plan": "Plan where each part of the model runs; or compare planners, or check a plan.",
        "simulate": "Run the plan on a virtual clock: the same machines as a real run, with modelled durations.",
        "graph": "Show what each layer of a job's model computes and keeps. With --json: every operator too.",
        "describe-data": "Say what a job's data are like, without showing them: for a machine that plans and has none.",
        "train": "Plan, train over one process per device, compare what was predicted with what was measured.",
    },
    "lists": {
        "topologies": "List the built-in fleets.",
        "planners": "List the planners.",
        "models": "List the models that a job can name.",
        "datasets": "List the kinds of data that a job can name.",
        "algorithms": "List the federated algorithms.",
        "describe": "Show the options of a model, data set or algorithm, or the keys of a table of a job.",
    },
    "run_commands": {
        "trace": "Write a run's Perfetto trace (predicted and measured); print how well it was predicted.",
        "calibrate": "Write a run's fleet as its first steps showed it: stated speeds times measured factors.",
        "export": "Write a run's newest checkpoint or last federated round: a Hugging Face directory, or safetensors.",
    },
    "serving_commands": {
        "serve": "Coordinate devices that join over TLS; with a job, train it once all that its plan names are here.",
        "submit": "Hand a job to the coordinator that serves the fleet; prints its number.",
        "probe": "Measure this machine's devices, or those of a fleet and the links between them; write a fleet TOML.",
    },
    "fleet_commands": {
        "jobs": "List the jobs that were submitted: what runs, waits, and how the others ended.",
        "status": "Who is here, what runs and how far it is. On a terminal it stays and follows, until Ctrl-C.",
        "logs": "Print what a submitted job says.",
        "stop": "End a submitted job: what it leased is finished, a checkpoint saved. `resume` goes on from there.",
        "resume": "Queue a job once more that was stopped or failed; it goes on from its newest checkpoint.",
        "ticket": "Print a ticket for one more device. It is good once and for 24 hours.",
        "devices": "List the devices that joined; or shut one out, at once.",
        "drain": "Have a device leave the run that it works for, without loss: others take over its part first.",
    },
    "device_commands": {
        "join": "Join a fleet and stay, ready to work. The first time it needs a ticket.",
    },
    "doctor_commands": {
        "doctor": "Say what stands in the way of this machine, or of a device that joined, and what to do.",
    },
}
"""In the order of the help, with their help; by the module of `isthmus.cli` that is imported when one is called."""

app = lazy_app("Train one model on machines that are far apart, unequal, and joined by slow links.", COMMANDS)

_UsageError = cast("type[Exception]", typer.BadParameter.__bases__[0])
"""Click's, or that of the copy of click that later typers bring along: typer exports no common name for it."""


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
            missing = extensions.what_is_missing(_called(arguments), e)
            e = e if missing is None else UserError(missing)
        sys.stderr.write(f"error: {_message_of(e)}\n")  # at once: threads may still speak, and `print` writes twice
        family = UserError if isinstance(e, OSError) else InternalError
        code = e.exit_code if isinstance(e, IsthmusError) else family.exit_code
    if code == 130 and any(thread.name == "planning" for thread in threading.enumerate()):
        sys.stderr.flush()
        os._exit(code)  # a planner is in a solver still: the interpreter would abort while it ends
    sys.exit(code if isinstance(code, int) else 0)


def refuse_system(arguments: list[str], system: str) -> None:
    """UserError for a command that another system than POSIX cannot carry out, by Python's name for it."""
    modules = ("serving_commands", "fleet_commands", "device_commands")
    needing = {"train", *(name for module in modules for name in COMMANDS[module])}
    if system != "posix" and needing & set(arguments[:1]):
        raise UserError(f"{_called(arguments)} needs Linux or macOS: on Windows use WSL")


def _called(arguments: list[str]) -> str:
    """The command, as messages name it."""
    known = [name for named in COMMANDS.values() for name in named]
    return " ".join(["isthmus", *(word for word in arguments[:1] if word in known)])


def _message_of(error: Exception) -> str:
    """One line, without what could steer a terminal: messages quote files and other parties."""
    text = str(error)
    if isinstance(error, OSError) and error.filename is not None:
        text = f"{error.filename}: {error.strerror}"
    elif not isinstance(error, IsthmusError | OSError):
        text = f"internal: {type(error).__name__}: {error} (--debug shows where)"
    return sanitize(text)
