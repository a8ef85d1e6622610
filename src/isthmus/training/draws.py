"""The random draws with which a module is built, recorded, and repeated by who would else be sent the values.

The record may be wrong: a module may seed the generator again, or write to a tensor in a way that no operator shows. So
each repeated tensor is compared by its digest with the one that was built, here as between versions of torch.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from isthmus.protocol.draws import Draw, Drawn, DrawnTensor, Draws
from isthmus.training.layout import bytes_of
from isthmus.training.stored import DTYPES

MOST_REPEATED = 1 << 27  # elements: about a second of a core
LEAST_BYTES = 1 << 10  # a smaller tensor is sent
_PIECE = 1 << 20  # elements that are drawn at once: a multiple of 16, which normal_ draws together
_COPIES = ("_to_copy", "clone", "copy_")


class DrawRecorder:
    """Sees the operators of a module's build."""

    def __init__(self) -> None:
        self.draws: list[Draw] = []
        self._origins: dict[int, Drawn] = {}  # by the addresses of storages
        self._complete = True  # all random numbers so far are from `draws`

    def origin(self, tensor: Tensor) -> Drawn | None:
        """The draw whose values a tensor has; None where it is not known."""
        return self._origins.get(_address(tensor)) if _is_whole(tensor) else None

    def see(
        self,
        func: torch._ops.OpOverload,  # pyright: ignore
        args: Sequence[object],
        kwargs: Mapping[str, object],
        made: object,
    ) -> None:
        name, origin = str(func._schema.name).removeprefix("aten::"), None  # pyright: ignore
        named = type(made) in (Tensor, nn.Parameter) and cast(Tensor, made).device.type == "cpu"
        if named and self._complete and (draw := _draw(name, args, kwargs, cast(Tensor, made))) is not None:
            origin = Drawn(len(self.draws))
            self.draws.append(draw)
        elif named and torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None:
            self._complete = False
        if named and name in _COPIES:
            source = self.origin(cast(Tensor, args[name == "copy_"]))
            origin = source and _cast(source, cast(Tensor, made).dtype, cast(Tensor, args[name == "copy_"]).dtype)
        for tensor in tree_leaves(_written(func, args, kwargs, made)):
            if type(tensor) in (Tensor, nn.Parameter):
                self._origins.pop(_address(tensor), None)
        if origin is not None and _is_whole(cast(Tensor, made)):
            self._origins[_address(cast(Tensor, made))] = origin


def _written(
    func: torch._ops.OpOverload,  # pyright: ignore
    args: Sequence[object],
    kwargs: Mapping[str, object],
    made: object,
) -> list[object]:
    """The tensors that the operator writes, and the one that it makes: its memory may have been another's."""
    schema: Any = func._schema  # pyright: ignore
    given = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | dict(kwargs)
    written = [given.get(a.name) for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    fresh = schema.returns and schema.returns[0].alias_info is None
    return [*written, made] if fresh or schema.name == "aten::lift_fresh" else written


def _draw(name: str, args: Sequence[object], kwargs: Mapping[str, object], made: Tensor) -> Draw | None:
    if name == "zero_":
        name, args = "fill_", (made, 0.0)
    numbers = args[1:]
    plain = all(isinstance(n, float | int) and math.isfinite(n) for n in numbers)
    if name not in ("uniform_", "normal_", "fill_") or not plain or any(v is not None for v in kwargs.values()):
        return None
    dtype = str(made.dtype).removeprefix("torch.")
    if not (made.is_floating_point() and made.is_contiguous() and dtype in DTYPES.values()):
        return None
    return Draw(name, made.numel(), dtype, tuple(map(float, cast(Sequence[float], numbers))))  # pyright: ignore


def _cast(source: Drawn, dtype: torch.dtype, before: torch.dtype) -> Drawn:
    return source if dtype == before else Drawn(source.draw, (*source.casts, str(dtype).removeprefix("torch.")))


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _is_whole(tensor: Tensor) -> bool:
    """Return whether it is all of its storage, in a row."""
    return (
        tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and tensor.is_contiguous()
        and 0 < tensor.nbytes == tensor.untyped_storage().nbytes()
    )


def repeated(asked: Draws) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors whose bytes are those that were built, and by name those that are not, each with the reason."""
    found: dict[str, Tensor] = {}
    lacking = {tensor.name: "it is none of the draws" for tensor in asked.tensors}
    if sum(draw.elements for draw in asked.draws) > MOST_REPEATED:
        return {}, dict.fromkeys(lacking, f"more than {MOST_REPEATED} elements are to be drawn for it")
    wanted: dict[int, list[DrawnTensor]] = {}
    for tensor in asked.tensors:
        wanted.setdefault(tensor.origin.draw, []).append(tensor)
    generator = torch.Generator().manual_seed(asked.seed)
    try:
        for number, draw in enumerate(asked.draws):
            values = _repeat(draw, generator, kept=number in wanted)
            for tensor in wanted.get(number, ()):
                made = values
                for dtype in tensor.origin.casts:
                    made = made.to(_dtype(dtype))
                lacking[tensor.name] = "drawn here it has other values: another torch, processor or model"
                if hashlib.sha256(bytes_of(made)).hexdigest() == tensor.sha256:
                    found[tensor.name] = made.view(tensor.shape)
                    del lacking[tensor.name]
    except (RuntimeError, TypeError, ValueError) as e:  # of torch, for what no honest coordinator asks, or no memory
        lacking |= {name: f"cannot be drawn: {' '.join(str(e).split())}" for name in lacking}
    return found, lacking


def _repeat(draw: Draw, generator: torch.Generator, *, kept: bool) -> Tensor:
    """A draw's values, or without `kept` a piece of memory after the same numbers were taken from the generator."""
    whole = torch.empty(draw.elements if kept else min(draw.elements, 2 * _PIECE), dtype=_dtype(draw.dtype))
    given = {} if draw.operator == "fill_" else {"generator": generator}
    at = 0
    while at < draw.elements:  # the last piece is the longest: of fewer than 16 elements normal_ draws each by itself
        size = _PIECE if draw.elements - at >= 2 * _PIECE else draw.elements - at
        getattr(whole[at : at + size] if kept else whole[:size], draw.operator)(*draw.arguments, **given)
        at += size
    return whole


def _dtype(name: str) -> torch.dtype:
    if name not in DTYPES.values():
        raise ValueError(f"type {name!r}, expected one of: {', '.join(sorted(DTYPES.values()))}")
    return cast(torch.dtype, getattr(torch, name))
