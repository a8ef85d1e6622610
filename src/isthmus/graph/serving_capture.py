"""Capture for serving: the graph that turns new tokens into the logits of the next one.

One graph serves prompts and single tokens: its symbolic size is the number of new tokens, of one request.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.export import Dim, export

from isthmus.errors import IsthmusError, UserError
from isthmus.graph.building import build_fake, held_by
from isthmus.graph.capture_errors import ModulePath, explain, quiet, refuse_hooks
from isthmus.graph.convert import convert
from isthmus.graph.measure import measure
from isthmus.graph.opgraph import OpGraph
from isthmus.graph.serving import CANNOT, POSITIONS, TOKENS, check_attention, with_given_positions
from isthmus.graph.sizes import NotAffine

EXAMPLE_TOKENS, LEAST_TOKENS = 8, 4
LENGTHS = ("sequence_length", "max_position_embeddings")
"""Names of the longest sequence in configs: ours, and those of transformers."""


class NextLogits(nn.Module):
    """A language model behind one calling convention: [1, T] token ids and positions in, [1, vocabulary] logits of the
    last one out. In the place of a loss, as `convert` reads results."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        last = "logits_to_keep" in inspect.signature(module.forward).parameters
        self._only_last = {"logits_to_keep": 1} if last else {}

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, None, dict[str, Tensor], dict[str, Tensor]]:
        found = self.module(**batch, **self._only_last)
        logits: object = found.get("logits") if hasattr(found, "get") else None
        if not isinstance(logits, Tensor) or logits.ndim != 3:
            raise UserError(f"{CANNOT}: its forward gives no `logits` of [batch, tokens, vocabulary]")
        return logits[:, -1].float(), None, {}, {}


def capture_serving(
    build: Callable[[], nn.Module], *, name: str, dtype: torch.dtype, trained: int
) -> tuple[OpGraph, dict[str, Tensor], int]:
    """The graph, whose `loss` is the logits; the constants that the forward makes; and the longest sequence in tokens.
    Sizes are affine in the number of new tokens. `trained` is the length of training's sequences: the longest of a
    model whose config does not say. UserError for a model that does not generate token by token."""
    with FakeTensorMode(allow_non_fake_inputs=True), refuse_hooks():
        module, built = build_fake(build, dtype)
        _check_forward(module)
        most = context_length(module) or trained
        if most < LEAST_TOKENS:
            raise UserError(f"{CANNOT}: its longest sequence has {most} tokens, expected at least {LEAST_TOKENS}")
        module.eval()
        tokens = min(EXAMPLE_TOKENS, most)
        example = {column: torch.zeros((1, tokens), dtype=torch.int64) for column in (TOKENS, POSITIONS)}
        shapes = {"batch": {column: {1: Dim("tokens", min=2, max=most)} for column in example}}
        path = ModulePath(module)
        try:
            with path, quiet():
                program = export(NextLogits(module), (example,), strict=False, dynamic_shapes=shapes)
            graph, constants = convert(program, name=name, mode="eval", batch=None, held=held_by(module, built))
        except IsthmusError:
            raise
        except NotAffine as e:
            raise UserError(f"{CANNOT}: a size is not in proportion to the number of tokens: {e}") from None
        except Exception as e:  # torch.export raises many types, some of them private
            raise UserError(f"{CANNOT}: {explain(e, path, example)}") from e
        with quiet():
            graph = measure(graph)
    check_attention(graph)
    return with_given_positions(graph), constants, most


def context_length(module: nn.Module) -> int | None:
    """Tokens of the longest sequence; None where the model's config does not say."""
    config: object = getattr(module, "config", None)
    for name in LENGTHS:
        if isinstance(found := getattr(config, name, None), int):
            return found
    return None


def _check_forward(module: nn.Module) -> None:
    parameters = inspect.signature(module.forward).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    missing = [column for column in (TOKENS, POSITIONS) if column not in parameters]
    needed = [n for n, p in parameters.items() if p.default is p.empty and n != TOKENS]
    if missing or needed:
        what = f"takes no {', '.join(missing)}" if missing else f"needs {', '.join(needed)}"
        raise UserError(
            f"{CANNOT}: the forward of {type(module).__name__} {what}: expected forward(input_ids, position_ids) of a "
            "causal language model, without labels"
        )
