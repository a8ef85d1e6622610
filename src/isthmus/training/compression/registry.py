"""The codecs by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from isthmus.plans import Packing
from isthmus.training.compression.bf16 import Bf16
from isthmus.training.compression.codec import Codec
from isthmus.training.compression.int8 import Int8
from isthmus.training.compression.none import NoCodec
from isthmus.training.compression.sparse2bit import Sparse2Bit
from isthmus.training.compression.topk import TopK

_MAKERS: Mapping[str, Callable[[float], Codec]] = {
    "none": lambda _: NoCodec(),
    "bf16": lambda _: Bf16(),
    "int8": lambda _: Int8(),
    "topk": TopK,
    "sparse2bit": Sparse2Bit,
}


def codec_names() -> list[str]:
    """Names of the codecs, sorted."""
    return sorted(_MAKERS)


def codec_of(packing: Packing) -> Codec:
    """The codec that a plan or a message names: which has been checked, as a `Packing` checks itself."""
    return _MAKERS[packing.codec](packing.ratio)
