"""The base of every message."""

from __future__ import annotations

import msgspec

from isthmus.training.layout import TensorHeader
from isthmus.wire_types import Id, Many


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Every message names its run: one of another run is refused. One that belongs to a plan epoch names that too."""

    run: Id
    tensors: Many[TensorHeader] = ()
