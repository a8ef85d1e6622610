"""Which of the jobs that were handed in runs next, and what becomes of each.

    submit ──► queued ──► running ──► done, failed
                 ▲           │
                 │           ├──► stopped          somebody stops it
                 └───────────┴──── resume          somebody resumes it, or its coordinator is started again

One job runs at a time: the one that has waited longest. Pure: a host gives the jobs that a call is about, and keeps
them.
"""

from __future__ import annotations

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
    detail: str = ""  # why it failed


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

    def end(self, number: int, state: State, detail: str = "") -> None:
        """It runs no more; queued: it goes on later."""
        if state == "stopped" and self.jobs[number].wish == "stop and resume":
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
            self._change(number, state="stopped", ended_s=self.now_s)
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
            self._change(number, state="queued", wanted_s=self.now_s)
        else:
            raise UserError(f"job {number}: is {job.state}, expected a stopped or failed job")

    def _find(self, number: int) -> QueuedJob:
        if number not in self.jobs:
            raise UserError("job: no job has that number; see `isthmus jobs`")
        return self.jobs[number]

    def _change(self, number: int, **changed: object) -> None:
        self.jobs[number] = msgspec.structs.replace(self.jobs[number], **changed)
