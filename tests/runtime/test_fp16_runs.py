"""float16 in real runs: one loss scale for all stages and replicas, whatever `non_finite` says of other steps."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from isthmus.errors import Diverged
from isthmus.experiments import check_outcome
from isthmus.job import Job, prepare
from isthmus.training.scaling import LOSS_SCALE
from tests.tiers import represented_by

from .jobs import DIGITS, final_weights, job_of, random_cut, run
from .test_non_finite import data
from .test_replicated_runs import planned
from .test_replicated_runs import run as run_plan

STEPS = 6


def job(**training: object) -> Job:
    settings = {
        "steps": STEPS,
        "precision": "fp16",
        "loss_scale": {"init_scale": 2.0**22, "growth_interval": 2},
        **training,
    }
    return job_of("mlp", {}, DIGITS, **settings)


@pytest.fixture(scope="module")
def uncut(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    folder = tmp_path_factory.mktemp("uncut")
    run(prepare(job()), [], folder)
    return final_weights(folder)


@pytest.mark.parametrize("non_finite", represented_by(["stop", "skip", "ignore"], "stop"))
def test_gradients_that_overflow_end_no_run(tmp_path: Path, uncut: dict[str, Tensor], non_finite: str) -> None:
    """Neither are they what `non_finite` is about, as long as a smaller scale can help."""
    prepared = prepare(job(non_finite=non_finite))
    _, outcome = run(prepared, random_cut(prepared, 3, 0, once=True), tmp_path)
    assert outcome.outcome == "done"
    saved = final_weights(tmp_path)
    assert saved.keys() == uncut.keys()
    for name, value in uncut.items():
        assert torch.equal(saved[name], value), name
    assert saved[LOSS_SCALE][0] < 2.0**22, "some steps were left out"
    assert not torch.equal(saved[LOSS_SCALE], torch.tensor([2.0**22 / 2**STEPS, 0.0])), "but not all"


def test_replicas_have_one_scale(tmp_path: Path, uncut: dict[str, Tensor]) -> None:
    prepared = prepare(job())
    run_plan(prepared, planned(prepared, [((0.5,), 2), ((), 2)]), tmp_path)
    saved = final_weights(tmp_path)
    assert saved.keys() == uncut.keys()
    assert torch.equal(saved[LOSS_SCALE], uncut[LOSS_SCALE])
    for name, value in uncut.items():
        torch.testing.assert_close(saved[name], value, rtol=1e-3, atol=1e-4)


def test_a_nan_ends_the_run_all_the_same(tmp_path: Path) -> None:
    bad = job_of("mlp", {}, data(tmp_path, float("nan"), "pixel_values", 64), steps=4, shuffle=False, precision="fp16")
    prepared = prepare(bad)
    _, outcome = run(prepared, random_cut(prepared, 2, 0), tmp_path)
    with pytest.raises(Diverged, match=r"step 3: .* column 'pixel_values'"):
        check_outcome(outcome)


def test_a_scale_without_float16_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="loss_scale: got a scale with precision 'bf16'"):
        job(precision="bf16")
