"""Tensors of all kinds for the codecs' tests, drawn by hypothesis."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

from isthmus.plans import Packing
from isthmus.plans.packing import CODECS
from isthmus.training.compression import codec_of

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
RATIOS = (1.0, 2.5, 4.0, 32.0, 100.0)
PACKINGS = tuple(
    Packing(codec=name, ratio=ratio)
    for name, entry in CODECS.items()
    for ratio in (RATIOS if entry.is_sparse else (1,))
)
"""Every codec of the table, sparse ones at several ratios."""
EVERY = tuple(map(codec_of, PACKINGS))
LOSSY = tuple(codec for codec in EVERY if codec.name != "none")
KINDS = ("normal", "zeros", "mostly zeros", "equal", "few levels", "spread", "tiny", "huge")

shapes = st.one_of(
    st.lists(st.integers(0, 9), max_size=4).map(tuple),
    st.integers(0, 20_000).map(lambda n: (n,)),
    st.sampled_from([(3, 4096), (1, 255), (256,), (257,), (5, 1, 1000)]),
)


def make(kind: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Finite numbers of this type."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    largest = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
    match kind:
        case "zeros":
            x = torch.zeros_like(x)
        case "mostly zeros":
            x = torch.where(x > 2, x, 0.0)
        case "equal":
            x = torch.full_like(x, -3.0)
        case "few levels":
            x = x.round()
        case "spread":
            x = x.sign() * torch.exp(4 * x.abs())
        case "tiny":
            x = x * torch.finfo(dtype).tiny
        case "huge":
            x = x.clamp(-1, 1) * largest
        case _:
            pass
    return x.clamp(-largest, largest).to(dtype)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    x = make(draw(st.sampled_from(KINDS)), draw(shapes), draw(st.sampled_from(DTYPES)), draw(st.integers(0, 2**32)))
    if x.dim() > 1 and draw(st.booleans()):
        x = x.transpose(0, -1)  # strides of another order
    return x
