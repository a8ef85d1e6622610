"""Runs that several holders feed, each with other files, and the plain loop over the joined data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from isthmus.cost import build_plan
from isthmus.data import DataSpec
from isthmus.experiments import RunOptions, Watcher, run_plan, run_spec
from isthmus.job import Job, PlanConfig, Prepared, prepare
from isthmus.plans import Plan
from isthmus.protocol import Item

from .jobs import final_weights, fleet_of, job_of, random_cut
from .joined_loop import Plain

GPT = {"vocab_size": 256, "sequence_length": 16, "width": 32, "layers": 2, "heads": 2}


def texts(folder: Path, sizes: Sequence[int]) -> DataSpec:
    """Each holder's own text of so many bytes."""
    draw = np.random.default_rng(0)
    for number, size in enumerate(sizes):
        (folder / f"text{number}").write_bytes(draw.integers(32, 127, size, dtype=np.uint8).tobytes())
    own: dict[str, dict[str, object]] = {f"d{n}": {"files": str(folder / f"text{n}")} for n in range(len(sizes))}
    return DataSpec(kind="text", options={"files": "none", "sequence_length": 16, "holdout": 0.2}, of=own)


def fed_job(name: str, config: Mapping[str, object], data: DataSpec, holders: int, **training: object) -> Job:
    job = job_of(name, config, data, **training)  # pyright: ignore[reportArgumentType]
    constraints = PlanConfig(data_holder=tuple(f"d{n}" for n in range(holders)), holders_data="own")
    return msgspec.structs.replace(job, plan=constraints)


def fed_run(prepared: Prepared, devices: int, boundaries: Sequence[int], folder: Path, watcher: Watcher) -> Plan:
    """The holders first, then so many devices in all."""
    holders = len(prepared.job.plan.feeders)
    fleet = fleet_of(devices)
    order = ["d0", *(f"d{n}" for n in range(holders, devices))]
    plan = build_plan(prepared.problem(fleet), order, boundaries, planner="test")
    outcome = run_plan(prepared, plan, fleet, folder, RunOptions(emulate=False), watcher)
    assert outcome.outcome == "done"
    return plan


class Followed:
    """Losses of a run."""

    def __init__(self) -> None:
        self.losses: list[float | None] = []
        self._heldout: dict[int, list[tuple[float, int]]] = {}
        self.watcher = Watcher(advanced=self._advanced)

    def _advanced(self, item: Item, loss: float | None, spans: object) -> None:
        if item.kind == "train":
            self.losses.append(loss)
        elif loss is not None:
            self._heldout.setdefault(item.step, []).append((loss, item.micro_batches))

    def heldout(self, step: int) -> float:
        parts = self._heldout[step]
        return sum(loss * count for loss, count in parts) / sum(count for _, count in parts)


def check_equal(prepared: Prepared, state_received: Followed, folder: Path, *, bits: bool = False) -> None:
    """To what the plain loop makes of the joined data: to the bit, or as far as the order of sums allows."""
    plain = Plain(prepared)
    expected = [plain.step(step) for step in range(prepared.job.training.steps)]
    assert state_received.losses[0] == expected[0], "before the first update all is equal to the bit"
    assert state_received.losses == (expected if bits else pytest.approx(expected, rel=1e-6))
    weights, own = final_weights(folder), dict(plain.module.named_parameters())
    assert own.keys() <= weights.keys()
    rtol, atol = (0.0, 0.0) if bits else (1e-5, 1e-6)
    for name, value in own.items():
        torch.testing.assert_close(weights[name], value.detach(), rtol=rtol, atol=atol)
    if prepared.job.training.eval_every:
        heldout = plain.heldout(run_spec(prepared).eval_micro_batches)
        assert state_received.heldout(prepared.job.training.steps) == pytest.approx(heldout, rel=1e-6)


def test_two_holders_and_a_device_without_data_equal_the_plain_loop(tmp_path: Path) -> None:
    """Tied embeddings, clipped gradients, three of four micro-batches from the larger holder."""
    config = GPT | {"tie_embedding": True}
    data = texts(tmp_path, [3000, 1200])
    job = fed_job("gpt", config, data, 2, steps=3, eval_every=3, eval_samples=1000, clip_norm=0.1)
    prepared, state_received = prepare(job), Followed()
    plan = fed_run(prepared, 3, random_cut(prepared, 2, seed=3), tmp_path / "run", state_received.watcher)
    assert plan.devices == ("d0", "d2", "d1")
    assert [group.devices for group in plan.sync.groups] == [("d0", "d1")]
    check_equal(prepared, state_received, tmp_path / "run")


def test_with_a_micro_batch_of_each_holder_a_step_all_is_equal_to_the_bit(tmp_path: Path) -> None:
    """Three holders, no other device in the middle but two; the sum over micro-batches is that over copies."""
    data = texts(tmp_path, [1000, 1000, 1000])
    job = fed_job("gpt", GPT, data, 3, steps=3, batch_size=6, micro_batches=3)
    prepared, state_received = prepare(job), Followed()
    fed_run(prepared, 5, random_cut(prepared, 3, seed=5), tmp_path / "run", state_received.watcher)
    check_equal(prepared, state_received, tmp_path / "run", bits=True)


def test_without_other_devices_each_holder_runs_the_whole_model(tmp_path: Path) -> None:
    job = fed_job("gpt", GPT, texts(tmp_path, [2500, 1500]), 2, eval_every=2, eval_samples=1000)
    prepared, state_received = prepare(job), Followed()
    fed_run(prepared, 2, [], tmp_path / "run", state_received.watcher)
    check_equal(prepared, state_received, tmp_path / "run")


def test_each_holder_runs_the_first_and_the_last_stage_where_labels_stay(tmp_path: Path) -> None:
    """Tied embeddings, which the first stage of one holder lends the last stages of both; clipped gradients."""
    job = fed_job(
        "gpt",
        GPT | {"tie_embedding": True},
        texts(tmp_path, [3000, 1200]),
        2,
        steps=3,
        eval_every=3,
        eval_samples=1000,
        clip_norm=0.1,
        save_every=2,
    )
    job = msgspec.structs.replace(job, plan=msgspec.structs.replace(job.plan, labels_stay=True))
    prepared, state_received, fleet = prepare(job), Followed(), fleet_of(3)
    problem = prepared.problem(fleet)
    assert problem.last_start is not None
    plan = build_plan(problem, ["d0", "d2", "d0"], [5, problem.last_start], planner="test")
    assert plan.devices == ("d0", "d2", "d0", "d1", "d1")
    outcome = run_plan(prepared, plan, fleet, tmp_path / "run", RunOptions(emulate=False), state_received.watcher)
    assert outcome.outcome == "done"
    check_equal(prepared, state_received, tmp_path / "run")
