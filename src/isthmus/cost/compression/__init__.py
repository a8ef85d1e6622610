"""How much each message of a pipeline is compressed: the ratio planners by name, one per file, and what the one that a
problem asks for makes of messages."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from isthmus.cost.compression.adatopk import PAPER_FACTOR, adatopk, adatopk_paper, dense, harshest_ratio, uniform
from isthmus.cost.compression.just_enough import candidates_within, just_enough
from isthmus.cost.compression.messages import Packings, Sender, packed_edges, tensor_of, with_feedback
from isthmus.cost.problem import Problem
from isthmus.errors import unknown_name
from isthmus.graph import TensorSpec
from isthmus.plans import CompressionConfig, Edge, Packing
from isthmus.plans.packing import CODECS, DENSE


class RatioPlanner(NamedTuple):
    choose: Callable[[Problem, Sender, float], Packings]
    offers: Callable[[Problem, float], tuple[Packing, ...]]
    """Codecs of which one makes any tensor as short as `choose` ever does, whatever the pipeline."""
    alike: bool = False  # whether every message is packed by the one codec that it offers, whatever the pipeline


def _topk(ratio: float) -> tuple[Packing, ...]:
    return (Packing(codec="topk", ratio=ratio),)


def _harshest(problem: Problem, ratio: float) -> tuple[Packing, ...]:
    flow = problem.flow
    dtypes = {flow.by_name[ref.op].outputs[ref.index].dtype for ref in flow.differentiable}
    return _topk(harshest_ratio(ratio, dtypes | {"float32"}))


def _within_budget(problem: Problem, ratio: float) -> tuple[Packing, ...]:
    asked = problem.constraints.compression
    return candidates_within(ratio, asked.loss_budget if asked else None)


def _dense(codec: str) -> RatioPlanner:
    return RatioPlanner(partial(dense, codec), lambda *_: (Packing(codec=codec),), alike=True)


_PLANNERS: Mapping[str, RatioPlanner] = {
    "adatopk": RatioPlanner(adatopk, _harshest),
    "adatopk-paper": RatioPlanner(adatopk_paper, lambda _, ratio: _topk(PAPER_FACTOR * ratio)),
    **{name: _dense(name) for name in DENSE},
    "just-enough": RatioPlanner(just_enough, _within_budget),
    "uniform": RatioPlanner(uniform, lambda _, ratio: _topk(ratio), alike=True),
}


def ratio_planner_names() -> list[str]:
    """Every name that `[compression]` takes, sorted."""
    return sorted(_PLANNERS)


def describe_ratios(name: str) -> str:
    """One line on what a ratio planner does. Raises UserError for an unknown name."""
    if name in DENSE:
        return CODECS[name].summary
    return (inspect.getdoc(ratio_planner(name).choose) or "").partition("\n")[0]


def ratio_planner(name: str) -> RatioPlanner:
    """Raises UserError for an unknown name."""
    if name not in _PLANNERS:
        raise unknown_name("ratio planner", name, _PLANNERS)
    return _PLANNERS[name]


def as_requested(problem: Problem, sender: Sender) -> tuple[Edge, ...]:
    """The pipeline's edges, packed as the problem asks. UserError for an unknown method or a ratio below 1."""
    asked = problem.constraints.compression
    if asked is None:
        return sender.edges
    packings = dict(ratio_planner(asked.method).choose(problem, sender, asked.ratio))
    if asked.backward is not None:
        packings |= {message: Packing(codec=asked.backward) for message in packings if message.backward}
    return with_asked_feedback(asked, packed_edges(sender, packings))


def with_asked_feedback(asked: CompressionConfig, edges: tuple[Edge, ...]) -> tuple[Edge, ...]:
    """The same where no error feedback is asked for."""
    return tuple(map(with_feedback, edges)) if asked.feedback else edges


def packs_alike(problem: Problem) -> bool:
    """Return whether a tensor takes the same bytes in every plan: then planners price messages exactly before they have
    a plan, else from below (`least_bytes`)."""
    asked = problem.constraints.compression
    return asked is None or (ratio_planner(asked.method).alike and asked.backward in (None, asked.method))


def uniform_codecs(problem: Problem) -> list[CompressionConfig]:
    """Compressions that pack all messages alike, by each codec that the problem's method offers, harshest first."""
    asked = problem.constraints.compression
    offers = () if asked is None else _offers(problem, asked)
    return [
        CompressionConfig(method="uniform" if codec.codec == "topk" else codec.codec, ratio=codec.ratio)
        for codec in sorted(offers, key=Packing.bytes_per_element)
    ]


def _offers(problem: Problem, asked: CompressionConfig) -> tuple[Packing, ...]:
    back = () if asked.backward is None else (Packing(codec=asked.backward),)
    return (*ratio_planner(asked.method).offers(problem, asked.ratio), *back)


def least_bytes(problem: Problem) -> Callable[[TensorSpec], int]:
    """The fewest bytes in which a tensor that carries a gradient ever travels for one micro-batch."""
    asked, size = problem.constraints.compression, problem.micro_batch_size
    offers = _offers(problem, asked) if asked is not None else ()

    def least(spec: TensorSpec) -> int:
        return spec.nbytes(size) - max((packing.saves(*tensor_of(spec, size)) for packing in offers), default=0)

    return least
