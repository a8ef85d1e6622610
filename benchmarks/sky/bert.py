"""BERT-Large as Sky Computing cuts it: five layers an encoder, and embedding, pooler and classifier.

Counts are of one training step on a batch of 32 pairs of 128 tokens (MNLI): a multiplication and an addition are two
FLOPs, the backward pass costs twice the forward one. The paper names three parts of an encoder (self-attention,
intermediate, output), as its code does, but counts five layers; we cut at the five matrix stages, or at three.
Memory: fp32 weights, gradients and two tensors of Adam for each parameter, inputs and outputs, and what attention
keeps of its scores.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from isthmus.cost.network import Floats
from isthmus.graph import Affine, Op, OpGraph, Ref, TensorSpec

BATCH, TOKENS, WIDTH, INNER, HEADS, WORDS, CLASSES = 32, 128, 1024, 4096, 16, 30_522, 3
ROWS = BATCH * TOKENS
FLOAT_BYTES = 4
STATE_BYTES = 4 * FLOAT_BYTES
"""Weight, gradient and two tensors of Adam."""
TRAINING = 3
"""Forward and backward FLOPs over forward FLOPs."""


class Layer(NamedTuple):
    name: str
    forward_flops: int
    parameters: int
    kept_elements: int
    """Input, output and what lies between."""


SCORES = BATCH * HEADS * TOKENS * TOKENS

EMBEDDING = Layer("embedding", 10 * ROWS * WIDTH, (WORDS + 512 + 2) * WIDTH, 2 * ROWS * WIDTH)
ENCODER = (
    Layer("query, key, value", 6 * ROWS * WIDTH**2, 3 * (WIDTH + 1) * WIDTH, 4 * ROWS * WIDTH),
    Layer("attention", 4 * ROWS * TOKENS * WIDTH + 5 * SCORES, 0, 4 * ROWS * WIDTH + 2 * SCORES),
    Layer("projection", 2 * ROWS * WIDTH**2 + 10 * ROWS * WIDTH, (WIDTH + 3) * WIDTH, 3 * ROWS * WIDTH),
    Layer(
        "intermediate", 2 * ROWS * WIDTH * INNER + 10 * ROWS * INNER, (WIDTH + 1) * INNER, ROWS * (WIDTH + 2 * INNER)
    ),
    Layer("output", 2 * ROWS * INNER * WIDTH + 10 * ROWS * WIDTH, (INNER + 3) * WIDTH, ROWS * (INNER + 2 * WIDTH)),
)
POOLER = Layer("pooler", 2 * BATCH * WIDTH**2, (WIDTH + 1) * WIDTH, 2 * BATCH * WIDTH)
CLASSIFIER = Layer("classifier", 2 * BATCH * WIDTH * CLASSES, (WIDTH + 1) * CLASSES, BATCH * (WIDTH + CLASSES))


PARTS = {5: (1, 1, 1, 1, 1), 3: (3, 1, 1)}
"""How many of the five matrix stages make a layer: the paper counts five layers an encoder, its code has three."""
LEAVING = {5: (4 * WIDTH, 2 * WIDTH, WIDTH, INNER + WIDTH, WIDTH), 3: (WIDTH, INNER + WIDTH, WIDTH)}
"""Elements of a token that leave each layer, the residual stream among them."""


def chain(encoders: int, parts: int = 5) -> list[Layer]:
    """The parts * encoders + 3 layers."""
    stages = iter(ENCODER)
    encoder = [_together([next(stages) for _ in range(count)]) for count in PARTS[parts]]
    return [EMBEDDING, *encoder * encoders, POOLER, CLASSIFIER]


def _together(layers: list[Layer]) -> Layer:
    name = ", ".join(layer.name for layer in layers)
    sums = (sum(figures) for figures in zip(*(layer[1:] for layer in layers), strict=True))
    return Layer(name, *sums)


def bert_layers(encoders: int, parts: int = 5) -> tuple[Floats, Floats]:
    """(FLOPs, bytes) of each layer."""
    layers = chain(encoders, parts)
    flops = np.array([TRAINING * layer.forward_flops for layer in layers], dtype=np.float64)
    size = [STATE_BYTES * layer.parameters + FLOAT_BYTES * layer.kept_elements for layer in layers]
    return flops, np.array(size, dtype=np.float64)


def bert_graph(encoders: int, parts: int = 5) -> OpGraph:
    """The same layers as one operator each, for batches of any size; a single tensor crosses each cut."""
    layers = chain(encoders, parts)
    leaving = [WIDTH, *LEAVING[parts] * encoders, WIDTH, 0]
    ops, taken = [_input("input_ids", TOKENS), _input("labels", 1)], Ref("input_ids")
    for k, (layer, width) in enumerate(zip(layers, leaving, strict=True)):
        name, last = f"{k}. {layer.name}", k == len(layers) - 1
        needs = (Ref("labels"),) if last else ()
        if layer.parameters:
            weights = TensorSpec("float32", (layer.parameters,), (1,))
            holder = f"{name}: weights"
            ops.append(Op(name=holder, kind="parameter", target=holder, outputs=(weights,), requires_grad=(True,)))
            needs = (Ref(holder), *needs)
        shape, strides = ((Affine(1), TOKENS, width), (TOKENS * width, width, 1)) if not last else ((), ())
        out = TensorSpec("float32", shape, strides)
        forward = Affine(layer.forward_flops // BATCH)
        ops.append(
            Op(
                name=name,
                kind="operator",
                target="several",
                args=(taken, *needs),
                outputs=(out,),
                requires_grad=(True,),
                flops_forward=forward,
                flops_backward=Affine((TRAINING - 1) * forward.per_sample),
                saved_bytes=Affine(FLOAT_BYTES * layer.kept_elements // BATCH),
            )
        )
        taken = Ref(name)
    return OpGraph(name=f"BERT, {encoders} encoders", mode="train", ops=tuple(ops), loss=taken)


def _input(column: str, width: int) -> Op:
    ids = TensorSpec("int64", (Affine(1), width), (width, 1))
    return Op(name=column, kind="placeholder", target=column, outputs=(ids,), requires_grad=(False,))
