"""A joining device that gets the state while others train: the same bits, from frames that are checked."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from isthmus.cost import PlanLayout, build_replicas
from isthmus.errors import PeerError
from isthmus.experiments import RunOptions, Watcher, run_plan
from isthmus.fleet import Fleet
from isthmus.job import prepare
from isthmus.plans import Plan
from isthmus.protocol import Item, adaptation
from isthmus.protocol.run_messages import DeviceOrder, GiveState, SendState
from isthmus.runtime.coordinator.host import CoordinatorHost
from isthmus.runtime.coordinator.stage_assignments import StageAssignments
from isthmus.runtime.device.state_transfer import STRETCH_BYTES, CatchUpState, StateDonor, StateJoiner
from isthmus.runtime.messages.assignment import ReceiveStateMessage, StateMessage, StatePart
from isthmus.trace import Span
from isthmus.training.engine import EngineConfig
from isthmus.training.layout import header_of
from isthmus.training.optim import LearningRate, OptimizerConfig
from isthmus.training.snapshot import joined

from .jobs import DIGITS, fleet_of, job_of, plain_run

STEP_S = 0.1
"""Of one device alone."""
MOST_STEPS = 600
"""The run is ended when the joining device is seen at work."""

CONFIG = EngineConfig(
    optimizers=(OptimizerConfig(pattern="w*", weight_decay=0.1), OptimizerConfig(name="sgd", momentum=0.9)),
    learning_rate=LearningRate(schedule="cosine", warmup_steps=3),
    steps=20,
)
SHAPES = {"w": (300, 301), "v": (4,), "mean": (4,)}
AGREED = ReceiveStateMessage(
    run="r", number=1, step=5, donated={"oslo": SHAPES}, trained=frozenset({"w", "v"}), config=CONFIG, peers=()
)
Frame = tuple[StateMessage | StatePart, list[Tensor]]


def _given(draw: torch.Generator, step: int) -> dict[str, Tensor]:
    """Of one step; in every third one a parameter has no gradient."""
    found = {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}
    return {n: t for n, t in found.items() if n != "v" or step % 3}


def _lent(steps: int, waiting: int = 0) -> tuple[list[Frame], Mapping[str, Tensor], list[bool]]:
    """What a device that trains for some steps sends, its state then, and whether it went on."""
    draw = torch.Generator().manual_seed(1)
    start = {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}
    own = CatchUpState(CONFIG, {"w", "v"}, 4, start)
    own.repeat(_given(draw, 4))  # there is optimizer state
    sent: list[Frame] = []
    donor = StateDonor(
        SendState(number=1, step=5, parts=frozenset(SHAPES)),
        "r",
        "oslo",
        lambda message, tensors, _: sent.append((message, [t.clone() for t in tensors])),
        lambda: waiting,
    )
    donor.begin({**own.state(), "other": torch.zeros(3)})
    went_on: list[bool] = []
    for step in range(5, 5 + steps):
        given = _given(draw, step)
        copied = {name: t.clone() for name, t in given.items()}
        own.repeat(given)
        went_on.append(donor.go_on(copied))
    return sent, own.state(), went_on


def test_who_follows_has_the_same_bits() -> None:
    sent, expected, _ = _lent(7)
    assert max(t.numel() for _, tensors in sent for t in tensors) <= STRETCH_BYTES < 300 * 301 * 4
    joiner = StateJoiner(AGREED)
    steps = [step for message, tensors in sent if (step := joiner.accept(message, tensors)) is not None]
    assert steps == list(range(5, 13))
    ((step, parts),) = joiner.states()
    found = joined(parts.values())
    assert step == 12
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_lender_whose_steps_are_quicker_than_its_link_stops() -> None:
    assert _lent(2, waiting=1 << 22)[2] == [False, False]
    assert _lent(2, waiting=1 << 20)[2] == [True, True]


@pytest.mark.parametrize(
    "wrong",
    [
        StateMessage(run="r", number=1, of="rome", kind="state", step=5, headers=()),
        StateMessage(run="r", number=1, of="oslo", kind="state", step=5, headers=(header_of("w", torch.zeros(3, 3)),)),
        StateMessage(run="r", number=1, of="oslo", kind="gradients", step=5, headers=()),
        StatePart(run="r", number=1, of="oslo", offset=0),
    ],
    ids=["an unknown peer", "shapes", "gradients first", "no beginning"],
)
def test_what_was_not_agreed_is_refused(wrong: StateMessage | StatePart) -> None:
    with pytest.raises(PeerError):
        StateJoiner(AGREED).accept(wrong, [])


@pytest.mark.parametrize("wrong", ["again", "skips", "gap", "shapes"])
def test_what_comes_out_of_turn_is_refused(wrong: str) -> None:
    sent, _, _ = _lent(2)
    joiner = StateJoiner(AGREED)
    until = [i for i, (message, _) in enumerate(sent) if isinstance(message, StateMessage)][1]
    for message, tensors in sent[: until - 1]:
        joiner.accept(message, tensors)
    if wrong in ("again", "gap"):
        gap = StatePart(run="r", number=1, of="oslo", offset=3)
        message, tensors = sent[0] if wrong == "again" else (gap, [torch.zeros(1)])
    else:
        joiner.accept(*sent[until - 1])
        message, tensors = sent[until]
        assert isinstance(message, StateMessage)
        bad = {"step": 9} if wrong == "skips" else {"headers": (header_of("w", torch.zeros(2)),)}
        message = msgspec.structs.replace(message, **bad)
    with pytest.raises(PeerError):
        joiner.accept(message, tensors)


def test_a_change_costs_what_is_waited_for_and_that_is_less_where_newcomers_follow() -> None:
    made = job_of("mlp", {"layers": 4}, DIGITS)
    prepared = prepare(made)
    elements = sum(p.numel() for p in prepared.build().parameters())
    wire_s = elements * 4 / 1e9

    def moving_s(step_s: float) -> float:
        flops = prepared.problem(fleet_of(2)).cumulative_flops[-1] * made.training.micro_batches
        fleet = fleet_of(2, flops / step_s)
        alone, both = (
            build_replicas(
                prepared.problem(fleet.subset([f"d{i}" for i in range(n)])),
                [PlanLayout((f"d{i}",), (), made.training.micro_batches // n) for i in range(n)],
                planner="test",
            )
            for n in (1, 2)
        )
        now = StageAssignments(prepared, alone, fleet)
        assert now.moving_s(now) == 0
        return StageAssignments(prepared, both, fleet, number=1).moving_s(now)

    assert moving_s(100 * wire_s) == pytest.approx(wire_s)
    state = prepared.problem(fleet_of(2)).state.optimizer_bytes / 4 + 1
    assert moving_s(0.1 * wire_s) == pytest.approx(state * wire_s), "its gradients would come too late"


def test_a_newcomer_takes_part_and_nobody_waited_for_its_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One replica becomes two; no state travels while the run stands."""
    monkeypatch.setattr(adaptation, "CHANGE_S", 0.0)
    given: list[str] = []

    order = CoordinatorHost.order

    def ordered(host: CoordinatorHost, device: str, body: DeviceOrder) -> None:
        given.extend([device] if isinstance(body, GiveState) else [])
        order(host, device, body)

    monkeypatch.setattr(CoordinatorHost, "order", ordered)
    made = job_of("mlp", {"layers": 4}, DIGITS, steps=MOST_STEPS)
    made = msgspec.structs.replace(made, runtime=msgspec.structs.replace(made.runtime, emulate=True))
    prepared = prepare(made)
    flops = prepared.problem(fleet_of(2)).cumulative_flops[-1] * made.training.micro_batches
    fleet = fleet_of(2, flops / STEP_S)

    def replan(left: Fleet) -> Plan:
        each = made.training.micro_batches // len(left.names)
        return build_replicas(prepared.problem(left), [PlanLayout((d,), (), each) for d in left.names], planner="test")

    notes, losses, shared = list[str](), dict[int, float | None](), set[int]()

    def advanced(item: Item, loss: float | None, spans: tuple[Span, ...]) -> None:
        if item.kind == "train":
            losses[item.step] = loss
            shared.update(s.step for s in spans if s.device == "d1" and s.track == "compute")
            if len(shared) == 3:
                os.kill(os.getpid(), signal.SIGINT)

    options, watcher = RunOptions(replan=replan), Watcher(advanced=advanced, noted=notes.append)
    outcome = run_plan(prepared, replan(fleet.subset(["d0"])), fleet, tmp_path, options, watcher)
    assert outcome.outcome == "interrupted", outcome.reason
    (change,) = outcome.recoveries
    assert change.redone == 0 and min(shared) == change.step
    assert any("d1 gets its state" in note for note in notes), notes
    assert not given
    _, expected = plain_run(
        msgspec.structs.replace(made, training=msgspec.structs.replace(made.training, steps=len(losses))), prepared
    )
    assert [losses[step] for step in range(len(losses))] == pytest.approx(expected, rel=1e-5)
