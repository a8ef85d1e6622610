"""The exchange of `outer` and `streaming`: the workers average how far they have moved, and each makes the outer step;
and Streaming DiLoCo (2025, Alg. 2), where fragments of the model take turns.

The outer step itself: `training.outer`. Beside the model a worker keeps the outer parameters and their momentum: two
copies.

The fragment of a step, and the step that waits for its exchange: `plans.sync_schedule`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from isthmus.errors import UserError
from isthmus.plans import OuterOptimizer
from isthmus.plans.exchanges import FragmentSchedule
from isthmus.sync.averaging import CompressedAverager, MeasuredAverage
from isthmus.sync.layers import Layer, pack
from isthmus.sync.mode import Mode, Setting, restored
from isthmus.sync.updates import Closure
from isthmus.training.optim import OuterStep


class OuterExchange:
    """The outer step of some tensors. `start` are the outer ones, which are kept and changed in place."""

    def __init__(self, start: Sequence[Tensor], setting: Setting, config: OuterOptimizer) -> None:
        self._monitor = setting.monitor
        self._averager = setting.delta_averager()
        self._outer = OuterStep(start, config)
        self._deltas: list[Tensor] = []
        self._average: MeasuredAverage | None = None

    @torch.no_grad()
    def start(self, own: Sequence[Tensor], *, averaged: bool = False) -> None:
        """Send what was moved since the last outer step; nothing where `own` is the workers' average already."""
        self._deltas = self._outer.deltas(own)
        if not averaged:
            self._average = MeasuredAverage(self._averager, self._deltas)

    def arrive(self) -> None:
        """Wait until the others' are here."""
        if self._average is not None:
            with self._monitor.waiting():
                self._monitor.diverged(self._average.wait())
            self._average = None

    @torch.no_grad()
    def step(self) -> None:
        """Make the outer step with what arrives."""
        self.arrive()
        self._outer.step(self._deltas)
        self._deltas = []

    def mix_into(self, own: Sequence[Tensor]) -> None:
        """Bring a worker's tensors to the outer ones, but for the share that stays."""
        self._outer.mix_into(own)

    def state(self, prefix: str) -> dict[str, Tensor]:
        """Return the state that is lost with the process, by name. Waits for exchanges that are on their way."""
        self.arrive()
        found: dict[str, Tensor] = {}
        for number, (value, momentum) in enumerate(zip(self._outer.values, self._outer.momenta, strict=True)):
            found[f"{prefix}.{number}"] = value
            if momentum is not None:
                found[f"{prefix}.{number}.momentum"] = momentum
        found.update({f"{prefix}.delta.{number}": delta for number, delta in enumerate(self._deltas)})
        errors = self._averager.state(prefix) if isinstance(self._averager, CompressedAverager) else {}
        return {**found, **errors}

    def load(self, state: Mapping[str, Tensor], prefix: str) -> None:
        """Go on from what `state` gave. Raises UserError for tensors that do not fit."""
        own = list(enumerate(self._outer.values))
        momenta = [
            restored(state, name, value) if (name := f"{prefix}.{number}.momentum") in state else None
            for number, value in own
        ]
        self._outer.load([restored(state, f"{prefix}.{number}", value) for number, value in own], momenta)
        if isinstance(self._averager, CompressedAverager):
            self._averager.load(state, prefix)
        self.arrive()
        self._deltas = []
        if f"{prefix}.delta.0" in state:
            self._deltas = [restored(state, f"{prefix}.delta.{number}", value).clone() for number, value in own]


class Fragment:
    """Some layers and their exchange."""

    def __init__(self, layers: Sequence[Layer], setting: Setting, outer: OuterOptimizer) -> None:
        self._flats = [flat for layer in layers for flat in layer.flats]
        self.exchange = OuterExchange(pack(self._flats).flats, setting, outer)

    def start(self) -> None:
        self.exchange.start(pack(self._flats).flats)

    @torch.no_grad()
    def apply(self) -> None:
        """Make the outer step, and mix its result into the model."""
        self.exchange.step()
        packed = pack(self._flats)
        self.exchange.mix_into(packed.flats)
        packed.copy_to(self._flats)


class Streaming(Mode):
    """Starts one fragment's exchange at a time, and applies it `delay` steps later."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        options, layers = setting.options, setting.model.layers
        if options.delay >= setting.period > 1 or (setting.period == 1 and options.delay > 1):
            raise UserError(
                f"sync option 'delay': got {options.delay}, expected less than the period of {setting.period}"
            )
        self._schedule = FragmentSchedule.streaming(
            layers=len(layers), period=setting.period, fragments=options.fragments, delay=options.delay
        )
        held: list[list[Layer]] = [[] for _ in range(self._schedule.count)]
        for number, layer in enumerate(layers):
            held[self._schedule.fragment_of(number)].append(layer)
        outer = OuterOptimizer(
            rate=options.outer_rate, momentum=options.outer_momentum, delay=options.delay, mixing=options.mixing
        )
        self._fragments = [Fragment(members, setting, outer) for members in held]

    def step(self, closure: Closure | None, scaler: GradScaler | None) -> Tensor | None:
        loss = self.setting.updates.whole(closure, scaler)
        for kind, number in self._schedule.events(self.steps):
            if kind == "start":
                self._fragments[number].start()
            else:
                self._fragments[number].apply()
        return loss

    def detach(self) -> None:
        """Wait for exchanges that are on their way: torch ends a process whose group goes away under one."""
        for fragment in self._fragments:
            fragment.exchange.arrive()

    def state(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for number, fragment in enumerate(self._fragments):
            found.update(fragment.exchange.state(f"fragment.{number}"))
        return found

    def load(self, state: Mapping[str, Tensor]) -> None:
        for number, fragment in enumerate(self._fragments):
            fragment.exchange.load(state, f"fragment.{number}")
