"""Boundaries that are part of a model: its residual stream is so narrow where it is cut that little crosses a link.

The module is rewritten before it is captured, so that graph, plan, checkpoint and export all see the narrow stream.
Causal language models whose blocks add to a residual stream and read it through norms can be rewritten: our GPT, and
GPT-2, Llama and their like in transformers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Literal, cast

import msgspec
from msgspec import Meta
from torch import Tensor, nn

from isthmus.errors import UserError
from isthmus.models.residual_stream import find_stream
from isthmus.models.subspace import confine
from isthmus.wire_types import MOST_BYTES, Many, Seed, Table, Text

Rate = Annotated[float, Meta(ge=1, le=MOST_BYTES)]


class BoundaryOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a language model's residual stream crosses a cut."""

    method: Literal["subspace", "residual", "none"]
    """`subspace`: the stream lies in a fixed subspace, and any cut sends its coordinates. `residual`: bottlenecks at
    `after`, trained with the model. `none`: as it is."""
    rate: Rate = 50  # The stream's width per number that crosses.
    after: Many[Text] | Table[Text, Rate] = ()
    """Only for `residual`: blocks behind which there is a bottleneck ("blocks.3"), or a table with a rate for each."""
    seed: Seed = 0  # The seed of the subspace.

    def __post_init__(self) -> None:
        if bool(self.after) != (self.method == "residual"):
            expected = "the blocks before each bottleneck" if self.method == "residual" else "none"
            raise ValueError(f"after: got {self.after!r} with method {self.method!r}, expected {expected}")

    @property
    def rates(self) -> Mapping[str, float]:
        """Rates of `residual`, by block."""
        return self.after if isinstance(self.after, dict) else dict.fromkeys(self.after, self.rate)


def add_boundary(module: nn.Module, options: BoundaryOptions) -> nn.Module:
    """The module with its residual stream rewritten in place. Weights come from those that it has and, of bottlenecks,
    from torch's global generator. Works under `FakeTensorMode` too.

    Raises `UserError` for a module in which no residual stream is found, and for `after` that names no block.
    """
    if options.method == "none":
        return module
    stream = find_stream(module)
    if options.method == "subspace":
        confine(module, stream, _narrow(stream.width, options.rate), options.seed)
        return module
    for name, rate in options.rates.items():
        if name not in stream.blocks:
            raise UserError(
                f"model.boundary.after: got {name!r}, expected blocks of {stream.blocks[0]} .. {stream.blocks[-1]}"
            )
        block = module.get_submodule(name)
        block.register_module("boundary", Bottleneck(stream.width, _narrow(stream.width, rate)))
        block.register_forward_hook(_through_bottleneck)
    return module


class Bottleneck(nn.Module):
    """z = x P + x E is what crosses, and x' = z P^T + z D goes on: P takes the first k numbers of a token, an identity
    of rank k, and E and D are learned (ResBM, arXiv 2604.11947, here with linear E and D and no bias)."""

    def __init__(self, width: int, narrow: int) -> None:
        super().__init__()
        self.down = nn.Linear(width, narrow, bias=False)
        self.up = nn.Linear(narrow, width, bias=False)
        nn.init.normal_(self.down.weight, std=1 / math.sqrt(width))
        nn.init.normal_(self.up.weight, std=1 / math.sqrt(width))

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, T, width] -> [B, T, width]."""
        return self.widened(self.narrowed(hidden))

    def narrowed(self, hidden: Tensor) -> Tensor:
        """[B, T, width] -> [B, T, k]: what crosses."""
        return hidden[..., : self.down.out_features] + self.down(hidden)

    def widened(self, narrow: Tensor) -> Tensor:
        """[B, T, k] -> [B, T, width]."""
        return nn.functional.pad(narrow, (0, self.up.out_features - self.up.in_features)) + self.up(narrow)


def _through_bottleneck(block: nn.Module, _given: object, found: object) -> object:
    bottleneck = cast("Bottleneck", block.boundary)
    if isinstance(found, tuple):  # of older transformers: the stream, and what else the block says
        return (bottleneck(found[0]), *found[1:])
    return bottleneck(found)


def has_bottlenecks(module: nn.Module) -> bool:
    """Return whether the module's residual stream passes bottlenecks: no plain model computes the same."""
    return any(isinstance(part, Bottleneck) for part in module.modules())


def _narrow(width: int, rate: float) -> int:
    return max(1, round(width / rate))
