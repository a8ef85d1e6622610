"""A stage that generates: its operators on new tokens, attention over a key-value cache, and the choice of a token.

The choice is transformers' own, operator by operator, so that equal logits and seeds give equal tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from isthmus.accelerators import HOST, Accelerator
from isthmus.accelerators.copies import to_device
from isthmus.errors import Diverged, InternalError, UserError
from isthmus.graph.opgraph import Ref
from isthmus.graph.partition import StageGraph
from isthmus.graph.serving import ATTENTION, POSITIONS
from isthmus.protocol.generation import Sampling
from isthmus.training.program import Program

KEPT_PROGRAMS = 16  # programs by length of the prompt: a stage's operators are resolved once for each number of tokens


class LayerCache:
    """Keys and values of one attention and one prompt, [1, heads, capacity, size] each."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._held = 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def extended(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Those of all tokens so far, with the new ones behind."""
        if self._keys is None or self._values is None:
            self._keys, self._values = (
                t.new_empty((*t.shape[:-2], self._capacity, t.shape[-1])) for t in (keys, values)
            )
        first, self._held = self._held, self._held + keys.shape[-2]
        if self._held > self._capacity:
            raise InternalError(f"a cache for {self._capacity} tokens got {self._held}")
        self._keys[..., first : self._held, :] = keys
        self._values[..., first : self._held, :] = values
        return self._keys[..., : self._held, :], self._values[..., : self._held, :]


class PromptCache:
    def __init__(self, capacity: int, attentions: int) -> None:
        self.layers = tuple(LayerCache(capacity) for _ in range(attentions))


class ServedStage:
    """A stage's graph with its weights. Runs one prompt's new tokens at a time."""

    def __init__(self, graph: StageGraph, weights: Mapping[str, Tensor], *, accelerator: Accelerator = HOST) -> None:
        """`weights` hold the values of all variables, under the module's own names."""
        self.graph = graph
        self.accelerator = accelerator
        self._position_ops = [op.name for op in graph.variables() if op.target == POSITIONS]
        self._variables = {
            Ref(op.name): to_device(accelerator, weights[op.target].detach()).to(_dtype(op.outputs[0].dtype))
            for op in graph.variables()
            if op.target != POSITIONS
        }
        self._attentions = sum(op.target == ATTENTION for op in graph.ops)
        self._programs: OrderedDict[int, Program] = OrderedDict()
        self._layers: Iterator[LayerCache] = iter(())

    def cache(self, capacity: int) -> PromptCache:
        return PromptCache(capacity, self._attentions)

    def flops(self, tokens: int) -> int:
        """Return the operations of a step with so many new tokens."""
        return sum(op.flops_forward.at(tokens) for op in self.graph.ops)

    def run(self, cache: PromptCache, start: int, inputs: Mapping[Ref, Tensor], tokens: int) -> dict[Ref, Tensor]:
        """Values to send, and of the last stage the logits. `inputs` are those of new tokens at `start`, ..."""
        positions = torch.arange(start, start + tokens, device=self.accelerator.device).unsqueeze(0)
        values = {**self._variables, **{Ref(name): positions for name in self._position_ops}}
        values |= {ref: to_device(self.accelerator, t) for ref, t in inputs.items()}
        self._layers = iter(cache.layers)
        with torch.inference_mode():
            self._program(tokens).run(values, 0, 0)
        wanted = {c.value for c in self.graph.sends} | ({self.graph.loss} if self.graph.loss is not None else set())
        return {ref: values[ref] for ref in wanted}

    def _program(self, tokens: int) -> Program:
        if tokens not in self._programs:
            attention = cast("Callable[..., object]", self._attend)
            self._programs[tokens] = Program(
                self.graph, "eval", batch=tokens, accelerator=self.accelerator, replaced={ATTENTION: attention}
            )
            if len(self._programs) > KEPT_PROGRAMS:
                self._programs.pop(next(size for size in self._programs if size != 1))
        self._programs.move_to_end(tokens)
        return self._programs[tokens]

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, *_: object, **options: object) -> Tensor:
        """Causal attention of new tokens over all so far. They are several at a prompt's start only."""
        keys, values = next(self._layers).extended(key, value)
        kept = {name: options[name] for name in ("scale", "enable_gqa") if name in options}
        if query.shape[-2] > 1:
            return scaled_dot_product_attention(query, key, value, is_causal=True, **kept)  # pyright: ignore[reportArgumentType]
        return scaled_dot_product_attention(query, keys, values, **kept)  # pyright: ignore[reportArgumentType]


def _dtype(name: str) -> torch.dtype:
    return cast(torch.dtype, getattr(torch, name))


class TokenChooser:
    """Chooses a prompt's tokens, one after the other."""

    def __init__(self, sampling: Sampling, made: int, vocabulary: int) -> None:
        """`made` tokens were chosen before: their random numbers are passed over."""
        self._sampling = sampling
        self.made = made
        self._generator = torch.Generator().manual_seed(sampling.seed)
        if sampling.temperature:
            for _ in range(made):
                torch.multinomial(torch.ones(1, vocabulary), 1, generator=self._generator)

    def choose(self, logits: Tensor) -> tuple[int, bool]:
        """The next token of [1, vocabulary] float32 logits, and whether it is the last one. A token whose logit is
        -inf is never chosen. Diverged where the largest is not finite or one is NaN, UserError where that comes of the
        division by the temperature."""
        if not bool(torch.isfinite(logits.max())):  # NaN comes through
            raise Diverged("the model's logits are not finite")
        token = self._drawn(logits.cpu()) if self._sampling.temperature else int(logits.argmax(dim=-1))
        self.made += 1
        return token, token in self._sampling.stop or self.made >= self._sampling.max_tokens

    def _drawn(self, logits: Tensor) -> int:
        scores = logits / self._sampling.temperature
        if not bool(torch.isfinite(scores.max())):
            raise UserError(f"temperature: got {self._sampling.temperature:g}, which is too small for these logits")
        if (top_k := min(self._sampling.top_k, scores.shape[-1])) > 0:
            scores = scores.masked_fill(scores < torch.topk(scores, top_k)[0][..., -1, None], -torch.inf)
        if self._sampling.top_p < 1:
            ascending, order = torch.sort(scores, descending=False)
            left_out = ascending.softmax(dim=-1).cumsum(dim=-1) <= (1 - self._sampling.top_p)
            left_out[..., -1:] = False
            scores = scores.masked_fill(left_out.scatter(1, order, left_out), -torch.inf)
        probabilities = torch.nn.functional.softmax(scores, dim=-1)
        return int(torch.multinomial(probabilities, 1, generator=self._generator))
