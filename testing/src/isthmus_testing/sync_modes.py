"""The modes of `isthmus.sync` on a virtual clock: how long a step takes, given what layers and averages take.

    compute   |- forward -|-4-|-3-|-2-|-1-| - forward -|...
    channel                   |.4.|...3...|               one average at a time, in the mode's order

The messages, their order and the step that waits for them come from the schedules that `isthmus.sync` runs by
(`plans.sync_schedule`, `SyncPlan`, `planners.sync.fusion`). No worker is ahead of another here: times are those of the
slowest. Data loading and the host's own work count as forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from isthmus.errors import UserError, unknown_name
from isthmus.planners.sync import by_size, fused, sent
from isthmus.plans.exchanges import DELAY, FragmentSchedule, SendOrder
from isthmus.plans.sync import SyncPlan

__all__ = ["SyncChoices", "SyncedLayer", "SyncedModel", "simulate_sync"]


@dataclass(frozen=True, kw_only=True)
class SyncedLayer:
    """One layer, as the slowest worker sees it."""

    name: str
    backward_s: float  # its update included, where the mode makes it inside backward
    average_s: float  # averaging it alone
    forward_s: float = 0.0
    size_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class SyncedModel:
    """The layers and the period of a mode of synchronisation. Raises UserError for no layers, or a period below 1."""

    forward_s: float
    """Seconds before the first layer's forward, or of the whole forward where layers have no forward of their own."""
    layers: tuple[SyncedLayer, ...]  # in backward order
    latency_s: float  # the part of each average that one message for several layers pays once
    period: int

    def __post_init__(self) -> None:
        if not self.layers:
            raise UserError("layers: got none, expected at least one")
        if self.period < 1:
            raise UserError(f"period: got {self.period}, expected at least 1")

    @property
    def compute_s(self) -> float:
        return self.forward_s + sum(layer.forward_s + layer.backward_s for layer in self.layers)

    def wire_s(self, layers: Sequence[SyncedLayer]) -> float:
        """Averaging all of them, latency left out."""
        return sum(max(0.0, layer.average_s - self.latency_s) for layer in layers)

    @property
    def bound_s(self) -> float:
        """A step of a mode that averages every layer once in a period: max(compute, wire / H), latency left out."""
        return max(self.compute_s, self.wire_s(self.layers) / self.period)


@dataclass(frozen=True, kw_only=True)
class SyncChoices:
    """Options of the modes; each reads its own."""

    bucket_bytes: int = 1 << 20  # `every-step`
    at_once: int = 2  # `asc-wfbp`: messages that may be on their way together, at most
    plan: SyncPlan | None = None  # `partial`, `dream`, `dreamddp`: of the layers by their names here
    in_backward: bool = True  # `partial`: whether averages start inside backward
    forward_overlap: bool = False
    """`partial`, `dream`, `dreamddp`: whether a step ends before its averages have: the next forward waits for them."""
    delay: int = DELAY
    fragments: int = 0  # `streaming`: 0 for one per step of the period


class SyncClock:
    """The time of all workers, and of the channel."""

    def __init__(self, model: SyncedModel, at_once: int) -> None:
        self.model = model
        self.now_s = 0.0
        self._at_once = at_once
        self._ended_s: tuple[float, ...] = ()  # the newest messages

    def send(self, layers: Sequence[SyncedLayer]) -> float:
        """Start a message now; returns when it is through."""
        model = self.model
        through_s = sent(self._ended_s, self.now_s, model.wire_s(layers), model.latency_s, self._at_once)
        self._ended_s = (*self._ended_s, through_s)[-self._at_once :]
        return through_s

    def compute(
        self, messages: Sequence[Sequence[SyncedLayer]] = (), barriers: Mapping[str, float] | None = None
    ) -> list[float]:
        """Forward, each layer when its barrier opens, and backward, in which messages start in this order. Returns when
        each of them is through."""
        order, through_s = SendOrder(messages), list[float]()
        self.now_s += self.model.forward_s
        for layer in reversed(self.model.layers):
            self.wait((barriers or {}).get(layer.name, 0.0))
            self.now_s += layer.forward_s
        for layer in self.model.layers:
            self.now_s += layer.backward_s
            through_s += [self.send(messages[number]) for number in order.ready(layer)]
        return through_s

    def wait(self, until_s: float) -> None:
        self.now_s = max(self.now_s, until_s)


def _s_sgd(clock: SyncClock, choices: SyncChoices, steps: int) -> None:
    _gradients(clock, [range(len(clock.model.layers))], steps)


def _every_step(clock: SyncClock, choices: SyncChoices, steps: int) -> None:
    _gradients(clock, by_size([layer.size_bytes for layer in clock.model.layers], choices.bucket_bytes), steps)


def _asc_wfbp(clock: SyncClock, choices: SyncChoices, steps: int) -> None:
    model = clock.model
    ready_s = list(accumulate(layer.backward_s for layer in model.layers))
    wire_s = [model.wire_s([layer]) for layer in model.layers]
    _gradients(clock, fused(ready_s, wire_s, model.latency_s, choices.at_once).messages, steps)


def _gradients(clock: SyncClock, messages: Sequence[range], steps: int) -> None:
    """Every step waits for all of its messages, at the backward's end."""
    held = [[clock.model.layers[number] for number in message] for message in messages]
    for _ in range(steps):
        clock.wait(max(clock.compute(held)))


def _local(clock: SyncClock, choices: SyncChoices, steps: int) -> None:
    _fragments(clock, FragmentSchedule(period=clock.model.period, count=1), steps)


def _streaming(clock: SyncClock, choices: SyncChoices, steps: int) -> None:
    period, layers = clock.model.period, len(clock.model.layers)
    schedule = FragmentSchedule.streaming(
        layers=layers, period=period, fragments=choices.fragments, delay=choices.delay
    )
    _fragments(clock, schedule, steps)


def _fragments(clock: SyncClock, schedule: FragmentSchedule, steps: int) -> None:
    held: list[list[SyncedLayer]] = [[] for _ in range(schedule.count)]
    for number, layer in enumerate(reversed(clock.model.layers)):
        held[schedule.fragment_of(number)].append(layer)
    through_s = [0.0] * schedule.count
    for step in range(steps):
        clock.compute()
        for kind, fragment in schedule.events(step):
            if kind == "start":
                through_s[fragment] = clock.send(held[fragment])
            else:
                clock.wait(through_s[fragment])


def _planned(clock: SyncClock, choices: SyncChoices, steps: int) -> None:
    assert choices.plan is not None, "checked at the start"
    named = {layer.name: layer for layer in clock.model.layers}
    barriers: dict[str, float] = {}
    for step in range(steps):
        due = [named[name] for name in choices.plan.averaged(step) if named[name].average_s > 0]
        if not choices.in_backward:
            clock.compute()
            clock.wait(clock.send(due) if due else 0.0)
            continue
        through_s = clock.compute([[layer] for layer in due], barriers)
        if choices.forward_overlap:
            barriers = {layer.name: until_s for layer, until_s in zip(due, through_s, strict=True)}
        else:
            clock.wait(max(through_s, default=0.0))


_MODES: Mapping[str, Callable[[SyncClock, SyncChoices, int], None]] = {
    "s-sgd": _s_sgd,
    "asc-wfbp": _asc_wfbp,
    "every-step": _every_step,
    "local": _local,
    "outer": _local,
    "partial": _planned,
    "dream": _planned,
    "dreamddp": _planned,
    "streaming": _streaming,
}


def simulate_sync(mode: str, model: SyncedModel, choices: SyncChoices) -> float:
    """Mean seconds per step in the long run. Raises UserError for an unknown mode, or a plan that is missing."""
    if mode not in _MODES:
        raise unknown_name("sync mode", mode, _MODES)
    if _MODES[mode] is _planned and choices.plan is None:
        raise UserError(f"mode {mode!r}: got no plan, expected the layers of each iteration")
    settle, counted = 2 * model.period, 4 * model.period
    ended_s: list[float] = []
    for steps in (settle, settle + counted):
        clock = SyncClock(model, choices.at_once if mode == "asc-wfbp" else 1)
        _MODES[mode](clock, choices, steps)
        ended_s.append(clock.now_s)
    return (ended_s[1] - ended_s[0]) / counted
