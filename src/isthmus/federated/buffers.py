"""A module's buffers of any type: every client starts from the server's, and what training changed is sent.

What a client sends of a buffer is its change, in double precision: the server adds the weighted mean of the changes.
A buffer that nobody changes (a mask with -inf, a table of float64) is never sent and keeps its bits; under secure
aggregation, where nobody may see which ones changed, zeros are sent of it. Of whole numbers (batch norm's count of
batches) the mean is rounded to the nearest, half to even.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn

from isthmus.errors import Diverged, UserError

T = TypeVar("T")
PREFIX = "buffers/"  # prefix of a buffer's name among the server's values, in broadcasts and in updates


def is_buffer(name: str) -> bool:
    """Return whether a value is a buffer of the model, or its change."""
    return name.startswith(PREFIX)


def buffers_of(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the buffers by the module's own names."""
    return {name.removeprefix(PREFIX): value for name, value in values.items() if is_buffer(name)}


def as_values(buffers: Mapping[str, T]) -> dict[str, T]:
    """Return the values of which `buffers_of` gives these buffers."""
    return {PREFIX + name: value for name, value in buffers.items()}


class ModuleBuffers:
    """Those of one module, under their names as of the beginning. The forward may write to them or assign others."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._slots: list[tuple[nn.Module, dict[str, Tensor | None]]] = []
        """Each module with buffers, and those that it had first."""
        self._names: dict[int, str] = {}
        self.own: dict[str, Tensor] = {}
        """Memory that stays the module's; a buffer that several modules share is there once."""
        self._cached: set[str] = set()  # not in a state dict: one that changes its shape is no state
        for prefix, owner in module.named_modules():
            slots = dict(owner._buffers)  # pyright: ignore[reportPrivateUsage]
            self._slots.append((owner, slots))
            for key, buffer in slots.items():
                if buffer is not None and id(buffer) not in self._names:
                    name = f"{prefix}.{key}" if prefix else key
                    self._names[id(buffer)] = name
                    self.own[name] = buffer
        self._first = {name: buffer.detach().clone() for name, buffer in self.own.items()}
        frozen = [(name, p) for name, p in module.named_parameters() if not p.requires_grad]
        self._frozen = [(name, p, p._version) for name, p in frozen]

    def now(self) -> dict[str, Tensor]:
        """Copies."""
        return {name: buffer.detach().clone() for name, buffer in self._found().items()}

    @torch.no_grad()
    def set(self, values: Mapping[str, Tensor]) -> None:
        """The module has these, and of all others its first ones. UserError for one that it has not."""
        for owner, slots in self._slots:
            held = owner._buffers  # pyright: ignore[reportPrivateUsage]
            if held.keys() != slots.keys() or any(held[key] is not slot for key, slot in slots.items()):
                held.clear()
                held.update(slots)
        for name, value in values.items():
            if name not in self.own or self.own[name].shape != value.shape or self.own[name].dtype != value.dtype:
                raise UserError(f"model: got a buffer {name!r} of {_form(value)}, which the model has not in that form")
        for name, buffer in self.own.items():
            value = values.get(name, self._first[name])
            if not _same_bits(buffer, value):  # a constant's memory may be shared with other processes, or expanded
                buffer.copy_(value)

    @torch.no_grad()
    def changes(self, since: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the changes of the buffers that are not as in `since`, or as at first: float64, of complex ones [...,
        2]. UserError for a change that has no mean."""
        for name, parameter, version in self._frozen:
            if parameter._version != version:
                what = f"model: training writes to the frozen parameter {name!r}"
                raise UserError(f"{what}, expected a buffer (register_buffer): each client's would be another")
        found: dict[str, Tensor] = {}
        for name, now in self._found().items():
            before = since.get(name, self._first[name])
            if not _same_bits(before, now.detach()):
                found[name] = _change(name, before, now)
        return found

    def _found(self) -> dict[str, Tensor]:
        """Where they are now. UserError for one of another form than at first, unless it is a cache."""
        found: dict[str, Tensor] = {}
        for owner, slots in self._slots:
            cached: set[str] = owner._non_persistent_buffers_set  # pyright: ignore[reportPrivateUsage]
            for key, now in owner._buffers.items():  # pyright: ignore[reportPrivateUsage]
                first = slots.get(key)
                name = None if first is None else self._names[id(first)]
                if now is None or (name in found and now is first):
                    continue
                if name is not None and first is not None and now.shape == first.shape:
                    found[name] = now.to(first.dtype)
                elif key not in cached:
                    got = "none" if first is None else _form(first)
                    what = f"model: buffer {key!r} of {type(owner).__name__} became {_form(now)} in training"
                    raise UserError(f"{what}, was {got}: expected one form from the beginning")
        return {name: found.get(name, buffer) for name, buffer in self.own.items()}


def numbers_form(buffer: Tensor) -> tuple[int, ...]:
    """The shape of its change."""
    return (*buffer.shape, 2) if buffer.is_complex() else tuple(buffer.shape)


def moved(buffer: Tensor, change: Tensor) -> Tensor:
    """The buffer with the mean change added, in its own type; where that is 0, its own bits. Diverged where the sum is
    not finite."""
    if buffer.is_complex():
        return torch.view_as_complex(moved(torch.view_as_real(buffer), change))
    if not buffer.is_floating_point():
        whole = change.round()
        if buffer.dtype == torch.bool:
            return (buffer.double() + change).round() != 0
        return (buffer.to(torch.int64) + whole.to(torch.int64)).to(buffer.dtype)
    found = torch.where(change == 0, buffer, (buffer.double() + change).to(buffer.dtype))
    if not bool(torch.isfinite(found[change != 0]).all()):
        raise Diverged("a buffer of the model is not finite any more: try a smaller learning rate")
    return found


def _change(name: str, before: Tensor, now: Tensor) -> Tensor:
    if now.device.type == "mps":  # it has no double precision
        before, now = before.cpu(), now.cpu()
    if now.is_complex():
        before, now = torch.view_as_real(before), torch.view_as_real(now)
    if not now.is_floating_point():
        if now.dtype in (torch.bool, torch.uint64):
            return now.double() - before.double()
        return (now.to(torch.int64) - before.to(torch.int64)).double()
    change = torch.where(_alike(before, now), 0.0, now.double() - before.double())
    lost = ~torch.isfinite(change) & torch.isfinite(now)
    if bool(lost.any()):
        number = float(before[lost][0])
        what = f"model: buffer {name!r} is {number:g} at first and {float(now[lost][0]):g} after training"
        raise UserError(f"{what}: expected finite first values: clients' changes from {number:g} have no mean")
    return change


def _alike(a: Tensor, b: Tensor) -> Tensor:
    a, b = a.double(), b.double()
    return (a == b) | (a.isnan() & b.isnan())


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if a.data_ptr() == b.data_ptr():
        return True
    return torch.equal(*(t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)))


def _form(buffer: Tensor) -> str:
    return f"{str(buffer.dtype).removeprefix('torch.')} {list(buffer.shape)}"
