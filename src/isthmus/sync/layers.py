"""The model as layers, each of them one piece of memory that a collective can average in place; and several tensors as
few.

    buffer   |..first..|....second....|.third.|......fourth......|      in the order of registration
                        ^ Layer.flats[0], a view; its parameters are views of it in turn

Parameters are moved once, at the start; the old memory is freed one by one. What would be the alternative, packing a
layer before each average and unpacking it after, costs a copy of everything in flight.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from isthmus.errors import UserError
from isthmus.graph.building import overlapping

_ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class Layer:
    """A module's own parameters, and those of small modules after it."""

    name: str
    parameters: tuple[nn.Parameter, ...]
    parameter_names: tuple[str, ...]
    flats: tuple[Tensor, ...]  # one per dtype and device, each of shape (elements,)

    @property
    def size_bytes(self) -> int:
        return sum(flat.nbytes for flat in self.flats)


@dataclass(frozen=True)
class FlatModel:
    """All trainable parameters of a model."""

    layers: tuple[Layer, ...]  # in the order of registration, which is mostly that of the forward
    buffers: tuple[Tensor, ...]  # the memory behind all layers, one per dtype and device

    @property
    def size_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers)

    def check_in_place(self) -> None:
        """Raises UserError where a parameter has left its place, as `model.to(...)` makes it."""
        places = {buffer.untyped_storage().data_ptr() for buffer in self.buffers}
        for layer in self.layers:
            for name, parameter in zip(layer.parameter_names, layer.parameters, strict=True):
                if parameter.untyped_storage().data_ptr() not in places:
                    raise UserError(
                        f"parameter {name!r} was given other memory after isthmus.sync.attach: move or convert the "
                        "model (.to, .half, .cuda) before"
                    )


def spans(layers: Iterable[Layer]) -> list[Tensor]:
    """The memory of some layers in as few pieces as can be: neighbours are one piece, the gap between them included.

    In the same order on every worker: one kind of number after the other, whatever the addresses of their buffers.
    """
    flats = [flat for layer in layers for flat in layer.flats]
    kinds = {place: number for number, place in enumerate(dict.fromkeys(_place(flat)[0] for flat in flats))}
    flats.sort(key=lambda flat: (kinds[_place(flat)[0]], _place(flat)[1]))
    found: list[Tensor] = []
    for flat in flats:
        last = found[-1] if found else None
        if last is not None and _place(last)[0] == _place(flat)[0]:
            start, end = last.storage_offset(), flat.storage_offset() + len(flat)
            gap_bytes = (flat.storage_offset() - start - len(last)) * flat.element_size()
            if gap_bytes < _ALIGNMENT_BYTES:
                found[-1] = last.as_strided((end - start,), (1,))
                continue
        found.append(flat)
    return found


def _place(flat: Tensor) -> tuple[int, int]:
    return flat.untyped_storage().data_ptr(), int(flat.storage_offset())


def flatten(model: nn.Module, smallest_layer_bytes: int) -> FlatModel:
    """Move the trainable parameters of `model` into flat buffers. Values and the parameters' identity stay.

    Raises UserError for a model without trainable parameters, or with two that share their memory.
    """
    groups = _merged(_by_module(model), smallest_layer_bytes)
    if not groups:
        raise UserError("the model has no trainable parameters: expected at least one with requires_grad")
    _check_apart(model)
    buffers, ranges = _moved([parameter for _, named in groups for _, parameter in named])
    return FlatModel(
        layers=tuple(
            Layer(
                name=name,
                parameters=tuple(parameter for _, parameter in named),
                parameter_names=tuple(n for n, _ in named),
                flats=_slices(buffers, [ranges[parameter] for _, parameter in named]),
            )
            for name, named in groups
        ),
        buffers=tuple(buffers.values()),
    )


_Named = list[tuple[str, nn.Parameter]]
_Kind = tuple[torch.dtype, torch.device]


def _by_module(model: nn.Module) -> list[tuple[str, _Named]]:
    # A tied parameter comes up once, under its first name.
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = itertools.groupby(named, key=lambda pair: pair[0].rpartition(".")[0])
    return [(module or "model", list(members)) for module, members in groups]


def _check_apart(model: nn.Module) -> None:
    """Parameters tied by their memory (`a.data = b.data`), and buffers, would come apart when they are moved."""
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    for other, name in overlapping([*parameters.items(), *buffers.items()]):
        pair = [parameters[n] for n in (other, name) if n in parameters]
        if other != name and (len(pair) == 2 or any(p.requires_grad for p in pair)):
            kinds = [f"{'parameter' if n in parameters else 'buffer'} {n!r}" for n in (other, name)]
            raise UserError(
                f"{' and '.join(kinds)} share their memory: tie them as one parameter (a.weight = b.weight)"
            )


def _merged(groups: Sequence[tuple[str, _Named]], smallest_bytes: int) -> list[tuple[str, _Named]]:
    """Small groups join the one before, under its name, and small ones at the start the first large one.

    Gradients come in backward order: the one before is complete later, and what joins it does not delay it.
    """
    found: list[tuple[str, _Named]] = []
    waiting: _Named = []
    for name, named in reversed(groups):
        waiting = [*named, *waiting]
        if sum(p.nbytes for _, p in waiting) >= smallest_bytes:
            found.insert(0, (name, waiting))
            waiting = []
    if waiting and found:
        name, named = found[0]
        found[0] = (name, [*waiting, *named])
    elif waiting:
        found.append((groups[-1][0], waiting))
    # One module's own parameters may be split around its children's: its name then comes up twice.
    seen: dict[str, int] = {}
    for place, (name, named) in enumerate(found):
        seen[name] = seen.get(name, 0) + 1
        if seen[name] > 1:
            found[place] = (f"{name}#{seen[name]}", named)
    return found


def _moved(parameters: Sequence[nn.Parameter]) -> tuple[dict[_Kind, Tensor], dict[nn.Parameter, tuple[_Kind, range]]]:
    ranges: dict[nn.Parameter, tuple[_Kind, range]] = {}
    ends: dict[_Kind, int] = {}
    for parameter in parameters:
        kind = (parameter.dtype, parameter.device)
        start = ends.get(kind, 0)
        ranges[parameter] = (kind, range(start, start + parameter.numel()))
        aligned = _ALIGNMENT_BYTES // parameter.element_size()
        ends[kind] = -(-(start + parameter.numel()) // aligned) * aligned
    # Zeros, for the gaps: they are averaged too.
    buffers = {kind: torch.zeros(end, dtype=kind[0], device=kind[1]) for kind, end in ends.items()}
    with torch.no_grad():
        for parameter, (kind, place) in ranges.items():
            view = buffers[kind][place.start : place.stop].view(parameter.shape)
            view.copy_(parameter)
            parameter.data = view
    return buffers, ranges


def _slices(buffers: dict[_Kind, Tensor], places: Iterable[tuple[_Kind, range]]) -> tuple[Tensor, ...]:
    spans: dict[_Kind, tuple[int, int]] = {}
    for kind, place in places:
        start, end = spans.get(kind, (place.start, place.stop))
        spans[kind] = (min(start, place.start), max(end, place.stop))
    return tuple(buffers[kind][start:end] for kind, (start, end) in spans.items())


@dataclass(frozen=True)
class PackedTensors:
    """Copies of tensors, side by side."""

    flats: tuple[Tensor, ...]  # one per dtype and device, each of shape (elements,)
    views: tuple[Tensor, ...]  # into `flats`, in the order and with the shapes of what was packed

    def copy_to(self, tensors: Sequence[Tensor]) -> None:
        for tensor, view in zip(tensors, self.views, strict=True):
            tensor.copy_(view)


@torch.no_grad()
def pack(tensors: Sequence[Tensor]) -> PackedTensors:
    """Copy dense tensors into one flat tensor per dtype and device."""
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for number, tensor in enumerate(tensors):
        kinds.setdefault((tensor.dtype, tensor.device), []).append(number)
    flats = tuple(torch.cat([tensors[n].detach().reshape(-1) for n in numbers]) for numbers in kinds.values())
    views: dict[int, Tensor] = {}
    for flat, numbers in zip(flats, kinds.values(), strict=True):
        parts = flat.split([tensors[n].numel() for n in numbers])
        views.update((n, part.view(tensors[n].shape)) for n, part in zip(numbers, parts, strict=True))
    return PackedTensors(flats, tuple(views[n] for n in range(len(tensors))))
