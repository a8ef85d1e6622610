"""A fleet's queue, whatever people ask and whatever strikes its coordinator and devices.

One job runs at a time, in the order in which jobs wait, on devices that are there; a job that a killed coordinator ran
goes on first; a job that is stopped runs no more until somebody resumes it; each other job ends.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence

from isthmus.errors import UserError
from isthmus.programs.queue import Queue, State
from isthmus.simulator.options import Fault
from isthmus.simulator.queue import RunOfJob, SimulatedJob, faults_since, simulate_queue

DEVICES = ("d0", "d1", "d2")


class DrawnQueue:
    """What happened, one entry after another."""

    def __init__(self) -> None:
        self.ended: list[tuple[float, int, State]] = []
        self.asked = Counter[str]()
        self.jobs: list[SimulatedJob] = []


def drawn(seed: int) -> DrawnQueue:
    draw, found = random.Random(seed), DrawnQueue()
    _people(draw, found)
    _fleet(draw, found)
    return found


def _people(draw: random.Random, found: DrawnQueue) -> None:
    """Jobs are handed in, stopped and resumed, and the coordinator is killed, until all have ended."""
    queue, running, stopped, first = Queue({}, 0.0), None, set[int](), None
    for time_s in range(60):
        queue.now_s = float(time_s)
        acts = ["submit", "submit", "stop", "resume", "kill", "end", "wait"] if time_s < 40 else ["end"]
        act, number = draw.choice(acts), draw.randrange(max(1, len(queue.jobs)))
        try:
            if act == "submit":
                queue.submit(len(queue.jobs))
            elif act == "stop":
                queue.stop(number)
                stopped.add(number)
            elif act == "resume":
                queue.resume(number)
                stopped.discard(number)
            found.asked[act] += 1
        except UserError:
            found.asked[f"{act} refused"] += 1
        if act == "kill" and running is not None:
            ran = running not in stopped and queue.jobs[running].state == "running"
            first, running = running if ran else None, None
            queue.restart()
        elif act == "end" and running is not None:
            wished = queue.jobs[running].wish or queue.jobs[running].state == "stopped"
            queue.end(running, "stopped" if wished else draw.choice(("done", "failed")))
            found.ended.append((time_s, running, queue.jobs[running].state))
            running = None
        if running is not None and queue.jobs[running].state == "running" and draw.random() < 0.2:
            queue.waits(running, ["d0"])
            assert (queue.jobs[running].state == "running") == bool(queue.jobs[running].wish)
            if draw.random() < 0.5:
                queue.begun(running)
        if running is None and (begun := queue.begin()) is not None:
            assert begun not in stopped and first in (None, begun), f"{begun} begins, not {first}"
            others = [job.wanted_s for job in queue.jobs.values() if job.state == "queued"]
            assert all(queue.jobs[begun].wanted_s <= wanted_s for wanted_s in others)
            running, first = begun, None
        states = Counter(job.state for job in queue.jobs.values())
        assert states["running"] == (running is not None and queue.jobs[running].state == "running")
    assert {number for number, job in queue.jobs.items() if job.state == "stopped"} <= stopped


def _fleet(draw: random.Random, found: DrawnQueue) -> None:
    """Jobs need some of the devices, which are lost and come back while jobs run or wait."""
    faults = tuple(
        Fault(
            time_s=draw.uniform(0.0, 40.0),
            kind=kind,
            device="" if kind == "coordinator" else draw.choice(DEVICES),
            lasts_s=math.inf
            if kind == "slow"
            else draw.choice((0.5, 5.0, *([30.0, math.inf] if kind != "coordinator" else []))),
            factor=2.0,
        )
        for kind in draw.choices(("lost", "silent", "slow", "leave", "coordinator"), k=draw.randint(0, 5))
    )
    needed = [draw.sample(DEVICES, draw.randint(0, 3)) for _ in range(draw.randint(1, 5))]
    works_s = [draw.uniform(0.1, 15.0) for _ in needed]
    fails = [draw.random() < 0.2 for _ in needed]

    def run(number: int, faults: tuple[Fault, ...]) -> RunOfJob:
        assert all(fault.time_s >= 0 and fault.lasts_s > 0 for fault in faults)
        slower = 2.0 if any(fault.kind == "slow" and fault.time_s == 0 for fault in faults) else 1.0
        return RunOfJob(works_s[number] * slower, "it failed" if fails[number] else "", needed[number])

    found.jobs = simulate_queue([f"job {number}" for number in range(len(needed))], run, faults).jobs
    before_s = 0.0
    for number, job in enumerate(found.jobs):
        if job.began_s is None or job.ended_s is None:
            assert job.state == "queued" and job.detail.startswith("waits for d")
            assert all(later.state == "queued" for later in found.jobs[number:])
            break
        assert before_s <= job.began_s < job.ended_s and job.state == ("failed" if fails[number] else "done")
        away = [
            f.device
            for f in faults_since(faults, job.began_s).values()
            if f.time_s == 0 and f.kind in ("lost", "silent")
        ]
        assert not set(away) & set(needed[number])
        before_s = job.ended_s


def check_harm(runs: Sequence[DrawnQueue]) -> None:
    asked = sum((found.asked for found in runs), Counter[str]())
    assert all(asked[act] > len(runs) / 2 for act in ("submit", "stop", "resume", "kill", "stop refused")), asked
    jobs = [job for found in runs for job in found.jobs]
    assert any(job.state == "queued" for job in jobs) and any(job.state == "failed" for job in jobs)
    assert sum(job.state == "done" for job in jobs) > len(jobs) / 3


def line(found: DrawnQueue) -> str:
    return f"{found.ended} {[(job.state, job.began_s, job.ended_s, job.detail) for job in found.jobs]}"
