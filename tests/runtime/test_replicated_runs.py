"""Several replicas over processes equal one plain model with the whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from isthmus.cost import Layout, build_replicas
from isthmus.graph import Flow, cuts
from isthmus.job import Job, Prepared, prepare
from isthmus.plan import Collective, Plan
from isthmus.runtime.conductor import Outcome
from isthmus.runtime.run import RunOptions, Watcher, train

from .jobs import TEXT, final_weights, fleet_of, job_of, plain_run

GPT = {"vocab_size": 256, "sequence_length": 16, "width": 32, "layers": 3, "heads": 2, "tie_embedding": True}


def layouts(prepared: Prepared, shapes: Sequence[tuple[Sequence[float], int]]) -> list[Layout]:
    """One replica for each (where it is cut, of the whole; its micro-batches), on devices of its own."""
    legal = [c.position for c in cuts(Flow(prepared.captured.train))]
    found: list[Layout] = []
    devices = iter(fleet_of(sum(len(ends) + 1 for ends, _ in shapes)).names)
    for ends, share in shapes:
        boundaries = tuple(legal[int(end * len(legal))] for end in ends)
        found.append(Layout(tuple(next(devices) for _ in range(len(ends) + 1)), boundaries, share))
    return found


def planned(prepared: Prepared, shapes: Sequence[tuple[Sequence[float], int]]) -> Plan:
    found = layouts(prepared, shapes)
    return build_replicas(prepared.problem(fleet_of(sum(len(x.order) for x in found))), found, planner="test")


def run(prepared: Prepared, plan: Plan, folder: Path, options: RunOptions | None = None) -> tuple[Outcome, list[float]]:
    losses: list[float] = []

    def advanced(item: object, loss: float | None, spans: object) -> None:
        if getattr(item, "kind", "") == "train":
            assert loss is not None
            losses.append(loss)

    fleet = fleet_of(len(plan.devices))
    options = options or RunOptions(emulate=False)
    outcome = train(prepared, plan, fleet, folder, options, Watcher(advanced=advanced))
    assert outcome.outcome == "done"
    return outcome, losses


def assert_plain(job: Job, prepared: Prepared, folder: Path, losses: list[float]) -> None:
    module, expected = plain_run(job, prepared)
    own = dict(module.named_parameters(remove_duplicate=False))
    saved = final_weights(folder)
    for name, value in own.items():
        if name in saved:
            error = (saved[name].double() - value.double()).norm()
            assert error <= 1e-6 * value.double().norm().clamp(min=1e-6), name
    assert losses == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("shapes, kind", [
    ([((0.4,), 2), ((0.4,), 2)], "sharded"),
    ([((0.3, 0.7), 1), ((0.5,), 2), ((), 1)], "ring"),
    ([((), 2), ((0.6,), 1), ((), 1)], "hierarchical"),
], ids=["cut alike", "cut differently, in rings", "islands"])  # fmt: skip
def test_replicas_equal_the_plain_loop(
    shapes: Sequence[tuple[Sequence[float], int]], kind: str, tmp_path: Path
) -> None:
    job = job_of("gpt", GPT, TEXT, clip_norm=1.0)
    prepared = prepare(job)
    plan = planned(prepared, shapes)
    members = range(len(shapes))
    islands = {"sharded": (), "ring": (tuple(members),), "hierarchical": ((0, 1), tuple(members)[2:])}[kind]
    collective = Collective(kind=kind, islands=islands)  # type: ignore[arg-type]
    groups = tuple(msgspec.structs.replace(g, collective=collective) for g in plan.sync.groups)
    plan = msgspec.structs.replace(plan, sync=msgspec.structs.replace(plan.sync, groups=groups))
    outcome, losses = run(prepared, plan, tmp_path)
    assert_plain(job, prepared, tmp_path, losses)
    sums = [s for s in outcome.spans if s.track == "send" and s.name == "average"]
    expected = 2 * (len(shapes) - 1) * sum(g.size_bytes for g in plan.sync.groups)
    assert sum(s.size_bytes for s in sums) == job.training.steps * expected
