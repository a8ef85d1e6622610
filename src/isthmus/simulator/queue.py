"""A fleet's queue of jobs on a virtual clock: each job is simulated by its own program, with the faults of its time."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import msgspec

from isthmus.programs.queue import Queue, State
from isthmus.simulator.options import Fault


class RunOfJob(NamedTuple):
    seconds: float
    reason: str = ""  # why it is lost; empty: it is done
    needed: Collection[str] = ()  # devices without which it does not begin


SimulateJob = Callable[[int, tuple[Fault, ...]], RunOfJob]
"""(number of the job, from 0 on; faults since it began) -> its run."""


class SimulatedJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job of the queue. Times are seconds since the first job was handed in."""

    name: str
    state: State
    began_s: float | None
    ended_s: float | None
    detail: str = ""  # why it failed, or what it waits for


def simulate_queue(names: Sequence[str], run: SimulateJob, faults: Sequence[Fault] = ()) -> list[SimulatedJob]:
    """All jobs, which are handed in at once. A job begins when the one before has ended and the devices are there that
    its plan names."""
    queue = Queue({}, 0.0)
    for number in range(len(names)):
        queue.submit(number)
    while (number := queue.begin()) is not None:
        begins_s, found, away = _begin(number, run, faults, queue.now_s)
        if away:
            queue.waits(number, away)
            break
        queue.jobs[number] = msgspec.structs.replace(queue.jobs[number], began_s=begins_s)
        queue.now_s = begins_s + found.seconds
        queue.end(number, "failed" if found.reason else "done", found.reason)
    return [
        SimulatedJob(name=name, state=job.state, began_s=job.began_s, ended_s=job.ended_s, detail=job.detail)
        for name, job in zip(names, (queue.jobs[number] for number in range(len(names))), strict=True)
    ]


def _begin(
    number: int, run: SimulateJob, faults: Sequence[Fault], now_s: float
) -> tuple[float, RunOfJob, Sequence[str]]:
    """When the job begins, its run, and the devices that it waits for without end."""
    begins_s = _back_s("", faults, now_s)
    while True:
        found = run(number, faults_since(faults, begins_s))
        back_s = {device: _back_s(device, faults, begins_s) for device in ("", *found.needed)}
        here_s, away = max(back_s.values()), sorted(device for device in back_s if math.isinf(back_s[device]))
        if away or here_s == begins_s:
            return begins_s, found, away
        begins_s = here_s


def _back_s(device: str, faults: Sequence[Fault], from_s: float) -> float:
    """From when on the device, or without a name the coordinator, is there."""
    kinds = ("lost", "silent") if device else ("coordinator",)
    for fault in sorted(faults, key=lambda fault: fault.time_s):
        if fault.kind in kinds and fault.device == device and fault.time_s < from_s < fault.time_s + fault.lasts_s:
            from_s = fault.time_s + fault.lasts_s
    return from_s


def faults_since(faults: Sequence[Fault], begins_s: float) -> tuple[Fault, ...]:
    """Return the faults of a run that begins then, by its own clock: those that are over are not among them."""
    found = list[Fault]()
    for fault in faults:
        time_s, lasts_s, ends_s = fault.time_s - begins_s, fault.lasts_s, fault.time_s + fault.lasts_s
        if time_s < 0:
            if fault.kind in ("join", "leave") or ends_s <= begins_s:
                continue  # the device is there, or left an earlier job
            time_s, lasts_s = 0.0, ends_s - begins_s
        found.append(msgspec.structs.replace(fault, time_s=time_s, lasts_s=lasts_s))
    return tuple(found)
