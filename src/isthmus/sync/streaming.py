"""Streaming DiLoCo (2025, Alg. 2): fragments of the model take turns, and exchanges overlap the steps that follow.

The fragment of a step, and the step that waits for its exchange: `plans.sync_schedule`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from isthmus.errors import UserError
from isthmus.plans import OuterOptimizer
from isthmus.plans.sync_schedule import FragmentSchedule
from isthmus.sync.layers import Layer
from isthmus.sync.mode import Mode, Setting
from isthmus.sync.outer import OuterExchange
from isthmus.sync.packing import pack
from isthmus.sync.updates import Closure


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
        """What is on its way arrives: torch ends a process whose group goes away under an exchange."""
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
