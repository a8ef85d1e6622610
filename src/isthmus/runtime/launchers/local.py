"""Agents as processes of this machine: for tests, and to try a job on several devices here.

Agents of this machine, forked from one process: they share the memory of what they import.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

import msgspec

from isthmus.runtime.launchers.agent_command import agent_command, join_arguments
from isthmus.runtime.launchers.child_agents import GRACE_S, SIGNAL_S, ChildAgents, state_of
from isthmus.runtime.launchers.launcher import AgentSpec, AgentState
from isthmus.runtime.processes.children import wait_for_children
from isthmus.runtime.processes.early_fork import fork_early, standing_for
from isthmus.runtime.processes.fork_server import ForkedProcess, ForkServer

SERVER = "isthmus.runtime.launchers.agent_fork_server"


def fork_agents_early() -> None:
    """For a command that will start agents here: see `early_fork`."""
    fork_early([sys.executable], _environment(), SERVER)


def _environment() -> dict[str, str]:
    """The environment of agents: they import modules from where this process does, as its user owns them."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


class ForkedAgents:
    """`ChildAgents` that are forked. Where their fork server ends, they end too, and the next is forked from
    another."""

    def __init__(self, log: Callable[[str, str], None]) -> None:
        self._log = log
        self._server: ForkServer | None = None
        self._agents: dict[str, ForkedProcess] = {}
        self._reading: list[threading.Thread] = []

    def start(self, agent: AgentSpec, arguments: Sequence[str]) -> None:
        """`isthmus` with these arguments, in place of an agent of this name that has ended."""
        before = self._agents.pop(agent.name, None)
        if before is not None:
            before.signal(signal.SIGKILL)
            before.let_go()
        output, end = os.pipe()
        try:
            title = f"isthmus join --name {agent.name}"
            process = self._server_for(end).spawn(arguments, title, "", None, end)
        finally:
            os.close(end)
        self._agents[agent.name] = process
        process.write(f"{agent.ticket}\n".encode())
        thread = threading.Thread(target=self._read, args=(agent.name, output), name="agent output", daemon=True)
        self._reading.append(thread)
        thread.start()

    def states(self) -> Mapping[str, AgentState]:
        return {name: state_of(process.poll()) for name, process in self._agents.items()}

    def stop(self) -> None:
        """Each ends by itself once its input closes. What does not is killed."""
        agents = list(self._agents.values())
        for agent in agents:
            agent.let_go()
        wait_for_children(agents, GRACE_S)
        for number in (signal.SIGTERM, signal.SIGKILL):
            for agent in agents:
                agent.signal(number)
            wait_for_children(agents, SIGNAL_S)
        if self._server is not None:
            self._server.end()
        for thread in self._reading:
            thread.join(SIGNAL_S)
        self._agents.clear()

    def _server_for(self, log: int) -> ForkServer:
        if self._server is None or self._server.gone:
            how = [sys.executable], _environment()
            self._server = standing_for(*how, SERVER) or ForkServer(*how, log, SERVER)
        return self._server

    def _read(self, name: str, output: int) -> None:
        with open(output, "rb") as lines:
            for line in lines:
                self._log(name, line.decode(errors="replace").rstrip())


class LocalOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Agents as processes of this machine; no options."""


class LocalLauncher:
    """A `Launcher`."""

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
