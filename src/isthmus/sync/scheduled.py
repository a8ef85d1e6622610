"""Partial synchronisation inside backward: layers are updated when their gradients are there, averaged if due.

    backward   |-- layer 4 --|u|-- layer 3 --|u|-- layer 2 --|u|-- layer 1 --|u|        u: the layer's own update
    wire                       |........4........|             |....2....|       |wait    due in this step: 4 and 2

Averages are launched in the plan's order on every worker, whatever order gradients come in. Nothing is copied: the
parameters of a layer are not read again in this step once its gradients are complete, so they are averaged in place.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from isthmus.errors import UserError
from isthmus.plan.sync import SyncPlan
from isthmus.sync.divergence import MeasuredAverage
from isthmus.sync.hooks import gradients, versions
from isthmus.sync.layers import Layer, spans
from isthmus.sync.mode import Mode, Setting
from isthmus.sync.packing import Packed, pack
from isthmus.sync.updates import Closure, average_with_state, per_parameter


class _Due(NamedTuple):
    name: str
    layers: frozenset[int]


JOINED = " + "
"""Between the names of layers that a plan takes as one, because a message of one alone would be all latency."""


def layers_of(name: str) -> tuple[str, ...]:
    """The layers behind one name of a plan."""
    return tuple(name.split(JOINED))


class Scheduled(Mode):
    """Follows a `SyncPlan`. Without one, the whole model is averaged after the last step of each period."""

    in_backward = True

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        optimizer = setting.updates.optimizer
        if not per_parameter(optimizer):
            raise UserError(
                f"optimizer {type(optimizer).__name__}: got one that cannot update one layer at a time, as this mode "
                "does inside backward. Expected SGD, Adam, AdamW or another element-wise one; any optimizer works in "
                "'every-step', 'local', 'outer', 'streaming' and 'partial'"
            )
        self.origin = 0
        """The step at which the plan's first iteration was."""
        self._begin()

    def follow(self, plan: SyncPlan) -> None:
        """From the next step on. All workers must do so at the same step."""
        self.plan, self.origin = plan, self.steps
        self._begin()

    def _begin(self) -> None:
        layers = self.setting.model.layers
        numbers = {layer.name: number for number, layer in enumerate(layers)}
        names = self.plan.averaged(self.steps - self.origin) if self.plan is not None else ()
        self._due = [_Due(name, frozenset(numbers[layer] for layer in layers_of(name))) for name in names]
        self._due_layers = frozenset(number for due in self._due for number in due.layers)
        self._scheduled = self._scheduled_names()
        self._late = self.plan is None and self.averages_whole
        """All layers are averaged after this step, none inside its backward."""
        self._ready: set[int] = set()
        self._sent: list[tuple[_Due, MeasuredAverage, Packed | None]] = []
        self._versions: dict[int, list[int]] = {}

    @property
    def averages_whole(self) -> bool:
        """Whether the step that is being made, without a plan, ends with an average of everything."""
        return self.ends_period

    def _scheduled_names(self) -> frozenset[str]:
        if self.plan is None:
            return frozenset()
        return frozenset(self.plan.iterations[(self.steps - self.origin) % len(self.plan.iterations)].scheduled)

    def ready(self, number: int) -> None:
        s = self.setting
        if not (s.options.average_state and (self._late or number in self._due_layers)):
            s.updates.only(s.model.layers[number])
        self._versions[number] = versions(s.model.layers[number].parameters)
        self._ready.add(number)
        while len(self._sent) < len(self._due) and self._due[len(self._sent)].layers <= self._ready:
            self._sent.append(self._start(self._due[len(self._sent)]))

    def _start(self, due: _Due) -> tuple[_Due, MeasuredAverage, Packed | None]:
        s, layers = self.setting, self._layers(due)
        if not s.options.average_state:
            return due, MeasuredAverage(s.averager, spans(layers)), None
        packed = pack(self._loose(layers))
        return due, MeasuredAverage(s.averager, [*spans(layers), *packed.flats]), packed

    def _layers(self, due: _Due) -> list[Layer]:
        return [self.setting.model.layers[number] for number in sorted(due.layers)]

    def _loose(self, layers: list[Layer]) -> list[Tensor]:
        state_of = self.setting.updates.state_of
        states = [tensor for layer in layers for p in layer.parameters for tensor in state_of(p)]
        return [*(grad for layer in layers for grad in gradients(layer)), *states]

    def step(self, closure: Closure | None, scaler: GradScaler | None) -> Tensor | None:
        self._check(closure, scaler)
        for due, average, packed in self._sent:
            self._finish(due, average, packed)
        if self._late:
            self._average_all()
        return None

    def _finish(self, due: _Due, average: MeasuredAverage, packed: Packed | None) -> None:
        s = self.setting
        with s.monitor.waiting():
            distance = average.wait()
        if packed is not None:
            layers = self._layers(due)
            packed.copy_to(self._loose(layers))
            for layer in layers:
                s.updates.only(layer)
        elif due.name in self._scheduled:
            s.monitor.diverged(distance)

    def _average_all(self) -> None:
        s = self.setting
        if not s.options.average_state:
            self.average(s.model.layers)
            return
        with s.monitor.waiting():
            average_with_state(s.averager, s.updates, s.model.layers)
        for layer in s.model.layers:
            s.updates.only(layer)

    def stepped(self) -> None:
        """The step is counted: get ready for the next."""
        self._begin()

    def _check(self, closure: Closure | None, scaler: GradScaler | None) -> None:
        if closure is not None:
            raise UserError("sync.step(closure): this mode has updated inside backward already: expected no closure")
        if scaler is not None:
            raise UserError(
                "GradScaler: this mode updates inside backward, before the scale is taken off. Expected bfloat16 "
                "without a scaler, or mode 'every-step', 'local', 'outer' or 'partial'"
            )
        layers = self.setting.model.layers
        if len(self._ready) < len(layers):
            raise UserError("sync.step(): expected loss.backward() outside sync.no_sync() first")
        for number, layer in enumerate(layers):
            for name, then, is_now in zip(
                layer.parameter_names, self._versions[number], versions(layer.parameters), strict=True
            ):
                if is_now not in (then, -1):
                    raise UserError(
                        f"the gradient of {name!r} was changed after backward, as global-norm clipping "
                        "(clip_grad_norm_) and GradScaler.unscale_ do: too late in this mode, whose updates are made "
                        "inside backward. Use mode 'every-step', 'local', 'outer' or 'partial'"
                    )
