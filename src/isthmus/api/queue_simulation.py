"""When the jobs of a queue end on a fleet: each is simulated as by itself, one after another."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from isthmus.api.forecast import Simulating
from isthmus.api.observer import Observer
from isthmus.api.run_job import program_of
from isthmus.errors import PeerError, UserError, unknown_name
from isthmus.federated.job import FederatedJob
from isthmus.fleet import resolve_fleet
from isthmus.job import Job
from isthmus.runtime.processes.signals import Stop
from isthmus.simulator import Fault
from isthmus.simulator.options import NOT_AT_WORK, WithoutEffect, without_effect_document, without_effect_lines
from isthmus.simulator.queue import RunOfJob, SimulatedJob, simulate_queue
from isthmus.units import format_duration


class SimulatedQueue(msgspec.Struct, frozen=True, kw_only=True):
    """The jobs, in the order in which they were handed in."""

    jobs: tuple[SimulatedJob, ...]
    without_effect: WithoutEffect

    @property
    def exit_code(self) -> int:
        """Return that of a lost run where a job fails or never begins."""
        return 0 if all(job.state == "done" for job in self.jobs) else PeerError.exit_code

    def lines(self) -> list[str]:
        jobs = [_line(number, job) for number, job in enumerate(self.jobs, 1)]
        return [*jobs, *without_effect_lines(self.without_effect)]

    def summary(self) -> dict[str, object]:
        """Return the jobs as JSON has them. Times are seconds since they were handed in."""
        without = without_effect_document(self.without_effect)
        return {"jobs": msgspec.to_builtins(self.jobs), "without_effect": without}


def simulate_jobs(
    jobs: Sequence[Job | FederatedJob], faults: Sequence[Fault], observer: Observer, stop: Stop
) -> SimulatedQueue:
    """Simulate them as `isthmus serve` runs what is submitted. UserError for a job that cannot run, one on another
    fleet, or a fault that none of its devices can have."""
    named = [(job, resolve_fleet(job.fleet)) for job in jobs if job.fleet]
    for job, fleet in named:
        if fleet != named[0][1]:
            raise UserError(f"{job.name}: fleet: got {job.fleet!r}, expected {named[0][1].name!r} as of the job before")
    programs = [program_of(job) for job in jobs]
    struck = [set(program.fault_names) if faults else set[str]() for program in programs]
    known = set[str]().union(*struck)
    for fault in faults:
        if not _names(fault) <= known:
            raise unknown_name(f"device in {fault.option}", min(_names(fault) - known), known)

    def run(number: int, faults: tuple[Fault, ...]) -> RunOfJob:
        observer.note(f"simulating {jobs[number].name} ...")
        others = tuple((fault, NOT_AT_WORK) for fault in faults if not _names(fault) <= struck[number])
        faults = tuple(fault for fault in faults if _names(fault) <= struck[number])
        found = programs[number].simulated(Simulating(faults), observer, stop).as_job
        return found._replace(without_effect=found.without_effect + others)

    found = simulate_queue([job.name for job in jobs], run, faults)
    return SimulatedQueue(jobs=tuple(found.jobs), without_effect=found.without_effect)


def _names(fault: Fault) -> set[str]:
    return {name for name in (fault.device, fault.other) if name}


def _line(number: int, job: SimulatedJob) -> str:
    if job.began_s is None or job.ended_s is None:
        return f"{number} {job.name}: {job.detail or 'never begins'}"
    times = f"begins after {format_duration(job.began_s)}, {job.state} after {format_duration(job.ended_s)}"
    return f"{number} {job.name}: {times}{': ' if job.detail else ''}{job.detail}"
