"""The base of every message."""

from __future__ import annotations

import msgspec

from isthmus.training.layout import TensorHeader


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Every message names its run and plan epoch: one of another run is refused, one of another epoch dropped."""

    run: str
    epoch: int = 0
    tensors: tuple[TensorHeader, ...] = ()
