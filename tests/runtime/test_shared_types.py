"""A parameter that two stages share, of every type that trains."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from isthmus.api.make_plan import predict_periods
from isthmus.data import DataSpec
from isthmus.errors import UserError
from isthmus.graph import Flow, cuts
from isthmus.job import prepare
from isthmus.trace import Span, Trace, link_bytes

from .jobs import final_weights, job_of, plain_run, run

TIED = """
import torch
from torch import nn
from torch.nn import functional as F

class Tied(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.type = getattr(torch, dtype)
        self.shared = nn.Parameter(torch.randn(8, 8, dtype=self.type) * 0.3)
        self.own = nn.Parameter(torch.randn(8, 8, dtype=self.type) * 0.3)

    def forward(self, x, labels):
        y = x.to(self.type) @ self.shared
        y = torch.tanh(y @ self.own)
        y = y @ self.shared
        return F.cross_entropy(torch.view_as_real(y).sum(-1) if y.is_complex() else y.float(), labels)
"""


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, DataSpec]]:
    folder = tmp_path_factory.mktemp("model")
    (folder / "tied_model.py").write_text(TIED)
    draw = np.random.default_rng(0)
    np.savez(folder / "data.npz", x=draw.normal(size=(40, 8)).astype(np.float32), labels=np.arange(40) % 8)
    sys.path.insert(0, str(folder))
    yield "tied_model:Tied", DataSpec(kind="npz", options={"path": str(folder / "data.npz")})
    sys.path.remove(str(folder))


def shared_bytes(spans: tuple[Span, ...]) -> dict[tuple[str, str], int]:
    """Of values and gradients by link."""
    shared = tuple(s for s in spans if s.name in ("shared", "shared_gradient"))
    return link_bytes(Trace(source="runtime", run="tied", spans=shared))


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "complex64"])
def test_a_shared_parameter_trains_in_its_own_type(tied: tuple[str, DataSpec], tmp_path: Path, dtype: str) -> None:
    model, data = tied
    clips = not dtype.startswith("complex")
    job = job_of(model, {"dtype": dtype}, data, steps=3, clip_norm=1.0 if clips else 0.0)
    prepared = prepare(job)
    graph = prepared.captured.train
    (tanh,) = (i for i, op in enumerate(op for op in graph.ops if op.kind == "operator") if "tanh" in op.target)
    assert tanh in [cut.position for cut in cuts(Flow(graph))]
    plan, outcome = run(prepared, [tanh], tmp_path)
    assert outcome.outcome == "done", outcome.reason
    assert plan.replica.shared
    predicted = predict_periods(prepared, outcome.periods).spans
    assert shared_bytes(predicted) == shared_bytes(outcome.spans) != {}
    saved, (module, _) = final_weights(tmp_path), plain_run(job, prepared)
    for name, value in module.named_parameters():
        if dtype == "bfloat16":
            assert (saved[name].double() - value.double()).abs().max() < 0.02  # the plain loop has no wider copy
        else:
            # tanh has poles among complex numbers: near one, the plain loop itself is up to 7e-5 off one in complex128.
            rtol, atol = (1e-4, 1e-5) if dtype == "complex64" else (1e-6, 1e-7)
            torch.testing.assert_close(saved[name], value.detach(), rtol=rtol, atol=atol)


def test_a_type_that_no_checkpoint_holds_is_refused_before_the_run(tied: tuple[str, DataSpec]) -> None:
    model, data = tied
    with pytest.raises(UserError, match=r"parameter 'shared': got complex128, expected complex64"):
        prepare(job_of(model, {"dtype": "complex128"}, data))
