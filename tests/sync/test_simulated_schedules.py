"""A simulated mode starts the messages of a real run, of the same layers in the same steps, and waits for them when the
run does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

from isthmus.planners.sync import SyncProblem, WorkerProfile, plan_sync
from isthmus.plans import SyncPlan
from isthmus.sync import Options, attach
from isthmus.sync.averaging import Averager, PendingAverage
from isthmus_testing import sync_modes
from isthmus_testing.sync_modes import SyncChoices, SyncedLayer, SyncedModel

WIDTHS = (16, 16, 32, 32, 64, 64)
SIZES = [4 * a * b for a, b in pairwise(WIDTHS)]
"""Each twice the one before: a message's bytes tell its layers."""
PERIOD, STEPS = 4, 13


class Log:
    """Messages in the order of their start."""

    def __init__(self) -> None:
        self.messages: list[tuple[int, int]] = []
        """Bytes, and the step that starts the message."""
        self.awaited: dict[int, int] = {}
        """The step that waits for a message, by number."""

    def start(self, size_bytes: int, step: int) -> int:
        self.messages.append((size_bytes, step))
        return len(self.messages) - 1

    def first(self, steps: int) -> tuple[list[tuple[int, int]], dict[int, int]]:
        """Messages and waits of so many steps."""
        messages = [message for message in self.messages if message[1] < steps]
        return messages, {number: step for number, step in self.awaited.items() if step < steps}


def run(mode: str, options: Options, monkeypatch: pytest.MonkeyPatch) -> tuple[Log, SyncPlan | None]:
    """One worker alone: the schedule does not depend on how many there are. The plan is that of the mode."""
    log, numbers = Log(), dict[PendingAverage, int]()
    start, wait = Averager.start, PendingAverage.wait

    def started(averager: Averager, tensors: Sequence[Tensor], lane: int = 0) -> PendingAverage:
        pending = start(averager, tensors, lane)
        numbers[pending] = log.start(sum(tensor.nbytes for tensor in tensors), sync.steps)
        return pending

    def waited(pending: PendingAverage) -> None:
        log.awaited.setdefault(numbers[pending], sync.steps)
        wait(pending)

    monkeypatch.setattr(Averager, "start", started)
    monkeypatch.setattr(PendingAverage, "wait", waited)
    model = nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in pairwise(WIDTHS)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = attach(model, optimizer, mode=mode, period=PERIOD, options=options)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.ones(2, 16)).square().mean().backward()
        sync.step()
    plan = sync.statistics().plan
    sync.close()
    return log, plan


def simulated(mode: str, choices: SyncChoices, monkeypatch: pytest.MonkeyPatch) -> Log:
    log = Log()

    class Watched(sync_modes.SyncClock):
        step = -1
        through_s: dict[int, float]

        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            log.messages.clear()  # the longest simulation counts
            log.awaited.clear()
            self.through_s = {}

        def send(self, layers: Sequence[SyncedLayer]) -> float:
            number = log.start(sum(layer.size_bytes for layer in layers), self.step)
            self.through_s[number] = super().send(layers)
            return self.through_s[number]

        def compute(self, *given: Any, **named: Any) -> list[float]:
            self.step += 1
            return super().compute(*given, **named)

        def wait(self, until_s: float) -> None:
            for number, through_s in self.through_s.items():
                if through_s <= until_s:
                    log.awaited.setdefault(number, self.step)
            super().wait(until_s)

    monkeypatch.setattr(sync_modes, "SyncClock", Watched)
    sync_modes.simulate_sync(mode, MODEL, choices)
    return log


MODEL = SyncedModel(
    forward_s=0.0,
    layers=tuple(
        SyncedLayer(name=str(number), forward_s=0.1, backward_s=0.2, average_s=0.5, size_bytes=SIZES[number])
        for number in reversed(range(len(SIZES)))
    ),
    latency_s=0.01,
    period=PERIOD,
)


def plan_of(planner: str, *, overlap: bool = False) -> SyncPlan:
    forward = MODEL.layers[::-1]
    profile = WorkerProfile(
        worker="any",
        forward_s=tuple(layer.forward_s for layer in forward),
        backward_s=tuple(layer.backward_s for layer in forward),
        average_s=tuple(layer.average_s for layer in forward),
    )
    names = tuple(layer.name for layer in forward)
    problem = SyncProblem(layers=names, workers=(profile,), iterations=PERIOD, forward_overlap=overlap)
    return plan_sync(planner, problem)


FINE = Options(smallest_layer_bytes=0)
CASES: dict[str, tuple[str, dict[str, object], SyncChoices]] = {
    "s-sgd": ("s-sgd", {}, SyncChoices()),
    "one bucket per layer": ("every-step", {"bucket_bytes": 1}, SyncChoices(bucket_bytes=1)),
    "some buckets": ("every-step", {"bucket_bytes": 9000}, SyncChoices(bucket_bytes=9000)),
    "local": ("local", {}, SyncChoices()),
    "outer": ("outer", {}, SyncChoices()),
    "streaming": ("streaming", {}, SyncChoices()),
    "streaming at once": ("streaming", {"delay": 0}, SyncChoices(delay=0)),
    "streaming, two fragments": ("streaming", {"delay": 3, "fragments": 2}, SyncChoices(delay=3, fragments=2)),
    "partial": ("partial", {}, SyncChoices(in_backward=False)),
    "partial inside backward": ("partial", {"overlap": True}, SyncChoices()),
    "dream": ("dream", {"plan": plan_of("dream-spread")}, SyncChoices()),
    "dream into the forward": (
        "dream",
        {"plan": plan_of("dream-spread", overlap=True), "forward_overlap": True},
        SyncChoices(forward_overlap=True),
    ),
}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("case", CASES)
def test_messages_of_a_simulation_are_those_of_a_run(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mode, options, choices = CASES[case]
    real, plan = run(mode, msgspec.structs.replace(FINE, **options), monkeypatch)
    on_clock = simulated(mode, replace(choices, plan=plan), monkeypatch)
    messages, awaited = real.first(STEPS)
    assert messages and awaited
    assert (messages, awaited) == on_clock.first(STEPS)
