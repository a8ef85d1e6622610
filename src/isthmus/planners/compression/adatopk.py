"""AdaTopK: the slower a message, the fewer of its elements are sent (FusionLLM, Eq. 7)."""

from __future__ import annotations

from isthmus.cost import Problem
from isthmus.plan import Plan
from isthmus.planners.compression.codecs import topk
from isthmus.planners.compression.messages import compressed, messages_of


def adatopk(problem: Problem, plan: Plan, ratio: float) -> Plan:
    """Top-K with a ratio per message in proportion to its time: r_i = max(1, 3 r R_i / max R) (FusionLLM, Eq. 7).

    R_i is a message's alpha + beta M, whichever direction it takes. In the paper i is a device and R its receives in
    sum, forward only: the same on a chain, but a skip over a fast link should not pay for one over a slow link. The
    slowest message becomes `ratio` times shorter, the 3 making up for their 12 bytes per kept element. Where r_i is 3
    or less that format would be no shorter than the tensor, which then travels as it is; the paper does not say.

    Raises UserError for a ratio below 1 or a plan of another problem.
    """
    topk(ratio)  # refuses a bad one even where there is no message
    messages = messages_of(problem, plan)
    seconds = {message: message.transfer_s(problem) for message in messages}
    slowest_s = max(seconds.values(), default=0.0)
    codecs = {m: topk(max(1.0, 3 * ratio * s / slowest_s)) for m, s in seconds.items()}
    return compressed(problem, plan, codecs, planner="adatopk")
