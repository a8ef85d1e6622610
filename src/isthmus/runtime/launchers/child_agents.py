"""Agents whose commands are processes of this machine: the agents themselves, or programs that start them elsewhere.

Each gets its ticket as the first line of its standard input, which stays open: an agent with `--attached` ends when it
closes, also where this process is killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Collection, Mapping, Sequence

from isthmus.errors import PeerError
from isthmus.runtime.launchers.launcher import AgentSpec, AgentState
from isthmus.runtime.processes.children import wait_for_children

GRACE_S = 15.0  # for an agent to end by itself, with its device processes
SIGNAL_S = 2.0


class ChildAgents:
    """Agents that are child processes. A thread for each calls `log(name, line)` for the lines that it prints."""

    def __init__(self, log: Callable[[str, str], None]) -> None:
        self._log = log
        self._agents: dict[str, _ChildAgent] = {}

    def start(self, agent: AgentSpec, command: Sequence[str]) -> None:
        """In place of one of this name that has ended. PeerError where the command cannot be run."""
        before = self._agents.pop(agent.name, None)
        if before is not None:
            before.signal(signal.SIGKILL)
            before.let_go()
        self._agents[agent.name] = _ChildAgent(agent, command, self._log)

    def states(self) -> Mapping[str, AgentState]:
        return {name: state_of(agent.poll()) for name, agent in self._agents.items()}

    def stop(self) -> None:
        """Each ends by itself once its input closes. What does not is killed, with its process group."""
        _end(self._agents.values())
        self._agents.clear()


def state_of(code: int | None) -> AgentState:
    """Return the state of a process with this exit code; None while it runs."""
    if code is None:
        return AgentState.RUNNING
    return AgentState.LOST if code else AgentState.ENDED


def _end(agents: Collection[_ChildAgent]) -> None:
    for agent in agents:
        agent.close_input()
    wait_for_children(agents, GRACE_S)
    for number in (signal.SIGTERM, signal.SIGKILL):
        for agent in agents:
            agent.signal(number)
        wait_for_children(agents, SIGNAL_S)
    for agent in agents:
        agent.let_go()


class _ChildAgent:
    """A `Child`, leader of a process group: Ctrl-C reaches the command that started it alone."""

    def __init__(self, agent: AgentSpec, command: Sequence[str], log: Callable[[str, str], None]) -> None:
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, process_group=0
            )
        except OSError as e:
            raise PeerError(f"{agent.name}: cannot start {command[0]}: {e.strerror or e}") from None
        assert self._process.stdin is not None, "asked for"
        with contextlib.suppress(OSError):  # it has ended, as its state tells
            self._process.stdin.write(f"{agent.ticket}\n".encode())
            self._process.stdin.flush()
        self._reading = threading.Thread(target=self._read, args=(agent.name, log), name="agent output", daemon=True)
        self._reading.start()

    def _read(self, name: str, log: Callable[[str, str], None]) -> None:
        assert self._process.stdout is not None, "asked for"
        for line in self._process.stdout:
            log(name, line.decode(errors="replace").rstrip())

    def poll(self) -> int | None:
        return self._process.poll()

    def lives(self) -> bool:
        return self.poll() is None

    def signal(self, number: int) -> None:
        """To its whole group, in which torchrun's ranks are too."""
        if self.lives():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def close_input(self) -> None:
        assert self._process.stdin is not None, "asked for"
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def let_go(self) -> None:
        """The process has ended, or cannot be ended."""
        self.close_input()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(SIGNAL_S)
        self._reading.join(SIGNAL_S)
