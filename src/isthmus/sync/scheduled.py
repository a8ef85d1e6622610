"""Partial synchronisation inside backward: layers that are due are updated and averaged when their gradients are there;
and PLSGD with equal numbers (DreamDDP, Example 1).

    backward   |-- layer 4 --|u|-- layer 3 --|-- layer 2 --|u|-- layer 1 --|uu|        u: a layer's own update
    wire                       |........4........|           |....2....|               due in this step: 4 and 2

Averages are launched in the plan's order on every worker, whatever order gradients come in. Nothing is copied: the
parameters of a layer are not read again in this step once its gradients are complete, so they are averaged in place.
At the step's end a worker waits for averages that are still under way, or, with `forward_overlap`, where the next
forward needs it (`barriers`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from isthmus.combinations import refused
from isthmus.errors import UserError
from isthmus.planners.sync import SyncProblem, WorkerProfile, plan_sync
from isthmus.plans.exchanges import SendOrder
from isthmus.plans.sync import SyncPlan
from isthmus.sync.averaging import MeasuredAverage
from isthmus.sync.hooks import GONE, ForwardBarriers, gradients, versions
from isthmus.sync.layers import FlatModel, Layer, PackedTensors, pack, spans
from isthmus.sync.mode import Mode, Setting
from isthmus.sync.updates import Closure, average_with_state, per_parameter


class _Due(NamedTuple):
    name: str
    layers: frozenset[int]


@dataclass(frozen=True)
class _SentLayers:
    """An average on its way."""

    layers: frozenset[int]
    average: MeasuredAverage
    packed: PackedTensors | None
    counts: bool  # whether its divergence is reported: once a period for each layer


JOINED = " + "
"""Between the names of layers that a plan takes as one, because a message of one alone would be all latency."""


def layers_of(name: str) -> tuple[str, ...]:
    """The layers behind one name of a plan."""
    return tuple(name.split(JOINED))


class Scheduled(Mode):
    """Follows a `SyncPlan`. Without one, the whole model is averaged after the last step of each period."""

    in_backward = True
    updates_in_backward = True

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        optimizer = setting.updates.optimizer
        if not per_parameter(optimizer):
            raise refused("optimizers", "updates in backward", type(optimizer).__name__)
        self.origin = 0  # the step at which the plan's first iteration was
        self._on_the_way: dict[int, _SentLayers] = {}
        """Layers that are being averaged, in the order in which they were sent."""
        self.barriers = ForwardBarriers(
            setting.module, setting.model.layers, self.entered, lambda number: self.finish([number])
        )
        self._begin()

    def follow(self, plan: SyncPlan) -> None:
        """From the next step on. All workers must do so at the same step."""
        self.plan, self.origin = plan, self.steps
        self._begin()

    def load(self, state: Mapping[str, Tensor]) -> None:
        """The steps are counted already: what is due next follows from them."""
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
        self._order = SendOrder([due.layers for due in self._due])
        self._versions: dict[int, list[tuple[int, int]]] = {}

    @property
    def averages_whole(self) -> bool:
        """Return whether the step that is being made, without a plan, ends with an average of everything."""
        return self.ends_period

    def _scheduled_names(self) -> frozenset[str]:
        if self.plan is None:
            return frozenset()
        return frozenset(self.plan.iterations[(self.steps - self.origin) % len(self.plan.iterations)].scheduled)

    def ready(self, number: int) -> None:
        self._versions[number] = versions(self.setting.model.layers[number].parameters)
        for message in self._order.ready(number):
            self._start(self._due[message])

    def accept_gradients(self) -> None:
        for number in self._versions:
            self._versions[number] = versions(self.setting.model.layers[number].parameters)

    def _start(self, due: _Due) -> None:
        s, layers = self.setting, self._layers(due.layers)
        self.finish(sorted(due.layers))
        if not s.options.average_state:
            s.updates.only(layers)
        packed = pack(self._loose(layers)) if s.options.average_state else None
        average = MeasuredAverage(s.averager, [*spans(layers), *(packed.flats if packed is not None else ())])
        sent = _SentLayers(due.layers, average, packed, due.name in self._scheduled)
        self._on_the_way.update(dict.fromkeys(sorted(due.layers), sent))

    def _layers(self, numbers: frozenset[int]) -> list[Layer]:
        return [self.setting.model.layers[number] for number in sorted(numbers)]

    def _loose(self, layers: list[Layer]) -> list[Tensor]:
        state_of = self.setting.updates.state_of
        states = [tensor for layer in layers for p in layer.parameters for tensor in state_of(p)]
        return [*(grad for layer in layers for grad in gradients(layer)), *states]

    def step(self, closure: Closure | None, scaler: GradScaler | None) -> Tensor | None:
        self._check(closure, scaler)
        s, everything = self.setting, frozenset(range(len(self.setting.model.layers)))
        if not (self._late and s.options.average_state):
            # One call for all that is not averaged now: an optimizer's step costs more than a small layer's update.
            rest = everything - self._due_layers
            self.finish(sorted(rest))
            s.updates.only(self._layers(rest))
        if not self.overlaps_forward:
            self.wait()
        if self._late:
            self._average_all()
        return None

    @property
    def overlaps_forward(self) -> bool:
        """Return whether averages may be on the way between steps."""
        options = self.setting.options
        return options.forward_overlap and not options.average_state and self.barriers.proven

    def entered(self, number: int) -> None:
        """A forward is about to read a layer."""
        self.finish([number])

    def wait(self) -> None:
        self.finish(list(self._on_the_way))

    def finish(self, numbers: Sequence[int]) -> None:
        """Wait until these layers are averaged, if they are being so."""
        for number in numbers:
            if (sent := self._on_the_way.get(number)) is not None:
                self._finish(sent)

    def _finish(self, sent: _SentLayers) -> None:
        s = self.setting
        with s.monitor.waiting():
            distance = sent.average.wait()
        for number in sent.layers:
            del self._on_the_way[number]
        if sent.packed is not None:
            layers = self._layers(sent.layers)
            sent.packed.copy_to(self._loose(layers))
            s.updates.only(layers)
        elif sent.counts:
            s.monitor.diverged(distance)

    def detach(self) -> None:
        try:
            self.wait()
        finally:
            self.barriers.detach()

    def _average_all(self) -> None:
        s = self.setting
        if not s.options.average_state:
            self.average(s.model.layers)
            return
        with s.monitor.waiting():
            average_with_state(s.averager, s.updates, s.model.layers)
        s.updates.only(s.model.layers)

    def stepped(self) -> None:
        """The step is counted: get ready for the next."""
        self._begin()

    def _check(self, closure: Closure | None, scaler: GradScaler | None) -> None:
        if closure is not None:
            raise refused("closures", "updates in backward", "one")
        if scaler is not None:
            raise refused("GradScaler", "updates in backward", "one")
        layers = self.setting.model.layers
        if len(self._order.complete) < len(layers):
            raise UserError("sync.step(): expected loss.backward() outside sync.no_sync() first")
        for number, layer in enumerate(layers):
            for name, then, is_now in zip(
                layer.parameter_names, self._versions[number], versions(layer.parameters), strict=True
            ):
                if is_now not in (then, GONE):
                    raise refused("changed gradients", "updates in backward", f"that of {name!r} after backward")


class PartialSync(Mode):
    """Averages after the update, in the open. Any optimizer, clipping and scaling work as ever."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.plan = equal_plan(setting.model, setting.period)

    def step(self, closure: Closure | None, scaler: GradScaler | None) -> Tensor | None:
        s = self.setting
        assert self.plan is not None
        due = set(self.plan.averaged(self.steps))
        layers = [layer for layer in reversed(s.model.layers) if layer.name in due]
        if s.options.average_state:
            s.updates.check_to_average(s.model.layers, closure, scaler)
            with s.monitor.waiting():
                average_with_state(s.averager, s.updates, layers)
        loss = s.updates.whole(closure, scaler)
        if not s.options.average_state:
            self.average(layers)
        return loss


class OverlappedPartialSync(Scheduled):
    """The same schedule inside backward, as the paper runs it."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.follow(equal_plan(setting.model, setting.period))


def partial_sync(setting: Setting) -> Mode:
    """Return the mode that the option `overlap` chooses."""
    return OverlappedPartialSync(setting) if setting.options.overlap else PartialSync(setting)


def equal_plan(model: FlatModel, period: int) -> SyncPlan:
    """Every layer once in a period, as many in each iteration; nothing is known of times, so no bubbles are filled."""
    count = len(model.layers)
    names = tuple(layer.name for layer in model.layers)
    # Averages far longer than computation leave no bubble to fill.
    profile = WorkerProfile(
        worker="any", forward_s=(0.0,) * count, backward_s=(1e-3,) * count, average_s=(1.0,) * count
    )
    return plan_sync("equal-number", SyncProblem(layers=names, workers=(profile,), iterations=period))
