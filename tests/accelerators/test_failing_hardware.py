"""An emulated driver that fails is an error wherever it fails, and not the end of the process."""

from __future__ import annotations

import pytest
import torch

from isthmus.accelerators.copies import all_to_device
from isthmus.data import load_dataset
from isthmus.graph import Flow, Ref, assign, partition
from isthmus.graph.partition import align
from isthmus.job import prepare
from isthmus.training.engine import TorchEngine
from isthmus.training.weights import initial_weights
from isthmus_testing.emulated_accelerator import Checked, open_checked
from tests.runtime.jobs import DIGITS, job_of

OWN = 9
"""Of the emulated accelerators one that no other test computes on: it stays as it fails here."""


def test_a_driver_may_fail_in_any_operator_of_a_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in those that add a gradient to that of the micro-batch before, which autograd calls as hooks."""
    job = job_of("mlp", {}, DIGITS)
    prepared = prepare(job)
    captured, flow, evaluation = prepared.captured, Flow(prepared.captured.train), Flow(prepared.captured.eval)
    stage_of = assign(flow, [])
    (train,), (evaluated,) = partition(flow, stage_of), partition(evaluation, align(flow, evaluation, stage_of))
    weights = initial_weights(prepared.build, captured, 0)
    columns = {op.target: Ref(op.name) for op in captured.train.ops if op.kind == "placeholder"}
    read = load_dataset(job.used_data, "train").batch([0, 1], list(columns))
    batch = {columns[name]: value for name, value in read.items()}

    def backwards(accelerator: Checked) -> list[int]:
        """How many operators there were before the last of two, and after it."""
        engine = TorchEngine(train, evaluated, job.engine(), weights, accelerator=accelerator)
        for micro_batch in range(2):
            engine.forward(0, micro_batch, all_to_device(accelerator, batch))
            before = accelerator.counts().kernels
            engine.backward(micro_batch, [])
        return [before, accelerator.counts().kernels]

    first, last = backwards(open_checked(OWN, fresh=True))
    assert last > first + len(weights)
    for failing in range(first + 1, last + 1):
        monkeypatch.setenv("ISTHMUS_CHECKED_FAULT", f"after:{failing}")
        with pytest.raises(torch.AcceleratorError, match=f"in operator {failing} "):
            backwards(open_checked(OWN, fresh=True))
