"""Codecs: tensors as fewer bytes, for activations, gradients and sync deltas. One per file."""

from isthmus.training.compression.bf16 import Bf16
from isthmus.training.compression.codec import Codec, DeltaCodec, codec_of
from isthmus.training.compression.entropy_coded import EntropyCoded
from isthmus.training.compression.error_feedback import ErrorFeedback, SampleFeedback
from isthmus.training.compression.int4 import Int4
from isthmus.training.compression.int8 import Int8
from isthmus.training.compression.none import NoCodec
from isthmus.training.compression.sparse2bit import Sparse2Bit
from isthmus.training.compression.topk import TopK

__all__ = [
    "Bf16",
    "Codec",
    "DeltaCodec",
    "EntropyCoded",
    "ErrorFeedback",
    "Int4",
    "Int8",
    "NoCodec",
    "SampleFeedback",
    "Sparse2Bit",
    "TopK",
    "codec_of",
]
