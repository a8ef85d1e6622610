"""Runs whose values leave their data holder under noise: what the others get, what learns, what is counted, and which
jobs and plans are refused because the count would not be the truth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from isthmus.api.status import progressed
from isthmus.cost import build_plan
from isthmus.data import DataSpec, load_dataset
from isthmus.disclosure import ActivationNoise, read_spent
from isthmus.errors import UserError
from isthmus.experiments import RunOptions, Watcher, run_plan
from isthmus.graph import Flow
from isthmus.job import Job, PlanConfig, Prepared, PrivacyConfig, load_job, prepare
from isthmus.plans import Plan
from isthmus.protocol.run_messages import Item
from isthmus.runtime.coordinator.activation_privacy import (
    PrivacyLedger,
    Protection,
    opened_ledger,
    protection,
    protection_text,
)
from isthmus.runtime.coordinator.stages import stage_pairs
from isthmus.runtime.service.job_queue import Submitted
from isthmus.training.local_privacy import epsilon_of, squared_mu

from .commands import edited, isthmus, refused, write_job
from .jobs import DIGITS, TEXT, final_weights, fleet_of, job_of, plain_run, run

NET = "tests.runtime.noisy_models:net"
PUBLIC = ActivationNoise(clip=1.5, noise_multiplier=4.0, labels="public")
TRAINED = msgspec.structs.replace(PUBLIC, weights="trained")
STAY = msgspec.structs.replace(PUBLIC, labels="stay")


def with_noise(job: Job, noise: ActivationNoise, **plan: object) -> Job:
    constraints = msgspec.convert({"data_holder": ["d0"], **plan}, PlanConfig)
    return msgspec.structs.replace(job, plan=constraints, privacy=PrivacyConfig(activations=noise))


def net_job(noise: ActivationNoise = PUBLIC, options: dict[str, object] | None = None, **training: object) -> Job:
    return with_noise(job_of(NET, options or {}, DIGITS, **training), noise)


def after(prepared: Prepared, name: str) -> int:
    """The cut behind an operator."""
    names = [op.name for op in Flow(prepared.captured.train, columns_first=True).operators]
    return names.index(name) + 1


def placed(prepared: Prepared, boundaries: Sequence[int], devices: int | None = None) -> Plan:
    fleet = fleet_of(devices or len(boundaries) + 1)
    return build_plan(prepared.problem(fleet), fleet.names[: len(boundaries) + 1], boundaries, planner="test")


def protected(prepared: Prepared, plan: Plan, holders: Sequence[str] = ("d0",)) -> Protection:
    return protection(prepared, plan, stage_pairs(plan, prepared.captured, clips=False), holders)


# Runs


def test_training_goes_through_the_clip(tmp_path: Path) -> None:
    """With next to no noise, the run is that of a module that clips its hidden values itself."""
    noise = msgspec.structs.replace(PUBLIC, clip=1.0, noise_multiplier=1e-12, weights="trained")
    prepared = prepare(net_job(noise, steps=3))
    _, outcome = run(prepared, [after(prepared, "relu")], tmp_path)
    assert outcome.outcome == "done"
    clipping = job_of(NET, {"clip": 1.0}, DIGITS, steps=3)
    module, _ = plain_run(clipping, prepare(clipping))
    free, _ = plain_run(job := job_of(NET, {}, DIGITS, steps=3), prepare(job))
    found = final_weights(tmp_path)
    for name, value in module.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(found["enter.weight"], free.state_dict()["enter.weight"], atol=1e-4)


def test_values_that_are_not_finite_before_the_clip_end_the_run_where_they_are(tmp_path: Path) -> None:
    """What leaves for them is noise alone, and the loss is finite: the others see nothing."""
    prepared = prepare(net_job(PUBLIC, {"overflows": True}, steps=3))
    _, outcome = run(prepared, [after(prepared, "relu")], tmp_path)
    assert outcome.outcome == "diverged"
    assert "step 1: numbers are not finite, first in the output 'relu'" in outcome.reason
    assert "of stage 0 on device 'd0', micro-batch 0" in outcome.reason


def test_weights_before_the_noise_stay_and_what_was_sent_is_counted(tmp_path: Path) -> None:
    job = net_job(steps=4, batch_size=512, micro_batches=2, eval_every=2, eval_samples=128)
    prepared, notes = prepare(job), list[str]()
    assert prepared.samples.train == 1617
    prepared = msgspec.structs.replace(prepared, job=job.cut_into(8))
    losses: list[float | None] = []
    watcher = Watcher(noted=notes.append, advanced=lambda item, loss, spans: losses.append(loss))
    plan, outcome = run(prepared, [after(prepared, "relu")], tmp_path, watcher=watcher)
    assert outcome.outcome == "done"
    assert all(loss is None or math.isfinite(loss) for loss in losses)
    module, found = prepared.build(), final_weights(tmp_path)
    begun = module.state_dict()
    assert torch.equal(found["enter.weight"], begun["enter.weight"])
    assert torch.equal(found["enter.bias"], begun["enter.bias"])
    assert not torch.equal(found["leave.weight"], begun["leave.weight"])
    # 2,048 samples of 1,617 were sent: a pass, and a part of the next; two evaluations.
    spent = read_spent(tmp_path)
    assert spent is not None
    assert spent == outcome.spent
    assert spent.epsilon == pytest.approx(epsilon_of(squared_mu(4.0, 2), 1e-5))
    assert spent.by_epoch[0] == pytest.approx(epsilon_of(squared_mu(4.0), 1e-5))
    assert spent.heldout_epsilon == pytest.approx(epsilon_of(squared_mu(4.0, 2), 1e-5))
    assert [n for n in notes if n.startswith("epoch 1: each sample's local epsilon is")]
    text = "\n".join(protection_text(prepared, plan, fleet_of(2)))
    assert "Values that leave d0 for d1 are clipped to 1.5 per sample (32 numbers) and noised with sigma 6." in text


@pytest.mark.parametrize("weights", ["frozen", "trained"])
def test_a_stage_whose_samples_depend_on_each_other_sends_nothing(tmp_path: Path, weights: str) -> None:
    """A softmax over samples keeps their shape: the holder finds it by trying."""
    noise = msgspec.convert(msgspec.to_builtins(PUBLIC) | {"weights": weights}, ActivationNoise)
    prepared = prepare(net_job(noise, options={"competes": True}))
    with pytest.raises(UserError, match=r"value 'softmax' of device 'd0' changes for a sample when another one"):
        run(prepared, [after(prepared, "softmax")], tmp_path)
    assert read_spent(tmp_path) is None


def of_two_holders(folder: Path, noise: ActivationNoise) -> Job:
    """The first has three times as many digits as the other."""
    digits = load_dataset(DIGITS, "train").batch(range(192), ["pixel_values", "labels"])
    own: dict[str, dict[str, object]] = {}
    for name, rows in (("d0", slice(0, 144)), ("d1", slice(144, 192))):
        pixels, labels = (digits[column][rows].numpy() for column in ("pixel_values", "labels"))
        np.savez(folder / f"{name}.npz", pixel_values=pixels, labels=labels)
        own[name] = {"path": str(folder / f"{name}.npz")}
    data = DataSpec(kind="npz", options={"path": "none", "holdout": 0.0}, of=own)
    return with_noise(
        job_of(NET, {}, data, steps=7, batch_size=32, micro_batches=4),
        noise,
        data_holder=["d0", "d1"],
        holders_data="own",
    )


def test_holders_with_data_of_their_own_are_counted_each(tmp_path: Path) -> None:
    prepared = prepare(of_two_holders(tmp_path, PUBLIC))
    fleet = fleet_of(3)
    plan = build_plan(prepared.problem(fleet), ["d0", "d2"], [after(prepared, "relu")], planner="test")
    found = protected(prepared, plan, ("d0", "d1"))
    assert ([plan.devices[w] for w in found.released], found.train) == (["d0", "d1"], 1)
    outcome = run_plan(prepared, plan, fleet, tmp_path / "run", RunOptions(emulate=False), Watcher())
    assert outcome.outcome == "done"
    assert torch.equal(final_weights(tmp_path / "run")["enter.weight"], prepared.build().state_dict()["enter.weight"])
    # 28 micro-batches of 8, three of four of them the first holder's: 168 of its 144 samples, 56 of the other's 48.
    spent = read_spent(tmp_path / "run")
    assert spent is not None
    assert [[(s.first, s.end) for s in own] for own in spent.stretches] == [[(0, 168)], [(0, 56)]]
    assert spent.by_epoch == pytest.approx([epsilon_of(squared_mu(4.0, n), 1e-5) for n in (1, 2)])


def test_holders_do_not_sum_gradients_of_raw_samples_with_each_other(tmp_path: Path) -> None:
    prepared = prepare(of_two_holders(tmp_path, msgspec.structs.replace(PUBLIC, weights="trained")))
    plan = build_plan(prepared.problem(fleet_of(3)), ["d0", "d2"], [after(prepared, "relu")], planner="test")
    with pytest.raises(
        UserError, match=r"got 'own' with privacy.activations.weights 'trained', expected weights = 'frozen'"
    ):
        protected(prepared, plan, ("d0", "d1"))


def test_commands_say_what_leaves_and_what_it_told(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(f"""
name = "noisy"
fleet = "laptop"
planner = "even"
run_dir = "{tmp_path}"
model = {{ name = "{NET}" }}
data = {{ kind = "digits" }}
plan = {{ data_holder = "laptop-0" }}
privacy = {{ activations = {{ clip = 1.5, epsilon = 20, labels = "public" }} }}
training = {{ steps = 4, batch_size = 600, micro_batches = 2 }}
runtime = {{ emulate = false }}
""")
    planned = isthmus("plan", path)
    assert "Values that leave laptop-0 for laptop-1 are clipped to 1.5 per sample (32 numbers)" in planned.out
    done = isthmus("train", path, "--json")
    assert done.code == 0, done
    assert "epoch 1: each sample's local epsilon is" in done.err
    told = msgspec.json.decode(done.out)["privacy"]
    assert told["epsilon"] == pytest.approx(20)  # of the two passes that are planned
    assert told["by_epoch"] == pytest.approx([told["by_epoch"][0], 20])
    shown = progressed(
        Submitted(
            number=1,
            name="noisy",
            kind="pipeline",
            document=msgspec.json.encode({"training": {"steps": 4}}),
            directory=str(tmp_path),
            state="running",
            folder=str(tmp_path / "noisy"),
            detail="",
            submitted_s=0.0,
            began_s=0.0,
            ended_s=None,
        )
    )
    assert shown.privacy == "epsilon 20 at delta 1e-05 after 2 epochs"
    edited(path, ("privacy = {", "track = {} #"), ("steps = 4", "steps = 5"))
    refused(isthmus("train", path, "--resume"), 2, "privacy.activations: got none", "after 2 epochs")


# Which values, how much noise


def test_what_is_covered_and_by_how_much() -> None:
    prepared = prepare(net_job())
    found = protected(prepared, plan := placed(prepared, [after(prepared, "relu")]))
    boundary = found.released[0].train
    assert (boundary.per_sample, boundary.targets, boundary.clip, boundary.deviation) == (32, (1,), 1.5, 6.0)
    assert found.freezes(0)
    assert not found.freezes(1)
    rms = msgspec.structs.replace(PUBLIC, clip=None, clip_rms=0.5)
    prepared = msgspec.structs.replace(prepared, job=net_job(rms))
    assert protected(prepared, plan).released[0].train.clip == pytest.approx(0.5 * math.sqrt(32))


def test_a_target_counts_all_planned_passes() -> None:
    noise = msgspec.structs.replace(PUBLIC, noise_multiplier=None, epsilon=8.0)
    prepared = prepare(net_job(noise, steps=700, eval_every=100, eval_samples=8))  # 5,600 samples: four passes
    found = protected(prepared, placed(prepared, [after(prepared, "relu")]))
    assert epsilon_of(squared_mu(found.noise_multiplier, 7), 1e-5) == pytest.approx(8.0)  # seven evaluations


def test_between_holders_values_stay_as_they_are_and_every_boundary_counts() -> None:
    job = with_noise(job_of("mlp", {"layers": 3, "width": 16}, DIGITS), PUBLIC, data_holder=["d0", "d1"])
    prepared = prepare(job)
    names = ("relu", "relu_1")
    found = protected(prepared, placed(prepared, [after(prepared, name) for name in names]), ("d0", "d1"))
    assert sorted(found.raw) == [0, 1]
    assert [*found.released] == [1]
    found = protected(prepared, placed(prepared, [after(prepared, name) for name in names]), ("d0",))
    assert (sorted(found.raw), [*found.released], found.train) == ([0], [0], 1)


def test_a_value_that_skips_a_holder_is_covered_where_it_leaves_and_counts_too() -> None:
    job = with_noise(job_of(NET, {"skips": True}, DIGITS), PUBLIC, data_holder=["d0", "d1"])
    prepared = prepare(job)
    plan = placed(prepared, [after(prepared, name) for name in ("relu", "relu_1")])
    found = protected(prepared, plan, ("d0", "d1"))
    assert ([*found.released], found.train, found.heldout) == ([0, 1], 2, 2)
    assert found.released[0].train.targets == (2,)
    with pytest.raises(UserError, match=r"d2 takes value 'relu' as it is and sends gradients to d1"):
        protected(prepared, plan, ("d0", "d2"))


def test_labels_that_stay_leave_the_last_stage_nothing_to_cover() -> None:
    """Gradients that the last holder sends tell of labels and of what was covered before."""
    job = with_noise(
        job_of("mlp", {"layers": 3, "width": 16}, DIGITS), STAY, data_holder=["d0", "d2"], labels_stay=True
    )
    prepared = prepare(job)
    plan = placed(prepared, [after(prepared, name) for name in ("relu", "relu_1")])
    found = protected(prepared, plan, ("d0", "d2"))
    assert (sorted(found.raw), [*found.released], found.train) == ([0], [0], 1)
    assert found.released[0].train.targets == (1,)
    assert not found.freezes(2)


def test_labels_of_a_holder_alone_stay_where_it_runs_both_ends() -> None:
    """Its last stage takes what was covered before, learns, and sends back gradients alone."""
    job = with_noise(job_of("mlp", {"layers": 3, "width": 16}, DIGITS), STAY, labels_stay=True)
    prepared, fleet = prepare(job), fleet_of(2)
    boundaries = [after(prepared, name) for name in ("relu", "relu_1")]
    plan = build_plan(prepared.problem(fleet), ["d0", "d1", "d0"], boundaries, planner="test")
    found = protected(prepared, plan)
    assert (sorted(found.raw), [*found.released], found.train) == ([0], [0], 1)
    assert found.released[0].train.targets == (1,)
    assert (found.freezes(0), found.freezes(2)) == (True, False)


# Refusals


@pytest.mark.parametrize(
    ("job", "cut", "words"),
    [
        (net_job(STAY), "relu", r"labels: got 'stay', and value 'batch_labels' goes from d0 to d1"),
        (
            net_job(options={"normalises": True}),
            "relu",
            r"batch_norm.default .* on d0 with .* a sample would leave with others",
        ),
        (net_job(), "cross_entropy_loss", r"computes the loss of raw samples on d0"),
        (net_job(TRAINED, clip_norm=1.0), "relu", r"training.clip_norm: got 1.0 with .*norms of gradients"),
        (net_job(TRAINED, non_finite="skip"), "relu", r"training.non_finite: got 'skip' with"),
        (net_job(TRAINED, precision="fp16"), "relu", r"training.precision: got 'fp16' with"),
        (
            with_noise(job_of("gpt", {"sequence_length": 16, "width": 16, "layers": 1, "heads": 2}, TEXT), PUBLIC),
            "add",
            r"labels 'labels' have the shape and type of 'input_ids', as next tokens have",
        ),
        (with_noise(job_of("cnn", {"batch_norm": True}, DIGITS), PUBLIC), "relu", r"batch_norm.default"),
    ],
)
def test_refused_where_the_count_would_not_be_the_truth(job: Job, cut: str, words: str) -> None:
    prepared = prepare(job)
    position = after(prepared, cut)
    count = len(Flow(prepared.captured.train, columns_first=True).operators)
    plan = placed(prepared, [position] if position < count else [], devices=2)
    with pytest.raises(UserError, match=words):
        protected(prepared, plan)


def test_there_is_a_holder_to_protect(tmp_path: Path) -> None:
    path = write_job(tmp_path)
    activations = "[privacy]\nactivations = { clip = 1.0, noise_multiplier = 1.0 }\n[learning_rate]"
    edited(path, ("[learning_rate]", activations))
    with pytest.raises(UserError, match=r"privacy.activations: got noise, expected a plan.data_holder"):
        load_job(path)


# The count


def item(index: int, *, step: int, kind: str = "train", samples: int = 8) -> Item:
    return msgspec.convert(
        {
            "index": index,
            "kind": kind,
            "step": step,
            "first_sample": step * samples if kind == "train" else 0,
            "micro_batches": samples // 2,
        },
        Item,
    )


COUNTED = Protection(frozenset({0}), {}, PUBLIC, 2.0, 1, 1)
"""mu of one release is 1."""


def test_what_is_done_again_counts_again(tmp_path: Path) -> None:
    ledger = PrivacyLedger(tmp_path, 1e-5, [16])
    for number, step in enumerate((0, 1, 2, 1, 2)):  # back after a loss
        ledger.opened(item(number, step=step), 2, COUNTED)
    spent = ledger.close()
    assert spent.by_epoch == pytest.approx([epsilon_of(n, 1e-5) for n in (2.0, 4.0)])
    assert spent.epsilon == spent.by_epoch[-1]


def test_sessions_add_up_and_who_is_killed_leaves_no_less_on_record(tmp_path: Path) -> None:
    ledger = PrivacyLedger(tmp_path, 1e-5, [16])
    ledger.opened(item(0, step=0), 2, COUNTED)
    left = read_spent(tmp_path)  # as if it were killed here
    assert left is not None
    assert [(s.first, s.end) for s in left.stretches[0]] == [(0, 16)]
    ledger.close()
    ledger = PrivacyLedger(tmp_path, 1e-5, [16])
    ledger.opened(item(0, step=1), 2, COUNTED)
    ledger.opened(item(1, step=2, kind="eval"), 2, COUNTED)
    spent = ledger.close()
    assert [(s.first, s.end) for s in spent.stretches[0]] == [(0, 8), (8, 16)]
    assert spent.by_epoch == pytest.approx([epsilon_of(1.0, 1e-5)])  # no sample twice
    assert spent.heldout_epsilon == pytest.approx(epsilon_of(1.0, 1e-5))


def test_a_run_that_was_counted_does_not_go_on_without_noise(tmp_path: Path) -> None:
    assert opened_ledger(tmp_path, None, [16]) is None
    ledger = PrivacyLedger(tmp_path, 1e-5, [16])
    ledger.opened(item(0, step=0), 2, COUNTED)
    ledger.close()
    with pytest.raises(UserError, match=r"privacy.activations: got none, expected the run's"):
        opened_ledger(tmp_path, None, [16])
    with pytest.raises(UserError, match=r"counts \(16,\) training samples, expected \(17,\)"):
        PrivacyLedger(tmp_path, 1e-5, [17])
