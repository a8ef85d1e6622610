"""Problems for the benchmark: the paper's models from their shapes, the published profiles, and random layers."""

from __future__ import annotations

import itertools
from pathlib import Path

import msgspec
import numpy as np

from isthmus.planners.sync import SyncProblem, WorkerProfile

WORKERS = 32
LATENCY_S = 1e-3
"""Of one all-reduce. The paper states none."""
SPEED_FLOPS_PER_S = {"ResNet-18": 5e12, "ResNet-50": 5e12, "GPT-2": 15e12, "Llama-2": 15e12}
"""Sustained, assumed: 2080 Ti for the first two, A6000 for the others."""
IMAGES, TOKENS, SEQUENCE = 32, 4096, 1024
"""Per worker and iteration, assumed: the paper does not say."""

PROFILES = Path(__file__).parent / "profiles.json"

Layer = tuple[int, float]
"""(parameters, forward FLOPs of one iteration)"""


class PublishedProfile(msgspec.Struct, frozen=True):
    name: str
    backward_s: tuple[float, ...]
    average_s: tuple[float, ...]
    published_step_s: dict[str, float]
    """Seconds per iteration at H = 10 as DreamDDP's script reports them, by method."""


class Published(msgspec.Struct, frozen=True):
    source: str
    layers: tuple[str, ...]
    profiles: tuple[PublishedProfile, ...]


def published() -> Published:
    return msgspec.json.decode(PROFILES.read_bytes(), type=Published)


def problem_of(backward_s: list[float], average_s: list[float], iterations: int, *, overlap: bool) -> SyncProblem:
    """Forward is taken as half of backward. It changes no exposed time unless averaging overlaps with it."""
    profile = WorkerProfile(
        worker="worker",
        forward_s=tuple(b / 2 for b in backward_s),
        backward_s=tuple(backward_s),
        average_s=tuple(average_s),
    )
    layers = tuple(f"layer-{k}" for k in range(len(backward_s)))
    return SyncProblem(layers=layers, workers=(profile,), iterations=iterations, forward_overlap=overlap)


def model_times(name: str, bandwidth_bytes_per_s: float) -> tuple[list[float], list[float]]:
    """(backward, ring all-reduce of the float32 parameters) of each layer, in forward order."""
    layers = MODELS[name]
    wire = 2 * (WORKERS - 1) / WORKERS * 4 / bandwidth_bytes_per_s
    backward_s = [2 * flops / SPEED_FLOPS_PER_S[name] for _, flops in layers]
    return backward_s, [LATENCY_S + parameters * wire if parameters else 0.0 for parameters, _ in layers]


def random_times(layers: int, iterations: int, seed: int) -> tuple[list[float], list[float]]:
    """Log-normal layers whose averages take 80 % of the backward time of a period."""
    rng = np.random.default_rng(seed)
    backward, average = rng.lognormal(0.0, 1.0, layers), rng.lognormal(0.0, 1.0, layers)
    average *= 0.8 * iterations * backward.sum() / average.sum()
    return backward.tolist(), average.tolist()


def _convolution(into: int, out: int, kernel: int, side: int) -> Layer:
    parameters = kernel * kernel * into * out
    return parameters + 2 * out, 2.0 * parameters * side * side * IMAGES  # batch norm's two vectors go with it


def _resnet(blocks: tuple[int, ...], *, bottleneck: bool, classes: int) -> list[Layer]:
    """For 32 x 32 images: a 3 x 3 stem, no pooling before the first block."""
    found, into = [_convolution(3, 64, 3, 32)], 64
    for stage, count in enumerate(blocks):
        width, side = 64 << stage, 32 >> stage
        out = 4 * width if bottleneck else width
        kernels = ((width, 1), (width, 3), (out, 1)) if bottleneck else ((width, 3), (width, 3))
        for block in range(count):
            if block == 0 and into != out:
                found.append(_convolution(into, out, 1, side))
            for width_out, kernel in kernels:
                found.append(_convolution(into, width_out, kernel, side))
                into = width_out
    return [*found, (into * classes + classes, 2.0 * into * classes * IMAGES)]


def _dense(into: int, out: int) -> Layer:
    return into * out, 2.0 * into * out * TOKENS


def _transformer(vocabulary: int, feed_forward: tuple[tuple[int, int], ...], positions: int) -> list[Layer]:
    """12 blocks of width 768, the output layer apart from the embedding as in the published profiles."""
    width = 768
    norm, attention = (2 * width, 8.0 * width * TOKENS), (0, 4.0 * width * SEQUENCE * TOKENS)
    block = [norm, _dense(width, 3 * width), attention, _dense(width, width), norm]
    block += [_dense(*shape) for shape in feed_forward]
    embedding: list[Layer] = [(vocabulary * width, 0.0), (positions * width, 0.0)]
    return [*embedding[: 2 if positions else 1], *itertools.chain(*[block] * 12), norm, _dense(width, vocabulary)]


MODELS: dict[str, list[Layer]] = {
    "ResNet-18": _resnet((2, 2, 2, 2), bottleneck=False, classes=10),
    "ResNet-50": _resnet((3, 4, 6, 3), bottleneck=True, classes=100),
    "GPT-2": _transformer(50257, ((768, 3072), (3072, 768)), SEQUENCE),
    "Llama-2": _transformer(32000, ((768, 3456), (768, 3456), (3456, 768)), 0),
}
"""Llama-2's 175 M parameters are 12 blocks of width 768 with a feed-forward of 3456: 173 M."""
