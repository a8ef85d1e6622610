"""The same training under Isthmus: the conducting process. `python ours.py '<OursPlace as JSON>'`."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import msgspec
from workload import LEARNING_RATE, Figures, OursPlace, Workload

from isthmus.cost import build_plan
from isthmus.experiments import (
    Item,
    LocalBackend,
    OptimizerConfig,
    ProcessPlace,
    RunOptions,
    Watcher,
    check_outcome,
    run_plan,
)
from isthmus.graph import Flow, cuts
from isthmus.job import Job, Prepared, RuntimeConfig, TrainingConfig, prepare
from isthmus.plans import Plan
from isthmus.trace import Trace, link_bytes


def job_of(workload: Workload) -> Job:
    return Job(
        name="pipeline-vs-torch",
        model=workload.model,
        data=workload.data,
        training=TrainingConfig(
            steps=workload.steps,
            batch_size=workload.batch_size,
            micro_batches=workload.micro_batches,
            seed=workload.seed,
        ),
        optimizer=(OptimizerConfig(name="adamw", lr=LEARNING_RATE, weight_decay=0.0),),
        runtime=RuntimeConfig(threads=1, emulate=False),
    )


def boundaries_of(flow: Flow, workload: Workload) -> list[int]:
    """The peer's cuts: before the first operator of the first block of each stage but the first."""
    clean = {cut.position for cut in cuts(flow) if len(cut.values) == 1 and not cut.shared}
    found: list[int] = []
    for stage in range(1, workload.stages):
        block = f"blocks.{workload.first_block(stage)}"
        position = next(i for i, op in enumerate(flow.operators) if f"{op.module}.".startswith(f"{block}."))
        assert position in clean, f"one tensor crosses before {block}"
        found.append(position)
    return found


def plan_of(prepared: Prepared, workload: Workload) -> Plan:
    fleet = workload.fleet
    return build_plan(prepared.problem(fleet), fleet.names, boundaries_of(prepared.flow, workload), planner="blocks")


def busy_of(trace: Trace, workload: Workload) -> list[list[float]]:
    """Per step and stage, the sum of the durations of all F and B."""
    number = {name: stage for stage, name in enumerate(workload.fleet.names)}
    found = [[0.0] * workload.stages for _ in range(workload.steps)]
    for span in trace.spans:
        if span.track == "compute" and span.name in ("F", "B"):
            found[span.step][number[span.device]] += span.end_s - span.start_s
    return found


def marks_of(trace: Trace, finished_s: list[float]) -> list[float]:
    """Starts of the steps, and the end of the last, on the machine's clock; `finished_s` is when we heard of each end.

    A trace counts from its run's first step, and the least delay of any report is a millisecond: that joins the two.
    """
    starts: dict[int, float] = {}
    ends: dict[int, float] = {}
    for span in trace.spans:
        if span.track == "compute" and span.name == "F":
            starts[span.step] = min(span.start_s, starts.get(span.step, span.start_s))
        elif span.track == "compute":
            ends[span.step] = max(span.end_s, ends.get(span.step, 0.0))
    origin_s = min(heard_s - ends[step] for step, heard_s in enumerate(finished_s))
    return [origin_s + t for t in (*(starts[step] for step in sorted(starts)), ends[max(ends)])]


def run(place: OursPlace) -> Figures:
    workload = place.workload
    prepared = prepare(job_of(workload))
    places = {
        name: ProcessPlace(prefix=tuple(place.prefixes[name]), host=host, trusted_network=True)
        for name, host in place.addresses.items()
    }
    losses: list[float] = []
    finished_s: list[float] = []

    def advanced(item: Item, loss: float | None, spans: object) -> None:
        if item.kind == "train" and loss is not None:
            finished_s.append(time.monotonic())
            losses.append(loss)

    backend = LocalBackend(host=place.host, places=places, trusted_network=True)
    options = RunOptions(emulate=False, backend=backend)
    with tempfile.TemporaryDirectory() as folder:
        outcome = run_plan(
            prepared, plan_of(prepared, workload), workload.fleet, Path(folder), options, Watcher(advanced=advanced)
        )
    check_outcome(outcome)
    trace = Trace(source="runtime", run="pipeline-vs-torch", spans=outcome.spans)
    # The run's last sends may end after the last report: the last step's bytes are not all in the trace.
    whole = msgspec.structs.replace(trace, spans=tuple(s for s in trace.spans if s.step < workload.steps - 1))
    return Figures(
        marks_s=marks_of(trace, finished_s),
        losses=losses,
        busy_s=busy_of(trace, workload),
        step_payload_bytes=sum(link_bytes(whole).values()) / (workload.steps - 1),
    )


if __name__ == "__main__":
    print(msgspec.json.encode(run(msgspec.json.decode(sys.argv[1], type=OursPlace))).decode())
