"""Agents of this machine, forked from one process: they share the memory of what they import."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence

from isthmus.runtime.launchers.child_agents import GRACE_S, SIGNAL_S, state_of
from isthmus.runtime.launchers.launcher import AgentSpec, AgentState
from isthmus.runtime.processes.children import wait_for_children
from isthmus.runtime.processes.early_fork import fork_early, standing_for
from isthmus.runtime.processes.fork_server import ForkedProcess, ForkServer

SERVER = "isthmus.runtime.launchers.agent_fork_server"


def fork_agents_early() -> None:
    """For a command that will start agents here: see `early_fork`."""
    fork_early([sys.executable], os.environ, SERVER)


class ForkedAgents:
    """As `ChildAgents`. Where the process that they are forked from ends, they end too, and the next one is forked
    from another."""

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
            how = [sys.executable], os.environ
            self._server = standing_for(*how, SERVER) or ForkServer(*how, log, SERVER)
        return self._server

    def _read(self, name: str, output: int) -> None:
        with open(output, "rb") as lines:
            for line in lines:
                self._log(name, line.decode(errors="replace").rstrip())
