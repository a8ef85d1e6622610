"""Replicas, those that average in every step and those that never wait, have what a pipeline has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

import isthmus
from isthmus.api.export import export_model
from isthmus.cost import PlanLayout
from tests.metrics.plain import Classifier, samples
from tests.metrics.test_pipelines import FLEET, HELD, plan_of

DECOUPLED = {"planner": "even", "sync.mode": "decoupled", "sync.decoupled.replicas": [["d-0", "d-1"], ["d-2"]]}
HOLDERS = {"plan.data_holder": ["d-0", "d-1"]}


def data(split: str) -> dict[str, torch.Tensor]:
    """A step with the third of the 64 samples that train is not finite."""
    if split != "train":
        return samples(HELD, 7)
    columns = samples(64)
    columns["x"][2] = torch.inf
    return columns


class Seen(isthmus.Callback):
    def __init__(self) -> None:
        self.steps, self.evaluations = list[int](), list[isthmus.Evaluated]()

    def step(self, done: isthmus.StepDone) -> None:
        self.steps.append(done.step)

    def evaluation(self, evaluated: isthmus.Evaluated) -> None:
        self.evaluations.append(evaluated)

    def end(self, ended: isthmus.RunEnded) -> None:
        self.ended = ended


@pytest.fixture
def fleet(tmp_path: Path) -> str:
    (tmp_path / "fleet.toml").write_text(FLEET)
    return str(tmp_path / "fleet.toml")


@pytest.mark.long
@pytest.mark.parametrize(
    ("own", "precision"),
    [(HOLDERS, "bf16"), (DECOUPLED, "bf16"), (DECOUPLED, "fp16")],
    ids=["average", "never wait", "never wait, fp16"],
)
def test_a_run_of_objects_in_half_has_callbacks_a_tracker_skipped_steps_a_store_and_a_stop(
    own: dict[str, object], precision: str, fleet: str, tmp_path: Path
) -> None:
    plan = None
    if own is HOLDERS:
        layouts = [PlanLayout(("d-0",), (), 3), PlanLayout(("d-1", "d-2"), (4,), 1)]
        plan = plan_of(tmp_path, layouts, fleet=fleet)
    seen = Seen()
    overrides: dict[str, object] = {
        "training.precision": precision,
        "training.non_finite": "skip",
        "training.eval_every": 4,
        "training.micro_batches": 4,
        "runtime.emulate": False,
        "runtime.device": {"d-1": "checked:0"},
        "store.url": (tmp_path / "bucket").as_uri(),
        **own,
    }
    run = isthmus.train(
        model=Classifier(),
        loss=F.cross_entropy,
        data=data,
        batch=16,
        steps=400,
        metrics=["accuracy"],
        callbacks=[seen, isthmus.EarlyStopping("accuracy", after=2, least=9.0)],
        track="csv",
        plan=plan,
        fleet=fleet,
        run=tmp_path / "run",
        overrides=overrides,
        quiet=True,
    )
    assert run.outcome == seen.ended.outcome == "stopped" and run.reason.startswith("EarlyStopping: accuracy")
    assert seen.steps == [point.step for point in run.losses] and len(seen.steps) < 400
    skipped = [point.step for point in run.losses if point.loss is None]
    assert skipped and (own is DECOUPLED or len(skipped) in range(len(seen.steps) // 4, 2 + len(seen.steps) // 4))
    assert [e.step for e in seen.evaluations] == [point.step for point in run.heldout]
    assert (run.path / "figures.csv").read_text().count(",accuracy,") == len(run.heldout)
    saved = run.checkpoint
    assert saved is not None
    there = tmp_path / "bucket" / saved.relative_to(run.path)
    assert {p.name: p.read_bytes() for p in there.iterdir()} == {p.name: p.read_bytes() for p in saved.iterdir()}
    export_model(run.path, tmp_path / "exported")
    exported, trained = load_file(tmp_path / "exported" / "model.safetensors"), Classifier()
    run.load(trained)
    assert all(torch.equal(value, exported[name]) for name, value in trained.state_dict().items())
