"""A task of a Slurm allocation: starts the agent of its number, ends it, and notes how it is, in a folder that all
nodes share.

    FOLDER/agents/NAME/   ticket    handed to the agent on standard input and removed
                          state-N/  the agent's key and certificate: a requeued task needs no new ticket
                          attempt   N, of the newest task for this name; an older task leaves the name alone
                          status    `AgentStatus`
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Sequence
from enum import Enum
from functools import partial
from pathlib import Path
from typing import NoReturn
from urllib.parse import quote

import msgspec

from isthmus.atomic_write import atomic_write
from isthmus.extensions import import_extra
from isthmus.runtime.launchers.agent_command import agent_command
from isthmus.runtime.launchers.launcher import AgentSpec

GRACE_S = 20.0
"""How long an agent may take to end. Slurm kills 30 s after SIGTERM (KillWait)."""
NO_TICKET = b"-"
"""First line for an agent that is a member already."""


class AgentStatus(Enum):
    """What a task knows of its agent."""

    WAITING = "waiting"
    """No task has started it, or Slurm has taken the node of its task."""
    RUNNING = "running"
    ENDED = "ended"
    LOST = "lost"


class AgentFolder:
    """What the launcher and a task share of one agent."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder / "agents" / quote(name, safe="")
        self._ticket = self._folder / "ticket"
        self._attempt, self._status = self._folder / "attempt", self._folder / "status"

    def prepare(self, ticket: str, attempt: int) -> None:
        """Before a task is submitted."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        atomic_write(self._ticket, ticket.encode(), private=True)
        atomic_write(self._status, AgentStatus.WAITING.value.encode())
        atomic_write(self._attempt, str(attempt).encode())

    def attempt(self) -> int:
        return int(self._attempt.read_text())

    def state(self) -> Path:
        """Each attempt is another member of the fleet, with a key of its own."""
        return self._folder / f"state-{self.attempt()}"

    def status(self) -> AgentStatus:
        return AgentStatus(self._status.read_text())

    def note(self, status: AgentStatus) -> None:
        atomic_write(self._status, status.value.encode(), durable=False)

    def take_ticket(self) -> bytes:
        """Empty where it was used."""
        found = self._ticket.read_bytes() if self._ticket.exists() else b""
        self._ticket.unlink(missing_ok=True)
        return found

    def put_back(self, ticket: bytes) -> None:
        """For the next task, unless the agent has become a member. Of several devices on a node each has a folder of
        its own below the agent's."""
        if ticket and not any(self.state().rglob("membership.json")):
            atomic_write(self._ticket, ticket, private=True)


class Placed(msgspec.Struct, frozen=True):
    """An agent of an allocation, without its ticket."""

    name: str
    arguments: tuple[str, ...]
    """Of `isthmus join`."""
    island: bool
    attempt: int

    def command(self, state: Path) -> list[str]:
        agent = AgentSpec(name=self.name, arguments=self.arguments, island=self.island, ticket="")
        return agent_command(agent, sys.executable, "--state", str(state), "--attached")


class AgentTask:
    """What submitit calls in each task, and again after a requeue. submitit pickles it by the names of its classes,
    with names and arguments of agents."""

    def __init__(self, folder: Path, agents: Sequence[Placed]) -> None:
        self._folder, self._agents = folder, tuple(agents)

    def __call__(self) -> None:
        """SystemExit where the task was signalled, or the agent failed."""
        environment = import_extra("submitit").JobEnvironment()
        number: int = environment.global_rank
        placed = self._agents[number]
        shared = AgentFolder(self._folder, placed.name)
        if shared.attempt() != placed.attempt or shared.status() is AgentStatus.ENDED:
            return
        preempted = signal.Signals[f"SIG{environment.USR_SIG}"]
        signal.signal(signal.SIGTERM, _leave)
        if number:  # of task 0 submitit's handler requeues the job, for all tasks
            signal.signal(preempted, _leave)
        code = _run(placed, shared, preempted)
        shared.note(AgentStatus.LOST if code else AgentStatus.ENDED)
        if code:
            print(f"`isthmus join` ended with code {code}", flush=True)
            raise SystemExit(1)

    def checkpoint(self) -> object:
        """What submitit runs after a requeue: the same, as the state of each agent is in the shared folder."""
        return import_extra("submitit").helpers.DelayedSubmission(self)


def _run(placed: Placed, shared: AgentFolder, preempted: signal.Signals) -> int:
    """The agent's exit code. The agent ends with this task, whatever ends the task: its standard input closes."""
    # Slurm signals all processes of a step; that an agent has to leave is for its task to say.
    ignored = partial(signal.signal, preempted, signal.SIG_IGN)
    agent = subprocess.Popen(placed.command(shared.state()), stdin=subprocess.PIPE, preexec_fn=ignored)
    assert agent.stdin is not None, "asked for"
    ticket = shared.take_ticket()
    try:
        with contextlib.suppress(OSError):  # it has ended, as its code tells
            agent.stdin.write((ticket or NO_TICKET) + b"\n")
            agent.stdin.flush()
        shared.note(AgentStatus.RUNNING)
        return agent.wait()
    finally:
        if agent.returncode is None:
            _end(agent)
            shared.put_back(ticket)
            shared.note(AgentStatus.WAITING)


def _end(agent: subprocess.Popen[bytes]) -> None:
    agent.terminate()
    try:
        agent.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        agent.kill()
        agent.wait()


def _leave(number: int, _: object) -> NoReturn:
    raise SystemExit(128 + number)
