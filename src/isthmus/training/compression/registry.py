"""The codec that a plan or a message names, from the one table of codecs (`plans.packing`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from isthmus.extensions import import_object
from isthmus.plans import Packing
from isthmus.plans.packing import CODECS
from isthmus.training.compression.codec import Codec


def codec_of(packing: Packing) -> Codec:
    """The codec that a plan or a message names: which has been checked, as a `Packing` checks itself."""
    entry = CODECS[packing.codec]
    make = cast("Callable[..., Codec]", import_object("codec", entry.maker))
    return make(packing.ratio) if entry.is_sparse else make()
