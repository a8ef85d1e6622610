"""AdaTopK: the slower a message, the fewer of its elements are sent (FusionLLM, Eq. 7); and all alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from isthmus.cost.compression.messages import Packings, Sender, StageMessage, stage_messages_of
from isthmus.cost.problem import Problem
from isthmus.graph.opgraph import DTYPE_BYTES
from isthmus.plans import Packing

ROUNDS = 20
PAPER_FACTOR = 3.0
"""The factor of FusionLLM's format: a kept element is a float32 value and an int64 index, 12 bytes where it took 4."""


def adatopk(problem: Problem, sender: Sender, ratio: float) -> Packings:
    """Top-K with a ratio per message in proportion to its time: r_i = max(1, c r R_i / max R) (FusionLLM, Eq. 7).

    R_i is a message's alpha + beta M, whichever direction it takes. In the paper i is a device and R its receives in
    sum, forward only: the same on a chain, but a skip over a fast link should not pay for one over a slow link. c makes
    the slowest message `ratio` times shorter: 3 with the paper's 12 bytes per kept element of 4, about 0.76 at ratio
    100 with ours. Where r_i is 1 the message travels as it is. Each replica is a pipeline of its own.

    Raises UserError for a ratio below 1.
    """
    return _in_proportion(problem, sender, lambda slowest: ratio_that_shortens(ratio, _element_bytes(slowest)))


def adatopk_paper(problem: Problem, sender: Sender, ratio: float) -> Packings:
    """AdaTopK with the paper's factor as it stands: r_i = max(1, 3 r R_i / max R), whatever a kept element takes.

    At ratio 100 the slowest message keeps one element of 300. Raises UserError for a ratio below 1.
    """
    return _in_proportion(problem, sender, lambda _: PAPER_FACTOR * ratio)


def harshest_ratio(ratio: float, dtypes: Iterable[str]) -> float:
    """c r at most, where tensors have one of these types: of a message that keeps the fewest elements."""
    return max((ratio_that_shortens(ratio, DTYPE_BYTES[dtype]) for dtype in dtypes), default=1.0)


def ratio_that_shortens(times: float, element_bytes: float = 4.0) -> float:
    """At which ratio top-K makes a large tensor so many times shorter: c r of Eq. 7; 1 where none is mild enough."""
    found = times
    for _ in range(ROUNDS):  # a kept element's bytes grow with the logarithm of the ratio: this converges fast
        kept_bytes = found * Packing(codec="topk", ratio=found).bytes_per_element()
        found = max(1.0, times * kept_bytes / element_bytes)
    return found


def _in_proportion(problem: Problem, sender: Sender, harshest: Callable[[StageMessage], float]) -> Packings:
    seconds = {m: m.transfer_s(problem) for m in stage_messages_of(problem, sender)}
    slowest = max(seconds, key=lambda m: seconds[m], default=None)
    if slowest is None or not seconds[slowest]:
        return {}
    most = harshest(slowest)
    ratios = {m: max(1.0, most * s / seconds[slowest]) for m, s in seconds.items()}
    return {m: Packing(codec="topk", ratio=r) if r > 1 else None for m, r in ratios.items()}


def _element_bytes(message: StageMessage) -> float:
    elements = sum(count for count, _ in message.tensors)
    return sum(count * DTYPE_BYTES[dtype] for count, dtype in message.tensors) / elements if elements else 4.0


def uniform(problem: Problem, sender: Sender, ratio: float) -> Packings:
    """Top-K at the same ratio on every message (FusionLLM, section 5.1, the baseline of section 7).

    Of every `ratio` elements one is sent, in 3.07 bytes at 100: 130 times less of float32. The paper's 12 bytes made
    that 33. Raises UserError for a ratio below 1.
    """
    return dict.fromkeys(stage_messages_of(problem, sender), Packing(codec="topk", ratio=ratio))


def dense(codec: str, problem: Problem, sender: Sender, _ratio: float) -> Packings:
    """Every element of every message, by one codec; the ratio does not matter."""
    return dict.fromkeys(stage_messages_of(problem, sender), Packing(codec=codec))
