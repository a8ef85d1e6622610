"""Agents as processes of this machine: for tests, and to try a job on several devices here."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

import msgspec

from isthmus.runtime.launchers.agent_command import agent_command
from isthmus.runtime.launchers.child_agents import ChildAgents
from isthmus.runtime.launchers.launcher import AgentSpec, AgentState


class LocalOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Agents as processes of this machine; no options."""


class LocalLauncher:
    """A `Launcher`."""

    restarts = True
    head = ""

    def __init__(self, options: LocalOptions) -> None:
        self._agents: ChildAgents | None = None
        self._folder = Path()
        self._started = 0

    def check(self) -> None:
        """All that it needs is here."""

    def nodes(self) -> int | None:
        return None

    def start(self, agents: Sequence[AgentSpec], folder: Path, log: Callable[[str, str], None]) -> None:
        self._agents, self._folder = ChildAgents(log), folder / "local"
        for agent in agents:
            self._start(agent, self._agents)

    def states(self) -> Mapping[str, AgentState]:
        return {} if self._agents is None else self._agents.states()

    def restart(self, agent: AgentSpec) -> None:
        assert self._agents is not None, "started before"
        self._start(agent, self._agents)

    def stop(self) -> None:
        if self._agents is not None:
            self._agents.stop()
            shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, agent: AgentSpec, agents: ChildAgents) -> None:
        """With a folder of its own: one that was revoked needs another key."""
        self._started += 1
        state = self._folder / f"{self._started}-{quote(agent.name, safe='')}"
        agents.start(agent, agent_command(agent, sys.executable, "--state", str(state.absolute()), "--attached"))
