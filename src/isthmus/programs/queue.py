"""Which of the jobs that were handed in runs next, and what becomes of each.

    submit ──► queued ──► running ──► done, failed
                 ▲           │
                 │           ├──► stopped          somebody stops it
                 └───────────┴──── resume          somebody resumes it, or its coordinator is started again

One job runs at a time: the one that has waited longest. It is queued until the devices are there without which it does
not begin (`waits`), and those behind it wait too. Pure: a host gives the jobs that a call is about, and keeps
them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from isthmus.errors import UserError

State = Literal["queued", "running", "done", "failed", "stopped"]


class QueuedJob(msgspec.Struct, frozen=True):
    """Times are seconds of the host's clock."""

    state: State
    wanted_s: float  # since when it waits; 0: before all others
    wish: Literal["", "stop", "stop and resume"] = ""  # what is asked of a job that runs
    began_s: float | None = None
    ended_s: float | None = None
    detail: str = ""  # why it failed, or what it waits for


class Queue:
    """Jobs by number. At least those that wait or run are there."""

    def __init__(self, jobs: dict[int, QueuedJob], now_s: float) -> None:
        self.jobs, self.now_s = jobs, now_s

    def submit(self, number: int) -> None:
        self.jobs[number] = QueuedJob("queued", self.now_s)

    def begin(self) -> int | None:
        """The one that has waited longest runs from now on."""
        waiting = [(job.wanted_s, number) for number, job in self.jobs.items() if job.state == "queued"]
        if not waiting:
            return None
        _, number = min(waiting)
        self._change(number, state="running", wish="", began_s=self.now_s, ended_s=None, detail="")
        return number

    def waits(self, number: int, devices: Iterable[str]) -> None:
        """It does not begin before these devices are there; nothing where somebody wants it to stop."""
        job = self.jobs[number]
        if job.state in ("queued", "running") and not job.wish:
            self._change(number, state="queued", began_s=None, detail=f"waits for {', '.join(devices)}")

    def begun(self, number: int) -> None:
        """The devices that it waited for are there."""
        if self.jobs[number].state == "queued":
            self._change(number, state="running", began_s=self.now_s, detail="")

    def end(self, number: int, state: State, detail: str = "") -> None:
        """It runs no more; queued: it goes on later."""
        job = self.jobs[number]
        if state == "stopped" and (job.wish == "stop and resume" or job.state == "queued"):  # resumed meanwhile
            state = "queued"
        self._change(number, state=state, ended_s=self.now_s, detail=detail)

    def restart(self) -> None:
        """Another coordinator was killed before this one. What it ran goes on before all that wait, but for a job that
        somebody had wanted to stop."""
        for number, job in list(self.jobs.items()):
            if job.state == "running" and job.wish == "stop":
                self._change(number, state="stopped")
            elif job.state == "running":
                self._change(number, state="queued", wanted_s=0.0)

    def stop(self, number: int) -> None:
        """Take it out of the queue; if it runs, have it save and end. UserError when it does neither."""
        job = self._find(number)
        if job.state == "queued":
            self._change(number, state="stopped", ended_s=self.now_s, detail="")
        elif job.state == "running":
            self._change(number, wish="stop")
        else:
            raise UserError(f"job {number}: is {job.state}, expected a waiting or running job")

    def resume(self, number: int) -> None:
        """Have it wait once more. One that is stopping ends first. UserError for one that waits, runs, or is done."""
        job = self._find(number)
        if job.state == "running" and job.wish == "stop":
            self._change(number, wish="stop and resume", wanted_s=self.now_s)
        elif job.state in ("stopped", "failed"):
            self._change(number, state="queued", wanted_s=self.now_s, detail="")
        else:
            raise UserError(f"job {number}: is {job.state}, expected a stopped or failed job")

    def _find(self, number: int) -> QueuedJob:
        if number not in self.jobs:
            raise UserError("job: no job has that number; see `isthmus jobs`")
        return self.jobs[number]

    def _change(self, number: int, **changed: object) -> None:
        self.jobs[number] = msgspec.structs.replace(self.jobs[number], **changed)
