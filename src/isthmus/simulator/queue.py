"""A fleet's queue of jobs on a virtual clock: each job is simulated by its own program, with the faults of its time."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import msgspec

from isthmus.programs.queue import Queue, State
from isthmus.simulator.options import TOO_LATE, Fault, WithoutEffect


class RunOfJob(NamedTuple):
    seconds: float
    reason: str = ""  # why it is lost; empty: it is done
    needed: Collection[str] = ()  # devices without which it does not begin
    without_effect: WithoutEffect = ()


SimulateJob = Callable[[int, tuple[Fault, ...]], RunOfJob]
"""(number of the job, from 0 on; faults since it began) -> its run."""


class SimulatedJob(msgspec.Struct, frozen=True, kw_only=True):
    """A job of the queue. Times are seconds since the first job was handed in."""

    name: str
    state: State
    began_s: float | None
    ended_s: float | None
    detail: str = ""  # why it failed, or what it waits for


class QueueRun(NamedTuple):
    jobs: list[SimulatedJob]
    without_effect: WithoutEffect


def simulate_queue(names: Sequence[str], run: SimulateJob, faults: Sequence[Fault] = ()) -> QueueRun:
    """All jobs, which are handed in at once. A job begins when the one before has ended and the devices are there that
    its plan names."""
    queue, reasons, met = Queue({}, 0.0), dict.fromkeys(faults, TOO_LATE), set[Fault]()
    for number in range(len(names)):
        queue.submit(number)
    while (number := queue.begin()) is not None:
        begins_s, found, away = _begin(number, run, faults, queue.now_s, met)
        if away:
            queue.waits(number, away)
            break
        queue.jobs[number] = msgspec.structs.replace(queue.jobs[number], began_s=begins_s)
        queue.now_s = begins_s + found.seconds
        queue.end(number, "failed" if found.reason else "done", found.reason)
        without = dict(found.without_effect)
        for fault, struck in faults_since(faults, begins_s).items():
            if struck not in without:
                met.add(fault)
            elif without[struck] != TOO_LATE:
                reasons[fault] = without[struck]
    jobs = [
        SimulatedJob(name=name, state=job.state, began_s=job.began_s, ended_s=job.ended_s, detail=job.detail)
        for name, job in zip(names, (queue.jobs[number] for number in range(len(names))), strict=True)
    ]
    return QueueRun(jobs, tuple((fault, why) for fault, why in reasons.items() if fault not in met))


def _begin(
    number: int, run: SimulateJob, faults: Sequence[Fault], now_s: float, met: set[Fault]
) -> tuple[float, RunOfJob, Sequence[str]]:
    """When the job begins, its run, and the devices that it waits for without end. Adds the faults that it waits for
    to `met`."""
    begins_s = _back_s("", faults, now_s, met)
    while True:
        found = run(number, tuple(faults_since(faults, begins_s).values()))
        back_s = {device: _back_s(device, faults, begins_s, met) for device in ("", *found.needed)}
        here_s, away = max(back_s.values()), sorted(device for device in back_s if math.isinf(back_s[device]))
        if away or here_s == begins_s:
            return begins_s, found, away
        begins_s = here_s


def _back_s(device: str, faults: Sequence[Fault], from_s: float, met: set[Fault]) -> float:
    """From when on the device, or without a name the coordinator, is there."""
    kinds = ("lost", "silent") if device else ("coordinator",)
    for fault in sorted(faults, key=lambda fault: fault.time_s):
        if fault.kind in kinds and fault.device == device and fault.time_s < from_s < fault.time_s + fault.lasts_s:
            from_s = fault.time_s + fault.lasts_s
            met.add(fault)
    return from_s


def faults_since(faults: Sequence[Fault], begins_s: float) -> dict[Fault, Fault]:
    """Return the faults of a run that begins then, each by its own clock: those that are over are not among them."""
    found = dict[Fault, Fault]()
    for fault in faults:
        time_s, lasts_s, ends_s = fault.time_s - begins_s, fault.lasts_s, fault.time_s + fault.lasts_s
        if time_s < 0:
            if fault.kind in ("join", "leave") or ends_s <= begins_s:
                continue  # the device is there, or left an earlier job
            time_s, lasts_s = 0.0, ends_s - begins_s
        found[fault] = msgspec.structs.replace(fault, time_s=time_s, lasts_s=lasts_s)
    return found
