"""Agents as processes of this machine: for tests, and to try a job on several devices here.

Agents of this machine, forked from one process: they share the memory of what they import.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO
from urllib.parse import quote

import msgspec

from isthmus.runtime.launchers.child_agents import AgentProcess, ChildAgents
from isthmus.runtime.launchers.launcher import AgentSpec, AgentState, agent_command, join_arguments
from isthmus.runtime.processes.fork_server import ForkServer, fork_early, standing_for

SERVER = "isthmus.runtime.launchers.agent_fork_server"


def fork_agents_early() -> None:
    """For a command that will start agents here: see `fork_early`."""
    fork_early([sys.executable], _environment(), SERVER)


def _environment() -> dict[str, str]:
    """The environment of agents: they import modules from where this process does, as its user owns them."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


class ForkedAgents(ChildAgents):
    """Agents that are forked, by arguments of `isthmus`. Where their fork server ends, they end too, and the next is
    forked from another."""

    _server: ForkServer | None = None

    def begin(self, name: str, command: Sequence[str]) -> tuple[AgentProcess, IO[bytes]]:
        output, end = os.pipe()
        try:
            process = self._server_for(end).spawn(command, f"isthmus join --name {name}", "", None, end)
        finally:
            os.close(end)
        return process, open(output, "rb")

    def close(self) -> None:
        if self._server is not None:
            self._server.end()

    def _server_for(self, log: int) -> ForkServer:
        if self._server is None or self._server.gone:
            how = [sys.executable], _environment()
            self._server = standing_for(*how, SERVER) or ForkServer(*how, log, SERVER)
        return self._server


class LocalOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Agents as processes of this machine; no options."""


class LocalLauncher:
    restarts = True
    head = ""

    def __init__(self, options: LocalOptions) -> None:
        self._agents: ForkedAgents | None = None
        self._islands: ChildAgents | None = None  # torchrun starts them by itself
        self._folder = Path()
        self._started = 0

    def check(self) -> None:
        """All that it needs is here."""

    def nodes(self) -> int | None:
        return None

    def start(self, agents: Sequence[AgentSpec], folder: Path, log: Callable[[str, str], None]) -> None:
        self._folder = folder / "local"
        self._agents, self._islands = ForkedAgents(log), ChildAgents(log)
        for agent in agents:
            self.restart(agent)

    def states(self) -> Mapping[str, AgentState]:
        if self._agents is None or self._islands is None:
            return {}
        return {**self._agents.states(), **self._islands.states()}

    def restart(self, agent: AgentSpec) -> None:
        """With a folder of its own: an agent that was revoked needs another key."""
        assert self._agents is not None and self._islands is not None, "started before"
        self._started += 1
        folder = self._folder / f"{self._started}-{quote(agent.name, safe='')}"
        state = ("--state", str(folder.absolute()), "--attached")
        if agent.island:
            self._islands.start(agent, agent_command(agent, sys.executable, *state))
        else:
            self._agents.start(agent, join_arguments(agent, *state))

    def stop(self) -> None:
        if self._agents is not None and self._islands is not None:
            self._agents.stop()
            self._islands.stop()
            shutil.rmtree(self._folder, ignore_errors=True)
