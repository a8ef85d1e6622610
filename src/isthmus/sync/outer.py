"""The exchange of `outer` and `streaming`: the workers average how far they have moved, and each makes the outer step.

The outer step itself: `training.outer`. Beside the model a worker keeps the outer parameters and their momentum: two
copies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from isthmus.plans import OuterOptimizer
from isthmus.sync.compressed import CompressedAverager
from isthmus.sync.divergence import MeasuredAverage
from isthmus.sync.mode import Setting, restored
from isthmus.training.outer import OuterStep


class OuterExchange:
    """Of some tensors. `start`: the outer ones, which are kept and changed in place."""

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
        """What is lost with the process, by name. Waits for what is on its way."""
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
