"""A launcher starts one agent per node for a fleet, watches the agents, starts lost ones again, and ends them all.

An agent is `isthmus join` on a node. The engine carries nothing else: data of a run stay on the links between devices.

A ticket is no part of an agent's command line, nor of the shell script that all nodes run, in which each starts the
agent of its number: other users can read command lines.

The engines by name: ours, and those that other packages register under `isthmus.launchers`.

An engine of another package is a callable that takes its options, a mapping of names to values, and gives a `Launcher`.
Ours are imported when they are used.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import NamedTuple, Protocol, cast, runtime_checkable

import msgspec

from isthmus.errors import IsthmusError, UserError, unknown_name
from isthmus.extensions import import_object, load_third_party, read_options, third_party


class AgentState(Enum):
    """How an agent is, as far as its engine knows."""

    QUEUED = "queued"  # the engine has no node for it yet, and starts it when it has one: its job was requeued, say
    STARTING = "starting"  # it has a node, and does not run there yet
    RUNNING = "running"
    ENDED = "ended"  # with exit code 0: it was dismissed
    LOST = "lost"  # it ended by an error, or with its node


class AgentSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One agent to start."""

    name: str  # its name in the fleet
    arguments: tuple[str, ...] = ()  # arguments of `isthmus join`, besides name, ticket and state folder
    island: bool = False  # it runs under torchrun: the accelerators of its node are one device
    ticket: str
    """A secret. It travels in files of mode 600, on standard input, or as a secret of the engine; never in a command
    line or a log."""

    def __repr__(self) -> str:
        return f"AgentSpec(name={self.name!r}, arguments={self.arguments!r}, island={self.island})"


@runtime_checkable
class Renders(Protocol):
    """A `Launcher` that can show what it hands to its engine."""

    def render(self, agents: Sequence[AgentSpec], folder: Path) -> str:
        """Return the script or manifest that `start` would hand over, without tickets. Nothing is made or asked for,
        and the engine need not be there. UserError for options of which nothing can be made."""
        ...


class Launcher(Protocol):
    """An engine, made of its options. One thread at a time calls it. PeerError where the engine refuses or fails."""

    @property
    def restarts(self) -> bool:
        """Return whether `restart` can bring a lost agent back."""
        ...

    @property
    def head(self) -> str:
        """A host of the cluster. The coordinator is reached by this machine's address on the route to it. Empty where
        every node is this machine. Called after `check`."""
        ...

    def check(self) -> None:
        """UserError, in one line that says what to install or start, where the engine is missing, too old or
        unreachable. Nothing is started."""

    def nodes(self) -> int | None:
        """Return how many nodes the engine has; None where it starts as many as it is asked for."""
        ...

    def start(self, agents: Sequence[AgentSpec], folder: Path, log: Callable[[str, str], None]) -> None:
        """One agent per node. Returns once the engine has accepted them. `folder` is private (mode 0700); `stop`
        removes what the launcher keeps there. `log(name, line)` is given what an agent prints, from any thread, until
        `stop`."""

    def states(self) -> Mapping[str, AgentState]:
        """Return the state of every agent now, by name."""
        ...

    def restart(self, agent: AgentSpec) -> None:
        """In place of the lost agent of this name, on any free node, with a new ticket."""

    def stop(self) -> None:
        """End all agents and give back everything that the engine holds for them: processes, allocations, groups,
        secrets, files. Again is no error."""


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=auto")


def join_arguments(agent: AgentSpec, *state: str) -> list[str]:
    """Return the arguments of `isthmus`. `state` are options that say where the agent's key and its ticket are:
    `--state FOLDER`, `--attached` or `--ticket-file FILE`."""
    return ["join", "--name", agent.name, *state, *agent.arguments]


def agent_command(agent: AgentSpec, python: str, *state: str) -> list[str]:
    """`isthmus join` by this interpreter of the node, under torchrun for an island. `state` as of `join_arguments`."""
    start = (*TORCHRUN, "-m", "isthmus") if agent.island else ("-m", "isthmus")
    return [python, *start, *join_arguments(agent, *state)]


_BEGIN = """\
umask 077
ticket={ticket}
state={base}/$(sha256sum < "$ticket" | cut -c 1-16)
case "${number}" in
"""


def agent_script(agents: Sequence[AgentSpec], number: str, ticket: str, base: str, python: str = "python3") -> str:
    """For a POSIX shell. `number` is the variable with the node's number, from 0; `ticket` the path of its ticket's
    file, as a word of the shell, and `base` the folder of states. An agent that comes back with the same ticket finds
    its key there; with a new ticket it is a new member."""
    lines = [_BEGIN.format(ticket=ticket, base=base, number=number)]
    for place, agent in enumerate(agents):
        start, _, rest = shlex.join(agent_command(agent, python, "--state", "STATE")).partition(" --state STATE")
        lines.append(f'{place}) exec {start} --state "$state"{rest} < "$ticket" ;;\n')
    return "".join([*lines, "esac\n"])


ENTRY_POINTS = "isthmus.launchers"


class ClusterEngine(NamedTuple):
    """One of our engines, as `module:name`."""

    launcher: str  # a class that is built with the options
    options: str  # a struct of its options


def _ours(module: str, name: str) -> ClusterEngine:
    where = f"isthmus.runtime.launchers.{module}"
    return ClusterEngine(f"{where}:{name}Launcher", f"{where}:{name}Options")


_OURS: Mapping[str, ClusterEngine] = {
    "local": _ours("local", "Local"),
    "ray": _ours("ray", "Ray"),
    "ssh": _ours("ssh", "Ssh"),
    "slurm": _ours("slurm", "Slurm"),
    "kubernetes": _ours("kubernetes", "Kubernetes"),
    "skypilot": _ours("skypilot", "SkyPilot"),
}


def engine_names() -> list[str]:
    """Every name that `isthmus up --on` takes, sorted. Ours win over a third party's of the same name."""
    return sorted({*_OURS, *third_party(ENTRY_POINTS)})


def open_launcher(engine: str, options: Mapping[str, object]) -> Launcher:
    """The engine's launcher; nothing is started or checked. UserError for an unknown engine, option or value."""
    if engine in _OURS:
        ours = _OURS[engine]
        struct = cast("type[msgspec.Struct]", import_object("--on", ours.options))
        launcher = cast("Callable[[msgspec.Struct], Launcher]", import_object("--on", ours.launcher))
        return launcher(read_options(f"--on {engine}:", _with_text(options, struct), struct))
    others = third_party(ENTRY_POINTS)
    if engine not in others:
        raise unknown_name("--on", engine, engine_names())
    load = load_third_party(others[engine])
    if not callable(load):
        raise UserError(f"--on {engine}: got {load!r}, expected a callable that takes options")
    try:
        return cast("Callable[[Mapping[str, object]], Launcher]", load)(options)
    except IsthmusError:
        raise
    except Exception as e:
        raise UserError(f"--on {engine}: {type(e).__name__}: {e}") from e


def _with_text(options: Mapping[str, object], struct: type[msgspec.Struct]) -> dict[str, object]:
    """With numbers as text where an option is text: `cpu=4` on a command line is read as a number."""
    text = {field.encode_name for field in msgspec.structs.fields(struct) if field.type is str}
    return {
        key: str(value) if key in text and isinstance(value, int | float) and not isinstance(value, bool) else value
        for key, value in options.items()
    }
