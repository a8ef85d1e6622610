"""First values that a device draws itself: the random draws of a module's build, in order, from the same seed."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from isthmus.wire_types import Amount, Count, Finite, Id, Many, Seed, Shape, Text


class Draw(msgspec.Struct, frozen=True, array_like=True):
    """An operator that gives each element of a tensor a value: `fill_` the same, the others random ones."""

    operator: Literal["uniform_", "normal_", "fill_"]
    elements: Amount
    dtype: Id
    arguments: Annotated[tuple[Finite, ...], Meta(max_length=2)]


class Drawn(msgspec.Struct, frozen=True, array_like=True):
    """Where a tensor's values are from: a draw, by its number, then cast to each of these types in turn."""

    draw: Count
    casts: Many[Id] = ()


class DrawnTensor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: Text
    shape: Shape
    origin: Drawn
    sha256: Id  # of its bytes, in hexadecimal digits


class Draws(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All draws from the seed to the last that a variable is, and these variables."""

    seed: Seed
    draws: Many[Draw]
    tensors: Many[DrawnTensor]
