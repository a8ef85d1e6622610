"""What a problem's compression makes of messages: of a pipeline's, and of any tensor at best."""

from __future__ import annotations

from collections.abc import Callable

from isthmus.cost.compression.messages import Sender, packed_edges, tensor_of, with_feedback
from isthmus.cost.compression.registry import ratio_planner
from isthmus.cost.problem import Problem
from isthmus.graph import TensorSpec
from isthmus.plans import CompressionConfig, Edge


def as_requested(problem: Problem, sender: Sender) -> tuple[Edge, ...]:
    """The pipeline's edges, packed as the problem asks. UserError for an unknown method or a ratio below 1."""
    asked = problem.constraints.compression
    if asked is None:
        return sender.edges
    edges = packed_edges(sender, ratio_planner(asked.method).choose(problem, sender, asked.ratio))
    return tuple(map(with_feedback, edges)) if asked.feedback else edges


def packs_alike(problem: Problem) -> bool:
    """Whether a tensor takes the same bytes in every plan: then planners price messages exactly before they have a
    plan, else from below (`least_bytes`)."""
    asked = problem.constraints.compression
    return asked is None or ratio_planner(asked.method).alike


def harshest_codec(problem: Problem) -> CompressionConfig | None:
    """A compression that packs every message alike, by the last codec that the problem's method offers."""
    asked = problem.constraints.compression
    if asked is None:
        return None
    last = ratio_planner(asked.method).offers(problem, asked.ratio)[-1]
    return CompressionConfig(method="uniform" if last.codec == "topk" else last.codec, ratio=last.ratio)


def least_bytes(problem: Problem) -> Callable[[TensorSpec], int]:
    """The fewest bytes in which a tensor that carries a gradient ever travels for one micro-batch."""
    asked, size = problem.constraints.compression, problem.micro_batch_size
    offers = ratio_planner(asked.method).offers(problem, asked.ratio) if asked is not None else ()

    def least(spec: TensorSpec) -> int:
        return spec.nbytes(size) - max((packing.saves(*tensor_of(spec, size)) for packing in offers), default=0)

    return least
