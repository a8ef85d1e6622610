"""A run's model, ready to generate: its serving graph, its trained weights, and a proof that caches change nothing."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import msgspec
import torch
from torch import Tensor, nn

from isthmus.errors import UserError
from isthmus.extensions import import_object
from isthmus.graph import Flow, OpGraph, Ref, partition
from isthmus.graph.captured import Captured, ServingCapture
from isthmus.graph.serving import CANNOT, POSITIONS, TOKENS
from isthmus.job.first_weights import in_stores
from isthmus.job.settings import Job
from isthmus.models import as_eager, build_model
from isthmus.training.checkpoint import latest_checkpoint, load_checkpoint
from isthmus.training.generation import ServedStage
from isthmus.training.weights import initial_weights

PROBE = (1, 2, 3, 1)  # tokens that every model has, for the proof
TOLERANCE = {"fp32": 1e-3, "bf16": 0.1, "fp16": 0.05}
"""Relative to the largest logit: kernels for one token and for several round differently."""


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """Weights lie in memory here, as a coordinator has those of a run."""

    graph: OpGraph  # its `loss` are the logits of the next token, [1, vocabulary]
    weights: dict[str, Tensor]
    context: int  # tokens of a prompt and its answer together, at most
    ends: tuple[int, ...] = ()  # tokens with which the model ends a text
    step: int  # optimizer steps behind the weights

    @property
    def vocabulary(self) -> int:
        return self.graph.op(self.graph.loss.op).outputs[self.graph.loss.index].shape_at(1)[-1]


def prepare_served(job: Job, checkpoints: Path, trained: int) -> Served:
    """The newest checkpoint; `trained` tokens were in training's sequences. UserError where there is none, or the model
    does not generate token by token."""
    checkpoint = latest_checkpoint(checkpoints)
    # Imported when it is needed: torch.export takes seconds.
    capture = cast("ServingCapture", import_object("isthmus", "isthmus.graph.serving_capture:capture_serving"))
    with contextlib.ExitStack() as stack:

        def build() -> nn.Module:
            module = build_model(job.model)
            stack.enter_context(as_eager(()))  # only now is the module's library imported
            return module

        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        graph, constants, context = capture(build, name=job.model.name, dtype=job.training.dtype, trained=trained)
        torch.manual_seed(job.training.seed)  # what a checkpoint leaves out may have been drawn
        module = build()
        step = load_checkpoint(module, checkpoint, in_files=in_stores(job))
        module = module.to(job.training.dtype).eval()
    captured = Captured(train=graph, eval=graph, constants=constants | {POSITIONS: torch.empty(0)})
    weights = initial_weights(lambda: module, captured, job.training.seed)
    found = Served(graph=graph, weights=weights, context=context, ends=ends_of(module), step=step)
    check_decoding(found, module, TOLERANCE[job.training.precision])
    return found


def ends_of(module: nn.Module) -> tuple[int, ...]:
    """Return the ends as transformers' configs say them; ours have none."""
    found: object = getattr(getattr(module, "config", None), "eos_token_id", None)
    return (found,) if isinstance(found, int) else tuple(cast("Sequence[int]", found or ()))


def check_decoding(served: Served, module: nn.Module, tolerance: float) -> None:
    """UserError unless the logits are the module's own, whether tokens come at once or one by one."""
    tokens = [token % served.vocabulary for token in PROBE]
    with torch.inference_mode():
        expected = module(input_ids=torch.tensor([tokens]))["logits"][:, -1].float()
    at_once, one_by_one = (_logits(served, tokens, first) for first in (len(tokens), 2))
    limit = tolerance * float(expected.abs().max())
    for what, found in (("with given positions", at_once), ("token by token", one_by_one)):
        if not torch.allclose(found, expected, rtol=0, atol=limit):
            raise UserError(
                f"{CANNOT}: computed {what} its logits differ by "
                f"{float((found - expected).abs().max()):.3g}: a token depends on others by more than causal attention"
            )


def _logits(served: Served, tokens: list[int], first: int) -> Tensor:
    """Return the logits of the last token, when the `first` ones come at once."""
    flow = Flow(served.graph)
    (stage,) = partition(flow, {op.name: 0 for op in flow.operators})
    whole = ServedStage(stage, served.weights)
    cache, found = whole.cache(len(tokens)), torch.empty(0)
    for start, end in [(0, first), *((n, n + 1) for n in range(first, len(tokens)))]:
        given = torch.tensor([tokens[start:end]])
        found = whole.run(cache, start, {Ref(token_input(flow)): given}, end - start)[served.graph.loss]
    return found


def token_input(flow: Flow) -> str:
    """Name of the op whose value the tokens are."""
    return next(op.name for op in flow.graph.ops if op.kind == "placeholder" and op.target == TOKENS)
