"""Stages on an accelerator train to the CPU's bits, without an implicit copy and without stopping the host.

Each run is a real one: coordinator, devices, links on sockets, checkpoints; its devices are threads of this process.
On `checked` whatever streams, host buffers and memory are used against the rules ends it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import msgspec
import pytest
import torch
from torch import Tensor

from isthmus.accelerators import DeviceEvent, accelerator_names
from isthmus.accelerators.copies import CopyBatch, HostBuffers
from isthmus.cost import build_plan
from isthmus.data import DataSpec
from isthmus.errors import Diverged, IsthmusError
from isthmus.experiments import RunOptions, Watcher, check_outcome, run_plan
from isthmus.fleet import Fleet
from isthmus.graph import Ref, StageGraph
from isthmus.job import Prepared, prepare
from isthmus.plans import Plan
from isthmus.training import engine
from isthmus.training.engine import TorchEngine
from isthmus.training.optim import OptimizerConfig
from isthmus_testing.emulated_accelerator import (
    Checked,
    DataRace,
    FreedTooEarly,
    HostBufferInUse,
    RefusedWait,
    open_checked,
)
from isthmus_testing.emulated_accelerator.accelerator import CheckedEvent
from tests.accelerators.thread_backend import ThreadCrew
from tests.runtime.jobs import DIGITS, RESNET, TEXT, final_weights, fleet_of, images, job_of, random_cut
from tests.runtime.test_run_parity import BERT, GPT, pairs
from tests.tiers import represented_by

HARDWARE = sorted({name.partition(":")[0] for name in accelerator_names()}) or [
    pytest.param("", marks=pytest.mark.skip("no accelerator here: `make test-gpu` runs it on one"))
]
EVENT_WAITS = 100
"""Of a stage's host for one event, at most, in two steps of two micro-batches and their evaluation: one for each host
buffer that is used again, each parcel that leaves, each tasklet that is over and each number that is reported."""


class Case(NamedTuple):
    model: str
    options: dict[str, object]
    data: Callable[[Path], DataSpec]
    stages: int
    training: dict[str, object] = {}  # noqa: RUF012
    optimizer: OptimizerConfig = OptimizerConfig(lr=0.01)
    recompute: bool = False
    draws: bool = False
    """Whether it has dropout: what hardware draws is not what the CPU draws."""
    rounding: float = 1e-4
    """Relative, of losses on hardware."""


SMALL = {**GPT, "width": 16, "layers": 2}
CASES = {
    "gpt": Case("gpt", SMALL, lambda _: TEXT, 3, {"clip_norm": 1.0, "eval_every": 1, "eval_samples": 4}),
    "gpt-bf16": Case(
        "gpt",
        SMALL,
        lambda _: TEXT,
        2,
        {"clip_norm": 1.0, "precision": "bf16"},
        recompute=True,
        rounding=2e-2,
    ),
    "gpt-fp16": Case(
        "gpt", SMALL, lambda _: TEXT, 2, {"precision": "fp16", "loss_scale": {"init_scale": 1024.0}}, rounding=2e-2
    ),
    "bert-dropout": Case(
        "hf-bert-classifier",
        {**BERT, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1},
        pairs,
        3,
        draws=True,
    ),
    "resnet": Case("hf-resnet", RESNET, images, 3, {}, OptimizerConfig(name="sgd", lr=0.1, momentum=0.9)),
    "unet": Case("unet", {"channels": 1, "classes": 10, "width": 4, "depth": 1}, lambda _: DIGITS, 2),
}


class Trained(NamedTuple):
    losses: list[float | None]
    weights: dict[str, Tensor]


class Ready(NamedTuple):
    """A case that is captured and cut."""

    case: Case
    prepared: Prepared
    fleet: Fleet
    plan: Plan


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Ready]:
    @cache
    def made(name: str) -> Ready:
        case = CASES[name]
        data = case.data(tmp_path_factory.mktemp(name))
        job = job_of(case.model, case.options, data, micro_batches=2, batch_size=4, **case.training)
        prepared = prepare(msgspec.structs.replace(job, optimizer=(case.optimizer,)))
        fleet = fleet_of(case.stages)
        plan = build_plan(
            prepared.problem(fleet),
            fleet.names,
            random_cut(prepared, case.stages, seed=1),
            planner="test",
            recompute=[case.recompute] * case.stages,
        )
        return Ready(case, prepared, fleet, plan)

    return made


def trained(ready: Ready, folder: Path, kind: str) -> Trained:
    """Two steps; each stage on an accelerator of its own as far as there are some."""
    backend = ThreadCrew(accelerators=dict(zip(ready.fleet.names, _accelerators(kind, ready.case.stages), strict=True)))
    losses: list[float | None] = []
    watcher = Watcher(advanced=lambda item, loss, spans: losses.append(loss))
    options = RunOptions(emulate=False, backend=backend)
    check_outcome(run_plan(ready.prepared, ready.plan, ready.fleet, folder, options, watcher))
    return Trained(losses, final_weights(folder))


def _accelerators(kind: str, count: int) -> list[str]:
    there = [n for n in accelerator_names() if n.startswith(kind)] or [f"{kind}:{i}" for i in range(count)]
    return ["cpu"] * count if kind == "cpu" else [there[i % len(there)] for i in range(count)]


@pytest.fixture(scope="module")
def on_the_cpu(ready: Callable[[str], Ready], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Trained]:
    return cache(lambda name: trained(ready(name), tmp_path_factory.mktemp(name), "cpu"))


@pytest.fixture
def emulated() -> list[Checked]:
    """Those that a run computes on."""
    return [open_checked(index, fresh=True) for index in range(max(case.stages for case in CASES.values()))]


@pytest.mark.parametrize("name", represented_by(CASES, "gpt-bf16"))
def test_the_emulated_accelerator_trains_to_the_cpus_bits(
    name: str,
    ready: Callable[[str], Ready],
    on_the_cpu: Callable[[str], Trained],
    emulated: list[Checked],
    tmp_path: Path,
) -> None:
    got, expected = trained(ready(name), tmp_path, "checked"), on_the_cpu(name)
    assert got.losses == expected.losses
    assert got.weights.keys() == expected.weights.keys()
    assert not [n for n, value in expected.weights.items() if not torch.equal(got.weights[n], value)]
    for accelerator in emulated[: CASES[name].stages]:
        counts = accelerator.counts()
        assert (counts.implicit_copies, counts.host_synchronizations) == (0, 0), counts.places
        assert counts.kernels > 100 and counts.copies > 10
        assert counts.event_waits <= EVENT_WAITS, counts.places
    assert not emulated[0].misuses


@pytest.mark.parametrize("kind", HARDWARE)
@pytest.mark.parametrize("name", [name for name in CASES if not CASES[name].draws])
def test_hardware_trains_as_the_cpu_but_for_rounding(
    name: str, kind: str, ready: Callable[[str], Ready], on_the_cpu: Callable[[str], Trained], tmp_path: Path
) -> None:
    got, expected = trained(ready(name), tmp_path, kind), on_the_cpu(name)
    assert got.losses == pytest.approx(expected.losses, rel=ready(name).case.rounding)
    assert got.weights.keys() == expected.weights.keys()


def _from(method: str, caller: str, of: type = Checked) -> AbstractContextManager[object]:
    """Calls of a method from functions of that name do nothing."""
    real = getattr(of, method)

    def skipped(self: object, *arguments: object) -> object:
        called = sys._getframe(1).f_code.co_name == caller
        return None if called else real(self, *arguments)

    return mock.patch.object(of, method, skipped)


def _nothing_goes_down(trip: CopyBatch, flat: Tensor) -> Tensor:
    trip.buffers.append(trip._way.buffers.take(flat.numel() * flat.element_size()))
    return trip.buffers[-1]


def _given_back_at_once(buffers: HostBuffers, buffer: Tensor, read: DeviceEvent | None = None) -> None:
    buffers._free.setdefault(buffer.numel(), []).append(buffer)


def _prints(engine: TorchEngine, mode: str, values: Mapping[Ref, Tensor], stage: StageGraph) -> None:
    if stage.loss is not None:
        assert values[stage.loss].item() > 0


BROKEN: dict[str, tuple[Callable[[], AbstractContextManager[object]], type[Exception], str]] = {
    "a copy down that is left out": (lambda: mock.patch.object(CopyBatch, "down", _nothing_goes_down), Diverged, ""),
    "bytes that leave before they are down": (lambda: _from("synchronize", "_lowered", CheckedEvent), Diverged, ""),
    "a download that waits for no result": (lambda: _from("wait", "_trip"), DataRace, "reads what"),
    "an upload that nobody waits for": (lambda: _from("wait", "_taken"), DataRace, "reads what"),
    "columns that nobody waits for": (lambda: _from("wait", "_raised"), DataRace, "copy to the device"),
    "a host buffer used again too early": (
        lambda: mock.patch.object(HostBuffers, "give", _given_back_at_once),
        HostBufferInUse,
        "still reads",
    ),
    "a dropped tensor that came up": (lambda: _from("used_here", "_taken"), FreedTooEarly, "used_here"),
    "columns that are dropped": (lambda: _from("used_here", "_raised"), FreedTooEarly, "used_here"),
    "a hidden item()": (lambda: mock.patch.object(TorchEngine, "_tally", _prints), RefusedWait, "_local_scalar_dense"),
    "weights that stay on the host": (
        lambda: mock.patch.object(engine, "to_device", lambda accelerator, tensor: tensor),
        IsthmusError,
        "Expected all tensors to be on the same device",
    ),
}
"""What is changed, and what is found."""


ATTEMPTS = 10


@pytest.mark.parametrize("name", BROKEN)
def test_a_stage_that_breaks_the_rules_is_found_out(
    name: str, ready: Callable[[str], Ready], emulated: list[Checked], tmp_path: Path
) -> None:
    """A drop is wrong only where its memory is given out before the host has waited for its last user, which is a
    matter of luck in one run: so there are several."""
    broken, kind, words = BROKEN[name]
    found: list[Exception] = []
    for attempt in range(ATTEMPTS):
        with contextlib.ExitStack() as stack:
            for accelerator in emulated:
                stack.enter_context(accelerator.refusing("implicit copy", "host synchronization"))
            stack.enter_context(broken())
            try:
                trained(ready("gpt"), tmp_path / str(attempt), "checked")
            except IsthmusError as e:
                found += [*emulated[0].misuses, e]
                break
    assert any(isinstance(e, kind) and words in str(e) for e in found), found
