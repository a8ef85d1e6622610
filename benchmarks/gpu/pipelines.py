"""A pipeline whose processes share one accelerator, over emulated links: predicted first, then measured."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import msgspec
from gpu_cases import FAR, Case, fleet_of, plan_of
from overlapping import copies_beside_work, overlap

from isthmus.cost.stage_costs import elements
from isthmus.experiments import (
    LocalBackend,
    RunOptions,
    Watcher,
    check_outcome,
    local_places,
    run_plan,
    run_spec,
)
from isthmus.fleet import Fleet, corrected
from isthmus.job import Prepared, prepare
from isthmus.plans import Plan
from isthmus.report import DeviceMemoryUse, memory_use
from isthmus.simulator import Overheads, SimulationOptions, simulate
from isthmus.trace import Trace, steady_step_s
from isthmus_testing.calibration import Warmup, calibrate

WARMUP_STEPS = 4


class Pipeline(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the table."""

    key: str
    size: str
    when: str
    device: str
    parameters: int
    tokens_per_s: float
    step_s: float
    predicted_s: float
    overlap: float | None
    copies_beside_work: float | None
    """None where nothing is copied."""
    memory: tuple[DeviceMemoryUse, ...]

    @property
    def error(self) -> float:
        return self.predicted_s / self.step_s - 1

    @property
    def memory_error(self) -> float:
        """What the plan says over what was taken, less 1, of the stage that is furthest off."""
        return max((stage.predicted_bytes / stage.peak_bytes - 1 for stage in self.memory), key=abs)


def traced_run(prepared: Prepared, plan: Plan, fleet: Fleet) -> tuple[Trace, tuple[DeviceMemoryUse, ...]]:
    backend = LocalBackend(places=local_places(prepared.job.runtime.device, fleet.names))
    with tempfile.TemporaryDirectory() as folder:
        outcome = run_plan(prepared, plan, fleet, Path(folder), RunOptions(backend=backend), Watcher())
    check_outcome(outcome)
    return Trace(source="runtime", run="gpu", spans=outcome.spans), memory_use(plan, outcome.peaks)


def measure(case: Case, device: str, hardware: str, when: str) -> Pipeline:
    prepared, fleet = prepare(case.job(device)), fleet_of(case.stages, FAR)
    brief = msgspec.structs.replace(prepared, job=case.job(device, steps=WARMUP_STEPS))
    warmups: list[Warmup] = []
    for shares in case.warmups:
        plan = plan_of(prepared, fleet, shares)
        print(f"  warm-up with shares {shares} ...", file=sys.stderr)
        warmups.append(Warmup(plan, traced_run(brief, plan, fleet)[0]))
    calibration = calibrate(warmups)
    equal = (1,) * case.stages
    # The plan's limits of micro-batches in flight come of the speeds that were found.
    speeds = calibration.flops_per_s(plan_of(prepared, fleet, equal))
    plan = plan_of(prepared, corrected(fleet, speeds, {}), equal)
    options = SimulationOptions(
        durations=calibration.durations(plan),
        header_bytes=calibration.header_bytes,
        overheads=Overheads(tasklet_s=calibration.tasklet_s, handover_s=calibration.handover_s),
    )
    predicted_s = steady_step_s(simulate(plan, fleet, run_spec(prepared), options))
    trace, memory = traced_run(prepared, plan, fleet)
    step_s = steady_step_s(trace)
    return Pipeline(
        key=case.key,
        size=case.size,
        when=when,
        device=hardware,
        step_s=step_s,
        predicted_s=predicted_s,
        parameters=sum(elements(op) for op in prepared.captured.train.ops if op.kind == "parameter"),
        tokens_per_s=case.tokens / step_s,
        overlap=overlap(trace),
        copies_beside_work=copies_beside_work(trace),
        memory=memory,
    )
