"""GPT-3 as DT-FM trains it: operator graphs of two operators a layer, with the figures of a captured model.

A few layers of our GPT are captured at GPT-3's width in bfloat16. What lies between two layer norms becomes one
operator, because only the residual stream crosses there:

    embedding ─► attention, MLP of layer 0 ─► ... ─► last norm, output projection and loss

FLOPs, kept bytes and parameters are sums over what was captured. A deeper model repeats a layer.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

import torch

from isthmus.experiments import Column, capture
from isthmus.graph import Affine, Flow, Op, OpGraph, Ref, TensorSpec
from isthmus.models import GPT, GPTConfig

TOKENS, WORDS = 2048, 50_257
LEAST_LAYERS = 2
"""That are captured: the second stands for all further ones."""
PART_STARTS = "aten.layer_norm.default"


class Shape(NamedTuple):
    """Sizes of a GPT-3 (Brown et al. 2020, table 2.1)."""

    name: str
    layers: int
    width: int
    heads: int


GPT3_1_3B = Shape("GPT3-1.3B", 24, 2048, 16)
"""16 heads as in DT-FM's code; 24 are printed in the table, and do not divide the width."""
GPT3_6_7B = Shape("GPT3-6.7B", 32, 4096, 32)
GPT3_13B = Shape("GPT3-13B", 40, 5120, 40)
"""40 heads of 128; the table prints a width of 5140."""


class Part(NamedTuple):
    """Operators between two layer norms, added up."""

    forward: Affine
    backward: Affine
    kept_bytes: Affine
    parameters: int


def gpt3(shape: Shape, *, checkpointed: bool) -> OpGraph:
    """The train graph at a micro-batch of any size, out of `parts_of`."""
    return graph_of(shape, parts_of(shape, checkpointed=checkpointed))


def parts_of(shape: Shape, *, checkpointed: bool) -> list[Part]:
    """Embedding, attention and MLP of each layer, head.

    `checkpointed`: attention and MLP keep nothing but their input and compute forward a second time, as DT-FM's do.
    """
    embedding, *layers, head = captured_parts(shape.width, shape.heads, LEAST_LAYERS)
    halves = layers[-2:] * shape.layers
    return [embedding, *(_recomputed(shape, half) if checkpointed else half for half in halves), head]


def model_flops(shape: Shape) -> int:
    """Forward and backward FLOPs of one sequence, each counted once."""
    return sum((part.forward + part.backward).at(1) for part in parts_of(shape, checkpointed=False))


@cache
def captured_parts(width: int, heads: int, layers: int) -> tuple[Part, ...]:
    """Embedding, attention and MLP of each layer, head."""
    config = GPTConfig(vocab_size=WORDS, sequence_length=TOKENS, width=width, layers=layers, heads=heads)
    columns = {name: Column("int64", (TOKENS,)) for name in ("input_ids", "labels")}
    flow = Flow(capture(lambda: GPT(config), columns, dtype=torch.bfloat16).train)
    starts = [k for k, op in enumerate(flow.operators) if op.target == PART_STARTS]
    return tuple(_sum(flow, flow.operators[a:b]) for a, b in itertools.pairwise((0, *starts, len(flow.operators))))


def _sum(flow: Flow, operators: Sequence[Op]) -> Part:
    used = {ref.op for op in operators for ref in op.refs() if flow.by_name[ref.op].kind == "parameter"}
    nothing = Affine(0)
    return Part(
        sum((op.flops_forward for op in operators), nothing),
        sum((op.flops_backward for op in operators), nothing),
        sum((op.saved_bytes for op in operators), nothing),
        sum(flow.by_name[name].outputs[0].nbytes(1) // 2 for name in used),
    )


def graph_of(shape: Shape, parts: Sequence[Part]) -> OpGraph:
    """The chain of `parts`, of which the first takes the tokens and the last gives the loss."""
    halves = [f"layer.{k // 2}.{('attention', 'mlp')[k % 2]}" for k in range(len(parts) - 2)]
    names = ("embedding", *halves, "head")
    ops = [_parameter(name, part) for name, part in zip(names, parts, strict=True)]
    ops += [_placeholder("input_ids"), _placeholder("labels"), *_operators(names, parts, _stream(shape))]
    return OpGraph(name=f"{shape.name}, {shape.layers} layers", mode="train", ops=tuple(ops), loss=Ref("head"))


def _stream(shape: Shape) -> TensorSpec:
    return TensorSpec("bfloat16", (Affine(1), TOKENS, shape.width), (TOKENS * shape.width, shape.width, 1))


def _recomputed(shape: Shape, half: Part) -> Part:
    return half._replace(backward=half.backward + half.forward, kept_bytes=Affine(_stream(shape).nbytes(1)))


def _operators(names: Sequence[str], parts: Sequence[Part], stream: TensorSpec) -> Iterator[Op]:
    taken = Ref("input_ids")
    for name, part in zip(names, parts, strict=True):
        last = name == names[-1]
        yield Op(
            name=name,
            kind="operator",
            target="several",
            module=name,
            requires_grad=(True,),
            args=(taken, Ref(f"{name}.weights"), *((Ref("labels"),) if last else ())),
            outputs=(TensorSpec("float32", (), ()) if last else stream,),
            flops_forward=part.forward,
            flops_backward=part.backward,
            saved_bytes=part.kept_bytes,
        )
        taken = Ref(name)


def _parameter(name: str, part: Part) -> Op:
    return Op(
        name=f"{name}.weights",
        kind="parameter",
        target=f"{name}.weights",
        requires_grad=(True,),
        outputs=(TensorSpec("bfloat16", (part.parameters,), (1,)),),
    )


def _placeholder(column: str) -> Op:
    ids = TensorSpec("int64", (Affine(1), TOKENS), (TOKENS, 1))
    return Op(name=column, kind="placeholder", target=column, outputs=(ids,), requires_grad=(False,))
