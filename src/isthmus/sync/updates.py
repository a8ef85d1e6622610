"""The user's optimizer, stepped whole or for one layer at a time, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import cast
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from isthmus.errors import UserError
from isthmus.sync.averaging import Averager
from isthmus.sync.layers import FlatModel, Layer, pack, spans

PER_PARAMETER: tuple[type[Optimizer], ...] = (  # optimizers whose update of a parameter depends on that parameter alone
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
)

Closure = Callable[[], Tensor]

_ATTACHED: WeakSet[Optimizer] = WeakSet()


class Updates:
    """Steps of one optimizer. A step that the user takes past us raises UserError: it would be one too many."""

    def __init__(self, optimizer: Optimizer, model: FlatModel) -> None:
        _check_covered(optimizer, model)
        self.optimizer = optimizer
        self._averaged = frozenset(p for layer in model.layers for p in layer.parameters)
        self.check_averaged()
        self._allowed = False
        self._guard = optimizer.register_step_pre_hook(self._check_allowed)
        _ATTACHED.add(optimizer)
        group_of = {p: number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
        self._members: dict[str, list[tuple[int, list[nn.Parameter]]]] = {}
        for layer in model.layers:
            numbers = sorted({group_of[p] for p in layer.parameters})
            self._members[layer.name] = [(n, [p for p in layer.parameters if group_of[p] == n]) for n in numbers]

    def whole(self, closure: Closure | None = None, scaler: GradScaler | None = None) -> Tensor | None:
        """One step of everything. Returns the closure's loss, if there is a closure."""
        with self._stepping():
            if scaler is None:
                # torch types a closure as giving a float; in its own examples it gives a tensor.
                return cast("Tensor | None", self.optimizer.step(cast("Callable[[], float]", closure)))
            if closure is not None:
                raise UserError("sync.step: got a closure and a GradScaler, expected only one: torch takes no more")
            scaler.step(self.optimizer)
            return None

    def only(self, layers: Sequence[Layer]) -> None:
        """One step of these layers. Rates and whatever else was changed in `param_groups` count as ever.

        On a CPU torch's default is a loop whose temporaries, as large as the parameters, would come between backward's
        gradients and leave gaps in the heap that stay resident. Where the choice is left to torch we take its fused
        kernels: no temporaries, and a third of the time for Adam.
        """
        if not layers:
            return
        groups = self.optimizer.param_groups
        members: dict[int, list[nn.Parameter]] = {}
        for layer in layers:
            for number, parameters in self._members[layer.name]:
                members.setdefault(number, []).extend(parameters)
        self.optimizer.param_groups = [
            {**groups[number], "params": parameters, **self._kernels(groups[number], parameters)}
            for number, parameters in sorted(members.items())
        ]
        try:
            with self._stepping():
                self.optimizer.step()
        finally:
            self.optimizer.param_groups = groups

    def _kernels(self, group: Mapping[str, object], parameters: Sequence[nn.Parameter]) -> dict[str, bool]:
        """Return the changes to a group of `param_groups`, so that fused kernels update these parameters if they
        can.

        They go through memory from end to end, whatever its strides; SGD's take momentum of all parameters or of none.
        """
        undecided = all(group.get(choice, False) is None for choice in ("foreach", "fused"))
        special = any(group.get(option) for option in ("differentiable", "capturable"))
        if not undecided or special or not all(_is_plain(p) for p in parameters):
            return {}
        states = [self.optimizer.state.get(p, {}) for p in parameters]
        kept = {frozenset(name for name, value in state.items() if value is not None) for state in states}
        alike = all(t.stride() == p.stride() for p in parameters for t in self.state_of(p))
        return {"fused": True} if alike and len(kept) == 1 else {}

    def state_of(self, parameter: nn.Parameter) -> list[Tensor]:
        """The state that has one number per element of the parameter; counters are the same everywhere."""
        state = self.optimizer.state.get(parameter, {})
        return [v for _, v in sorted(state.items()) if isinstance(v, Tensor) and v.shape == parameter.shape]

    def check_averaged(self) -> None:
        """Raises UserError for a trainable parameter that is in the optimizer and in no layer, from the start or since.

        It would be updated by each worker for itself, and not at all where layers are updated one by one.
        """
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad and parameter not in self._averaged:
                    raise UserError(
                        f"the optimizer has a trainable parameter of shape {tuple(parameter.shape)} that is not "
                        "averaged: it was not in the model at isthmus.sync.attach, or not trainable. Attach a module "
                        "that holds all; after a change, close() and attach anew"
                    )

    def check_to_average(self, layers: Sequence[Layer], closure: Closure | None, scaler: GradScaler | None) -> None:
        """Raises UserError for a step that `average_with_state` cannot be part of.

        To be asked in every step: workers whose optimizers differ in what they remember cannot average it.
        """
        if closure is not None or scaler is not None:
            got = "a closure, whose gradients come" if closure is not None else "a GradScaler, whose scale comes off"
            raise UserError(
                f"sync option 'average_state': got {got} after they were averaged: expected loss.backward() and "
                "sync.step() alone"
            )
        for layer in layers:
            for name, parameter in zip(layer.parameter_names, layer.parameters, strict=True):
                if parameter.grad is None or parameter.grad.layout != torch.strided:
                    got = "no gradient" if parameter.grad is None else "a sparse gradient"
                    raise UserError(
                        f"sync option 'average_state': parameter {name!r} has {got}: expected a dense one of every "
                        "trainable parameter in each step"
                    )

    def detach(self) -> None:
        self._guard.remove()
        _ATTACHED.discard(self.optimizer)

    @contextmanager
    def _stepping(self) -> Generator[None]:
        self._allowed = True
        try:
            yield
        finally:
            self._allowed = False

    def _check_allowed(self, *_: object) -> None:
        if not self._allowed:
            raise UserError(
                "optimizer.step() was called directly: sync.step() takes its place, as sync.step(scaler=scaler) does "
                "that of scaler.step(optimizer)"
            )


def _is_plain(p: nn.Parameter) -> bool:
    """On a CPU, of floats, with a gradient that lies in memory as it does."""
    grad = p.grad
    return (
        p.device.type == "cpu"
        and p.is_floating_point()
        and grad is not None
        and grad.layout == torch.strided
        and grad.stride() == p.stride()
    )


def attached(optimizer: Optimizer) -> bool:
    """Return whether somebody steps this optimizer in the user's place already."""
    return optimizer in _ATTACHED


def per_parameter(optimizer: Optimizer) -> bool:
    """Return whether its parameters can be updated one at a time."""
    return isinstance(optimizer, PER_PARAMETER)


@torch.no_grad()
def average_with_state(averager: Averager, updates: Updates, layers: Sequence[Layer]) -> None:
    """Average gradients, parameters and optimizer state of layers whose gradients are there but not applied.

    An update that follows is the one that S-SGD would make, whatever the optimizer: averaging after an update would
    give Adam the mean of the squares for the square of the mean.
    """
    parameters = [p for layer in layers for p in layer.parameters]
    loose = [p.grad for p in parameters if p.grad is not None]
    loose += [tensor for p in parameters for tensor in updates.state_of(p)]
    packed = pack(loose)
    averager.average([*spans(layers), *packed.flats])
    packed.copy_to(loose)


def _check_covered(optimizer: Optimizer, model: FlatModel) -> None:
    updated = {p for group in optimizer.param_groups for p in group["params"]}
    for layer in model.layers:
        for name, parameter in zip(layer.parameter_names, layer.parameters, strict=True):
            if parameter not in updated:
                raise UserError(
                    f"parameter {name!r} is trainable but not in the optimizer: give it to the optimizer, or freeze it "
                    "with requires_grad_(False)"
                )
