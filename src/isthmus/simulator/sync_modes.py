"""The modes of `isthmus.sync` on a virtual clock: how long a step takes, given what layers and averages take.

    compute   |- forward -|-4-|-3-|-2-|-1-| - forward -|...
    channel                   |.4.|...3...|               one average at a time, in the mode's order

No worker is ahead of another here: times are those of the slowest. Data loading and the host's own work count as
forward. What a planner's timeline says of one iteration comes out here too, for the modes that a plan describes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from isthmus.errors import UserError, unknown_name
from isthmus.planners.sync import fused


@dataclass(frozen=True, kw_only=True)
class SyncedLayer:
    """One layer, as the slowest worker sees it."""

    name: str
    backward_s: float
    """Its update included, where the mode makes it inside backward."""
    average_s: float
    """Averaging it alone."""
    forward_s: float = 0.0
    size_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class SyncedModel:
    """The layers and the period of a mode of synchronisation. Raises UserError for no layers, or a period below 1."""

    forward_s: float
    """What comes before the first layer's forward, or all of it where nothing is said of single layers."""
    layers: tuple[SyncedLayer, ...]
    """In backward order."""
    latency_s: float
    """The part of each average that one message for several layers pays once."""
    period: int

    def __post_init__(self) -> None:
        if not self.layers:
            raise UserError("layers: got none, expected at least one")
        if self.period < 1:
            raise UserError(f"period: got {self.period}, expected at least 1")

    @property
    def compute_s(self) -> float:
        return self.forward_s + sum(layer.forward_s + layer.backward_s for layer in self.layers)

    def message_s(self, layers: Sequence[SyncedLayer]) -> float:
        """One message for all of them."""
        return self.latency_s + sum(max(0.0, layer.average_s - self.latency_s) for layer in layers) if layers else 0.0

    @property
    def bound_s(self) -> float:
        """A step of a mode that averages every layer once in a period: max(compute, wire / H), latency left out."""
        wire_s = sum(max(0.0, layer.average_s - self.latency_s) for layer in self.layers)
        return max(self.compute_s, wire_s / self.period)


@dataclass(frozen=True, kw_only=True)
class SyncChoices:
    """Options of the modes; each reads its own."""

    bucket_bytes: int = 1 << 20
    """`every-step`."""
    at_once: int = 2
    """`asc-wfbp`: messages that may be on their way together, at most."""
    schedule: Sequence[frozenset[str]] = ()
    """`partial`, `dream`, `dreamddp`: the layers that each iteration of the period averages."""
    in_backward: bool = True
    """`partial`: whether averages start inside backward."""
    forward_overlap: bool = False
    """`partial`, `dream`, `dreamddp`: whether a step ends before its averages have: the next forward waits for them."""
    delay: int = 1
    fragments: int = 0
    """`streaming`: 0 for one per step of the period."""


class _Run:
    """A clock, and the channel's own."""

    def __init__(self, model: SyncedModel) -> None:
        self.model = model
        self.now_s = 0.0
        self._free_s = 0.0

    def send(self, layers: Sequence[SyncedLayer]) -> float:
        """Start a message now; returns when it is through."""
        self._free_s = max(self._free_s, self.now_s) + self.model.message_s(layers)
        return self._free_s

    def compute(
        self, after: Callable[[SyncedLayer], None] | None = None, barriers: Mapping[str, float] | None = None
    ) -> None:
        """Forward, each layer when its gate opens, and backward."""
        self.now_s += self.model.forward_s
        for layer in reversed(self.model.layers):
            self.wait((barriers or {}).get(layer.name, 0.0))
            self.now_s += layer.forward_s
        for layer in self.model.layers:
            self.now_s += layer.backward_s
            if after is not None:
                after(layer)

    def wait(self, until_s: float) -> None:
        self.now_s = max(self.now_s, until_s)


def _every_step(run: _Run, choices: SyncChoices, steps: int) -> None:
    for _ in range(steps):
        waiting: list[SyncedLayer] = []
        through = [0.0]

        def ready(layer: SyncedLayer, waiting: list[SyncedLayer] = waiting, through: list[float] = through) -> None:
            waiting.append(layer)
            full = sum(one.size_bytes for one in waiting) >= choices.bucket_bytes
            if full or layer is run.model.layers[-1]:
                through.append(run.send(waiting))
                waiting.clear()

        run.compute(ready)
        run.wait(through[-1])


def _s_sgd(run: _Run, choices: SyncChoices, steps: int) -> None:
    for _ in range(steps):
        run.compute()
        run.wait(run.send(run.model.layers))


def _asc_wfbp(run: _Run, choices: SyncChoices, steps: int) -> None:
    model = run.model
    ready_s = list(accumulate(layer.backward_s for layer in model.layers))
    wire_s = [max(0.0, layer.average_s - model.latency_s) for layer in model.layers]
    # Each step waits for its averages, so all steps are alike.
    through_s = fused(ready_s, wire_s, model.latency_s, choices.at_once).through_s
    for _ in range(steps):
        start_s = run.now_s + model.compute_s - ready_s[-1]
        run.compute()
        run.wait(start_s + through_s)


def _local(run: _Run, choices: SyncChoices, steps: int) -> None:
    for step in range(steps):
        run.compute()
        if (step + 1) % run.model.period == 0:
            run.wait(run.send(run.model.layers))


def _scheduled(run: _Run, choices: SyncChoices, steps: int) -> None:
    barriers: dict[str, float] = {}
    for step in range(steps):
        due = choices.schedule[step % len(choices.schedule)]
        through: dict[str, float] = {}

        def ready(layer: SyncedLayer, due: frozenset[str] = due, through: dict[str, float] = through) -> None:
            if layer.name in due and layer.average_s > 0:
                through[layer.name] = run.send([layer])

        run.compute(ready if choices.in_backward else None, barriers)
        if not choices.in_backward:
            for layer in run.model.layers:
                ready(layer)
        if choices.forward_overlap:
            barriers = through
        else:
            run.wait(max(through.values(), default=0.0))


def _streaming(run: _Run, choices: SyncChoices, steps: int) -> None:
    model = run.model
    count = min(choices.fragments or model.period, len(model.layers), model.period)
    on_the_way: dict[int, list[float]] = {}
    for step in range(steps):
        run.compute()
        for through_s in on_the_way.pop(step, []):
            run.wait(through_s)
        turns = [n for n in range(count) if step % model.period == (n + 1) * model.period // count - 1]
        sent = [run.send(model.layers[::-1][n::count]) for n in turns]
        if choices.delay:
            on_the_way[step + choices.delay] = sent
        else:
            run.wait(max(sent, default=0.0))


_MODES: Mapping[str, Callable[[_Run, SyncChoices, int], None]] = {
    "s-sgd": _s_sgd,
    "asc-wfbp": _asc_wfbp,
    "every-step": _every_step,
    "local": _local,
    "outer": _local,
    "partial": _scheduled,
    "dream": _scheduled,
    "dreamddp": _scheduled,
    "streaming": _streaming,
}


def simulate_sync(mode: str, model: SyncedModel, choices: SyncChoices) -> float:
    """Mean seconds per step in the long run. Raises UserError for an unknown mode, or a schedule that is missing."""
    if mode not in _MODES:
        raise unknown_name("sync mode", mode, _MODES)
    if _MODES[mode] is _scheduled and not choices.schedule:
        raise UserError(f"mode {mode!r}: got no schedule, expected the layers of each iteration")
    settle, counted = 2 * model.period, 4 * model.period
    run = _Run(model)
    _MODES[mode](run, choices, settle)
    whole = _Run(model)
    _MODES[mode](whole, choices, settle + counted)
    return (whole.now_s - run.now_s) / counted
