"""A task of a Slurm allocation: starts the agent of its number, ends it, and notes how it is, in a folder that all
nodes share.

    FOLDER/tasks-N.json   agents of the Nth job, by the number of their task
    FOLDER/beat           changes for as long as the launcher runs
    FOLDER/agents/NAME/   ticket    handed to the agent on standard input and removed
                          state-N/  the agent's key and certificate: a requeued task needs no new ticket
                          attempt   N, of the newest task for this name; an older task leaves the name alone
                          status    `AgentStatus`
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from enum import Enum
from functools import partial
from pathlib import Path
from typing import NoReturn
from urllib.parse import quote

import msgspec

from isthmus.atomic_write import atomic_write
from isthmus.extensions import import_extra
from isthmus.runtime.launchers.launcher import AgentSpec, agent_command

GRACE_S = 20.0  # how long an agent may take to end. Slurm kills 30 s after SIGTERM (KillWait).
LOOK_S = 20.0
BEAT_S = 30.0
GONE_S = 900.0  # without a beat for so long the launcher is gone
MOST_REQUEUES = 100  # the most requeues of a job at its time limit
NO_TICKET = b"-"  # first line for an agent that is a member already


class AgentStatus(Enum):
    """The state of a task's agent."""

    WAITING = "waiting"  # no task has started it, or Slurm has taken the node of its task
    RUNNING = "running"
    ENDED = "ended"
    LOST = "lost"


class SharedFolder:
    """Files that the launcher and all tasks share."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._beat = path / "beat"
        self._next_s = 0.0

    def tasks(self, number: int) -> Path:
        """The file with the agents of a job."""
        return self.path / f"tasks-{number}.json"

    def beat(self) -> None:
        """The launcher runs."""
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + BEAT_S
            atomic_write(self._beat, b"%f" % now_s, durable=False)

    def last_beat(self) -> bytes:
        """Return the newest beat, by a clock that is not this node's: compare it for equality only."""
        try:
            return self._beat.read_bytes()
        except OSError:
            return b""


class AgentFolder:
    """Files of one agent that the launcher and its task share."""

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
    arguments: tuple[str, ...]  # arguments of `isthmus join`
    island: bool
    attempt: int

    def command(self, state: Path) -> list[str]:
        agent = AgentSpec(name=self.name, arguments=self.arguments, island=self.island, ticket="")
        return agent_command(agent, sys.executable, "--state", str(state), "--attached")


class SlurmTask:
    """One task of the allocation, on a node of its own."""

    def __init__(self, tasks: Path) -> None:
        """`tasks`: the file with the agents of the allocation."""
        self._folder = SharedFolder(tasks.parent)
        self._agents = msgspec.json.decode(tasks.read_bytes(), type=list[Placed])
        self._environment = import_extra("submitit").JobEnvironment()
        self._number: int = self._environment.global_rank

    def run(self) -> int:
        """The exit code. SystemExit where the task was signalled."""
        placed = self._agents[self._number]
        shared = AgentFolder(self._folder.path, placed.name)
        if shared.attempt() != placed.attempt or shared.status() is AgentStatus.ENDED:
            return 0
        preempted = signal.Signals[f"SIG{self._environment.USR_SIG}"]
        signal.signal(signal.SIGTERM, _leave)
        signal.signal(preempted, _leave)
        try:
            code = self._run(placed, shared, preempted)
        except SystemExit as e:
            if e.code == 128 + preempted and not self._number:
                self._requeue()
            raise
        shared.note(AgentStatus.LOST if code else AgentStatus.ENDED)
        if code:
            print(f"`isthmus join` ended with code {code}", flush=True)
        return 1 if code else 0

    def _requeue(self) -> None:
        """The whole job, at its time limit: for the other tasks too. Where Slurm preempts a job it requeues it."""
        if int(os.environ.get("SLURM_RESTART_COUNT", "0")) >= MOST_REQUEUES:
            print(f"the job was requeued {MOST_REQUEUES} times: it ends", flush=True)
            return
        try:
            self._environment._requeue(0)
        except (OSError, subprocess.SubprocessError) as e:
            print(f"the job is not requeued: {e}", flush=True)

    def _run(self, placed: Placed, shared: AgentFolder, preempted: signal.Signals) -> int:
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
            return self._wait(agent)
        finally:
            if agent.returncode is None:
                _end(agent)
                shared.put_back(ticket)
                shared.note(AgentStatus.WAITING)

    def _wait(self, agent: subprocess.Popen[bytes]) -> int:
        """Until the agent ends, or the launcher is gone: it was killed, and the run with it."""
        beat, beat_s = b"", time.monotonic()
        while True:
            try:
                return agent.wait(LOOK_S)
            except subprocess.TimeoutExpired:
                now, now_s = self._folder.last_beat(), time.monotonic()
            if now != beat:
                beat, beat_s = now, now_s
            elif now_s - beat_s > GONE_S:
                print(f"`isthmus up` has given no sign of life for {GONE_S:g} s: the agent ends", flush=True)
                raise SystemExit(0)


def _end(agent: subprocess.Popen[bytes]) -> None:
    agent.terminate()
    try:
        agent.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        agent.kill()
        agent.wait()


def _leave(number: int, _: object) -> NoReturn:
    """Slurm may send several signals, one after the other."""
    for another in (signal.SIGTERM, number):
        signal.signal(another, signal.SIG_IGN)
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(SlurmTask(Path(sys.argv[1])).run())
