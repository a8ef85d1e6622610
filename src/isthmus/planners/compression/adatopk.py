"""AdaTopK: the slower a message, the fewer of its elements are sent (FusionLLM, Eq. 7)."""

from __future__ import annotations

from isthmus.cost import Problem
from isthmus.plan import Packing, Plan
from isthmus.planners.compression.messages import Message, compressed, messages_of

ROUNDS = 20


def adatopk(problem: Problem, plan: Plan, ratio: float) -> Plan:
    """Top-K with a ratio per message in proportion to its time: r_i = max(1, c r R_i / max R) (FusionLLM, Eq. 7).

    R_i is a message's alpha + beta M, whichever direction it takes. In the paper i is a device and R its receives in
    sum, forward only: the same on a chain, but a skip over a fast link should not pay for one over a slow link. c makes
    the slowest message `ratio` times shorter: 3 with the paper's 12 bytes per kept element of 4, about 0.76 at ratio
    100 with ours. Where r_i is 1 the message travels as it is.

    Raises UserError for a ratio below 1 or a plan of another problem.
    """
    Packing(codec="topk", ratio=ratio)  # refuses a bad one even where there is no message
    messages = messages_of(problem, plan)
    seconds = {message: message.transfer_s(problem) for message in messages}
    slowest = max(messages, key=lambda m: seconds[m], default=None)
    if slowest is None:
        return compressed(problem, plan, {}, planner="adatopk")
    harshest = ratio_that_shortens(ratio, _element_bytes(slowest))
    ratios = {m: max(1.0, harshest * s / seconds[slowest]) if s else 1.0 for m, s in seconds.items()}
    packings = {m: Packing(codec="topk", ratio=r) if r > 1 else None for m, r in ratios.items()}
    return compressed(problem, plan, packings, planner="adatopk")


def ratio_that_shortens(times: float, element_bytes: float = 4.0) -> float:
    """At which ratio top-K makes a large tensor so many times shorter: c r of Eq. 7; 1 where none is mild enough."""
    found = times
    for _ in range(ROUNDS):  # a kept element's bytes grow with the logarithm of the ratio: this converges fast
        kept_bytes = found * Packing(codec="topk", ratio=found).bytes_per_element()
        found = max(1.0, times * kept_bytes / element_bytes)
    return found


def _element_bytes(message: Message) -> float:
    elements = sum(message.elements)
    return (message.size_bytes - message.exact_bytes) / elements if elements else 4.0
