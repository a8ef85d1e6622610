"""BERT-Large as Sky Computing cuts it: five layers an encoder, and embedding, pooler and classifier.

Counts are of one training step on a batch of 32 pairs of 128 tokens (MNLI): a multiplication and an addition are two
FLOPs, the backward pass costs twice the forward one. The paper names three parts of an encoder (self-attention,
intermediate, output) but counts five layers; we cut at the five matrix stages. Memory: fp32 weights, gradients and
two tensors of Adam for each parameter, inputs and outputs, and what attention keeps of its scores.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from isthmus.planners.network import Floats

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


def bert_layers(encoders: int) -> tuple[Floats, Floats]:
    """(FLOPs, bytes) of each of the 5 * encoders + 3 layers."""
    layers = [EMBEDDING, *ENCODER * encoders, POOLER, CLASSIFIER]
    flops = np.array([TRAINING * layer.forward_flops for layer in layers], dtype=np.float64)
    size = [STATE_BYTES * layer.parameters + FLOAT_BYTES * layer.kept_elements for layer in layers]
    return flops, np.array(size, dtype=np.float64)
