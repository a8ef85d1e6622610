"""Agents whose commands are processes of this machine: the agents themselves, or programs that start them elsewhere.

Each gets its ticket as the first line of its standard input, which stays open: an agent with `--attached` ends when it
closes, also where this process is killed.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Protocol

from isthmus.errors import PeerError
from isthmus.runtime.launchers.launcher import AgentSpec, AgentState
from isthmus.runtime.processes.forked import SIGNAL_S, Child, end_children, kill_child

GRACE_S = 15.0  # for an agent to end by itself, with its device processes


class AgentProcess(Child, Protocol):
    """A `Child` whose parent-death pipe is its standard input."""

    def write(self, data: bytes) -> None:
        """To its standard input; nothing where it has ended."""


class ChildAgents:
    """Agents that are child processes. A thread for each calls `log(name, line)` for the lines that it prints."""

    def __init__(self, log: Callable[[str, str], None]) -> None:
        self._log = log
        self._agents: dict[str, AgentProcess] = {}
        self._reading: list[threading.Thread] = []

    def start(self, agent: AgentSpec, command: Sequence[str]) -> None:
        """In place of one of this name that has ended. PeerError where the command cannot be run."""
        before = self._agents.pop(agent.name, None)
        if before is not None:
            kill_child(before)
        process, output = self.begin(agent.name, command)
        self._agents[agent.name] = process
        process.write(f"{agent.ticket}\n".encode())
        thread = threading.Thread(target=self._read, args=(agent.name, output), name="agent output", daemon=True)
        self._reading.append(thread)
        thread.start()

    def begin(self, name: str, command: Sequence[str]) -> tuple[AgentProcess, IO[bytes]]:
        """Return the process of an agent, and what it prints."""
        process = _ChildAgent(name, command)
        return process, process.output

    def states(self) -> Mapping[str, AgentState]:
        return {name: state_of(agent.poll()) for name, agent in self._agents.items()}

    def stop(self) -> None:
        """Each ends by itself once its input closes. What does not is killed."""
        for agent in self._agents.values():
            agent.let_go()
        end_children(self._agents.values(), GRACE_S)
        self.close()
        for thread in self._reading:
            thread.join(SIGNAL_S)
        self._agents.clear()

    def close(self) -> None:
        """All agents have ended."""

    def _read(self, name: str, output: IO[bytes]) -> None:
        with output:
            for line in output:
                self._log(name, line.decode(errors="replace").rstrip())


def state_of(code: int | None) -> AgentState:
    """Return the state of a process with this exit code; None while it runs."""
    if code is None:
        return AgentState.RUNNING
    return AgentState.LOST if code else AgentState.ENDED


class _ChildAgent:
    """Leader of a process group: Ctrl-C reaches the command that started it alone."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, process_group=0
            )
        except OSError as e:
            raise PeerError(f"{name}: cannot start {command[0]}: {e.strerror or e}") from None
        assert self._process.stdin is not None and self._process.stdout is not None, "asked for"
        self._input, self.output = self._process.stdin, self._process.stdout

    def write(self, data: bytes) -> None:
        with contextlib.suppress(OSError):  # it has ended, as its state tells
            self._input.write(data)
            self._input.flush()

    def poll(self) -> int | None:
        return self._process.poll()

    def lives(self) -> bool:
        return self.poll() is None

    def signal(self, number: int) -> None:
        """To its whole group, in which torchrun's ranks are too."""
        if self.lives():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def let_go(self) -> None:
        with contextlib.suppress(OSError):
            self._input.close()
