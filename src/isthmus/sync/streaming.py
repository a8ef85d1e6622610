"""Streaming DiLoCo (2025, Alg. 2): fragments of the model take turns, and exchanges overlap the steps that follow.

The fragment of a step, and the step that uses its exchange: `plans.sync_schedule`. The outer step: `training.outer`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from isthmus.errors import UserError
from isthmus.plans import OuterOptimizer
from isthmus.plans.sync_schedule import FragmentSchedule
from isthmus.sync.compressed import CompressedAverager
from isthmus.sync.divergence import MeasuredAverage
from isthmus.sync.layers import Layer
from isthmus.sync.mode import Mode, Setting, restored
from isthmus.sync.outer import load_outer, outer_state
from isthmus.sync.packing import pack
from isthmus.sync.updates import Closure
from isthmus.training.outer import OuterStep


class Fragment:
    """Some layers, their outer parameters, and the exchange that is on its way."""

    def __init__(self, layers: list[Layer], setting: Setting) -> None:
        self._setting = setting
        self._flats = [flat for layer in layers for flat in layer.flats]
        options = setting.options
        outer = OuterOptimizer(
            rate=options.outer_rate, momentum=options.outer_momentum, delay=options.delay, mixing=options.mixing
        )
        self._outer = OuterStep(pack(self._flats).flats, outer)
        self._averager = setting.delta_averager()
        self._deltas: list[Tensor] = []
        self._average: MeasuredAverage | None = None

    @torch.no_grad()
    def start(self) -> None:
        """Send what was moved since the last outer step."""
        self._deltas = self._outer.deltas(pack(self._flats).flats)
        self._average = MeasuredAverage(self._averager, self._deltas)

    def arrive(self) -> None:
        """Wait until the others' are here."""
        if self._average is not None:
            with self._setting.monitor.waiting():
                self._setting.monitor.diverged(self._average.wait())
            self._average = None

    @torch.no_grad()
    def apply(self) -> None:
        """Make the outer step, and mix its result into the model."""
        self.arrive()
        self._outer.step(self._deltas)
        self._deltas = []
        packed = pack(self._flats)
        self._outer.mix_into(packed.flats)
        packed.copy_to(self._flats)

    def state(self, prefix: str) -> dict[str, Tensor]:
        self.arrive()
        deltas = {f"{prefix}.delta.{number}": delta for number, delta in enumerate(self._deltas)}
        errors = self._averager.state(prefix) if isinstance(self._averager, CompressedAverager) else {}
        return {**outer_state(self._outer, prefix), **deltas, **errors}

    def load(self, state: Mapping[str, Tensor], prefix: str) -> None:
        load_outer(self._outer, state, prefix)
        if isinstance(self._averager, CompressedAverager):
            self._averager.load(state, prefix)
        self.arrive()
        self._deltas = []
        if f"{prefix}.delta.0" in state:
            values = self._outer.values
            self._deltas = [restored(state, f"{prefix}.delta.{n}", v).clone() for n, v in enumerate(values)]


class Streaming(Mode):
    """Starts one fragment's exchange at a time, and applies it `delay` steps later."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        options = setting.options
        if options.delay >= setting.period > 1 or (setting.period == 1 and options.delay > 1):
            raise UserError(
                f"sync option 'delay': got {options.delay}, expected less than the period of {setting.period}"
            )
        layers = setting.model.layers
        self._schedule = FragmentSchedule.streaming(
            layers=len(layers), period=setting.period, fragments=options.fragments, delay=options.delay
        )
        held: list[list[Layer]] = [[] for _ in range(self._schedule.count)]
        for number, layer in enumerate(layers):
            held[self._schedule.fragment_of(number)].append(layer)
        self._fragments = [Fragment(fragment, setting) for fragment in held]

    def step(self, closure: Closure | None, scaler: GradScaler | None) -> Tensor | None:
        loss = self.setting.updates.whole(closure, scaler)
        for kind, number in self._schedule.events(self.steps):
            if kind == "start":
                self._fragments[number].start()
            else:
                self._fragments[number].apply()
        return loss

    def detach(self) -> None:
        """What is on its way arrives: torch ends a process whose group goes away under an exchange."""
        for fragment in self._fragments:
            fragment.arrive()

    def state(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for number, fragment in enumerate(self._fragments):
            found.update(fragment.state(f"fragment.{number}"))
        return found

    def load(self, state: Mapping[str, Tensor]) -> None:
        for number, fragment in enumerate(self._fragments):
            fragment.load(state, f"fragment.{number}")
