"""A launcher starts one agent per node for a fleet, watches the agents, starts lost ones again, and ends them all.

An agent is `isthmus join` on a node. The engine carries nothing else: data of a run stay on the links between devices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Protocol, runtime_checkable

import msgspec


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
