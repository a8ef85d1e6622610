"""A job simulated with faults: detection, recovery, new plans and goodput, by the machines of a real run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec
from rich.console import RenderableType

from isthmus.api.forecast import StruckRun
from isthmus.api.make_plan import eval_edges, fleet_for, plan_for, simulation_options, steady_on
from isthmus.api.observer import Observer, searched
from isthmus.errors import UserError
from isthmus.fleet import Fleet
from isthmus.graph import OpGraph
from isthmus.job import Job, prepare
from isthmus.plans import Plan
from isthmus.report import draw_faults, plan_table
from isthmus.runtime.coordinator.plans import Plans
from isthmus.runtime.coordinator.run import run_spec
from isthmus.runtime.processes.signals import Stop
from isthmus.session.session import START_S
from isthmus.simulator import Fault, RecoveryTimes, SimulatedRun, simulate_run
from isthmus.simulator.effects import fault_text
from isthmus.simulator.options import parse_fault
from isthmus.simulator.queue import RunOfJob
from isthmus.simulator.run import RunSimulation, check_faults
from isthmus.trace import Trace
from isthmus.units import format_duration


def read_faults(options: Mapping[str, Sequence[str] | None]) -> tuple[Fault, ...]:
    """Read `--fault`, `--slow`, `--join` and `--leave`, in order of time. UserError for a value that is none."""
    found = [parse_fault(text, option) for option, texts in options.items() for text in texts or ()]
    return tuple(sorted(found, key=lambda fault: fault.time_s))


class FaultedRun(StruckRun, frozen=True, kw_only=True):
    """The simulated run, beside the same run without faults."""

    run: SimulatedRun
    plan: Plan  # the first one
    fleet: Fleet
    graph: OpGraph

    @property
    def trace(self) -> Trace:
        return self.run.trace

    @property
    def as_job(self) -> RunOfJob:
        return RunOfJob(self.run.seconds, self.run.finish.reason, self.plan.used, self.without_effect)

    @property
    def steps(self) -> int:
        """Return the steps that the result has behind it: also those that were done while the coordinator was away."""
        return self.run.done_s[-1][1] + 1 if self.run.done_s else 0

    @property
    def redone(self) -> int:
        return len(self.run.done_s) - len({step for _, step in self.run.done_s})

    @property
    def goodput(self) -> float:
        """Steps of the result per second of the run."""
        return self.steps / self.run.seconds if self.run.seconds else 0.0

    def notes(self) -> Iterable[tuple[float, str]]:
        yield from self.run.notes
        for number, period in enumerate(self.run.periods[1:], 1):
            step_s, devices = period.plan.predicted.expected_s, ", ".join(dict.fromkeys(period.plan.devices))
            yield period.since_s, f"plan {number}: {devices}; a step should take {format_duration(step_s)}"

    def table(self) -> RenderableType:
        return plan_table(self.plan, self.fleet, self.graph)

    def lines(self) -> list[str]:
        rate = f"{self.goodput:.3g} steps/s; {self.redone} done twice"
        return [
            *self.struck_lines(),
            self.concluded(f"{self.steps} steps in {format_duration(self.run.seconds)}: {rate}"),
        ]

    def summary(self) -> dict[str, object]:
        run = self.run
        return self.ended() | {
            "steps": self.steps,
            "steps_done_twice": self.redone,
            "goodput_steps_per_s": self.goodput,
            "recoveries": [
                {**msgspec.to_builtins(recovery), "detected_after_s": self._detected_after_s(number)}
                for number, recovery in enumerate(run.recoveries)
            ],
            "plans": [
                {"since_s": p.since_s, "first_step": p.first_step, "devices": list(p.plan.devices)} for p in run.periods
            ],
        }

    def _detected_after_s(self, number: int) -> float | None:
        """From the newest fault until devices were stopped for it; None for a change of plan that was nobody's
        fault."""
        (begin_s, _), recovery = self.run.recovered_s[number], self.run.recoveries[number]
        before = [f.time_s for f in self.faults if f.kind in ("lost", "silent", "link", "coordinator")]
        before = [time_s for time_s in before if time_s <= begin_s]
        return begin_s - max(before) if before and not recovery.reason.startswith("the plan is changed") else None

    def draw(self, path: Path) -> None:
        marks = [(fault.time_s, fault_text(fault)) for fault in self.faults]
        draw_faults(self.run.done_s, marks, self.run.recovered_s, path, seconds=self.run.seconds)


def simulate_faults(
    job: Job, faults: tuple[Fault, ...], observer: Observer, stop: Stop, document: Path | None = None
) -> FaultedRun:
    """The job's whole run, under the plan document or the plan that is made.

    UserError for a fault of what the fleet does not have, or where no plan can be made."""
    fleet = fleet_for(job)
    check_faults(faults, fleet)
    joining = {fault.device for fault in faults if fault.kind == "join"}
    present = [name for name in fleet.names if name not in joining]
    if not present:
        raise UserError(
            f"--join: got all devices ({', '.join(fleet.names)}), expected one that is there from the start"
        )
    prepared = prepare(job)
    plan = searched(observer, stop, lambda: plan_for(prepared, fleet.subset(present), document))
    kept = msgspec.structs.replace(job.plan, micro_batches=())
    prepared = prepared.cut_into(plan.micro_batches)
    again = msgspec.structs.replace(prepared, job=msgspec.structs.replace(prepared.job, plan=kept))
    replan = partial(plan_for, again, proving=None)  # nobody reads what is proven of these
    planner = _Planner(prepared, plan, fleet, replan, emulate=False, steady_s=partial(steady_on, again))
    ways = {name: 1.0 / fleet.line_bytes_per_s(name) for name in fleet.names}
    times = RecoveryTimes(timeout_s=job.timeout_s, start_s=START_S, control_s_per_byte=ways)
    unused = tuple(Fault(kind="join", device=name, time_s=0) for name in present if name not in plan.devices)
    options = msgspec.structs.replace(simulation_options(prepared, plan), faults=(*unused, *faults), recovery=times)
    spec = run_spec(prepared)
    run = RunSimulation(plan, fleet, spec, options, planner=planner, layout=planner.now.layout).run()
    return FaultedRun(
        run=run,
        plan=plan,
        fleet=fleet,
        graph=prepared.captured.train,
        faults=faults,
        undisturbed_s=simulate_run(plan, fleet, spec, msgspec.structs.replace(options, faults=())).seconds,
    )


class _Planner(Plans):
    """The plans of a run that is simulated: those that the real one would make."""

    def eval_edges(self, plan: Plan) -> Mapping[tuple[int, int], int]:
        return eval_edges(self._prepared, plan)
