"""Ours: no message is compressed more than it takes for its link not to be the bottleneck.

The period of a pipeline is that of its slowest stage or link. Compression cannot shorten the stages, and where a link
stays slowest under the harshest codec it cannot shorten that link further; the longer of the two is the least period,
and the aim. Each message takes the mildest codec with which its bytes pass in that time.

With a loss budget the aim is the least period whose codecs are expected to cost no more than that. Candidates are the
codecs of which one message costs no more. A whole plan's codecs follow from what all its replicas may choose
(`cost.placement`).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence

from isthmus.cost.compression.messages import Packings, Sender, StageMessage, stage_messages_of
from isthmus.cost.problem import Problem
from isthmus.cost.stage_costs import uplinks_s
from isthmus.expected_loss import expected_increase
from isthmus.plans import Packing

RATIOS = (10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000)
SLACK = 1 + 1e-9  # rounding: a message that takes the aim exactly is no bottleneck


def just_enough(problem: Problem, sender: Sender, ratio: float, codecs: Sequence[Packing] | None = None) -> Packings:
    """The mildest codec per message with which its link is not the bottleneck.

    `codecs` are the candidates, the mildest first; by default bf16, int8, int4 and top-K at ratios up to `ratio`. Where
    the problem has a loss budget, those that it allows one message. Latency and the memory that holds micro-batches in
    flight are not looked at: bytes do not change them. Raises UserError for a ratio below 1.
    """
    asked = problem.constraints.compression
    budget = None if asked is None else asked.loss_budget
    candidates = _allowed(ladder(ratio) if codecs is None else codecs, budget)
    choice = _CodecChoice(problem, stage_messages_of(problem, sender), candidates)
    return choice.choose(sender.slowest_s) if budget is None else choice.within(budget, sender.slowest_s)


def choices_within(problem: Problem, sender: Sender, ratio: float, budget: float) -> Iterator[Packings]:
    """Yield choices of one pipeline of a plan: for the least period first, then for each longer one; messages as they
    are; and all of them by one codec, which shortens the fill too."""
    candidates = candidates_within(ratio, budget)
    yield from _CodecChoice(problem, stage_messages_of(problem, sender), candidates).every(sender.slowest_s)


def candidates_within(ratio: float, budget: float | None) -> tuple[Packing, ...]:
    """Those of the ladder that a loss budget, if there is one, allows one message."""
    return _allowed(ladder(ratio), budget)


def _allowed(candidates: Sequence[Packing], budget: float | None) -> tuple[Packing, ...]:
    if budget is None:
        return tuple(candidates)
    return tuple(c for c in candidates if math.isfinite(increase := expected_increase(c)) and increase <= budget)


def ladder(ratio: float) -> tuple[Packing, ...]:
    """The default candidates, the mildest first. Raises UserError for a ratio below 1."""
    harshest = Packing(codec="topk", ratio=ratio)
    milder = (Packing(codec="topk", ratio=float(r)) for r in RATIOS if r < ratio)
    dense = Packing(codec="bf16"), Packing(codec="int8"), Packing(codec="int4")
    return (*dense, *milder, *([harshest] if ratio >= RATIOS[0] else []))


class _CodecChoice:
    """The messages of one pipeline; `None` is the mildest candidate."""

    def __init__(self, problem: Problem, messages: Sequence[StageMessage], candidates: Sequence[Packing]) -> None:
        self._problem = problem
        self._messages = messages
        self._candidates: tuple[Packing | None, ...] = (None, *candidates)

    def choose(self, stage_s: float) -> dict[StageMessage, Packing | None]:
        return self._in_time(self._least_s(stage_s))

    def within(self, budget: float, stage_s: float) -> dict[StageMessage, Packing | None]:
        """The choice of the least period that keeps to the budget. A longer one never takes harsher codecs, and the
        longest packs nothing."""
        longer = self._periods(stage_s)

        def is_within(period_s: float) -> bool:
            packed = [m.packed(codec) for m, codec in self._in_time(period_s).items() if codec is not None]
            return sum(expected_increase(p.packing) for p in packed if p is not None) <= budget

        first = bisect_left(longer, True, key=is_within)
        return self._in_time(longer[first]) if first < len(longer) else self._alike(None)

    def every(self, stage_s: float) -> Iterator[Packings]:
        yield from (self._in_time(period_s) for period_s in self._periods(stage_s))
        yield from map(self._alike, self._candidates)

    def _alike(self, codec: Packing | None) -> dict[StageMessage, Packing | None]:
        return dict.fromkeys(self._messages, codec)

    def _periods(self, stage_s: float) -> list[float]:
        """Those at which another choice may be the mildest, from the least on."""
        least_s = self._least_s(stage_s)
        periods = {m.wire_s(self._problem, codec) for m in self._messages for codec in self._candidates}
        periods |= {least_s, *self._uplinks_s(self._alike(None)).values()}
        return sorted(s for s in periods if s >= least_s)

    def _least_s(self, stage_s: float) -> float:
        shortest = {m: min(self._candidates, key=m.wire_bytes) for m in self._messages}
        link_s = max((m.wire_s(self._problem, codec) for m, codec in shortest.items()), default=0.0)
        return max([stage_s, link_s, *self._uplinks_s(shortest).values()])

    def _in_time(self, period_s: float) -> dict[StageMessage, Packing | None]:
        aim_s = period_s * SLACK
        chosen = {m: self._mildest(m, aim_s) for m in self._messages}
        self._relieve_uplinks(chosen, aim_s)
        return chosen

    def _mildest(self, message: StageMessage, aim_s: float) -> Packing | None:
        return next(c for c in self._candidates if message.wire_s(self._problem, c) <= aim_s)

    def _relieve_uplinks(self, chosen: dict[StageMessage, Packing | None], aim_s: float) -> None:
        """Each message may pass in time while all that share an uplink do not: then the longest gets shorter."""
        while late := {region for region, seconds in self._uplinks_s(chosen).items() if seconds > aim_s}:
            over = [m for m in chosen if self._uplink(m) in late and self._shorter(m, chosen[m])]
            longest = max(over, key=lambda m: m.wire_bytes(chosen[m]))
            chosen[longest] = self._shorter(longest, chosen[longest])

    def _shorter(self, message: StageMessage, codec: Packing | None) -> Packing | None:
        """The next candidate that makes the message shorter; None where there is none."""
        now = message.wire_bytes(codec)
        return next((c for c in self._candidates if message.wire_bytes(c) < now), None)

    def _uplink(self, message: StageMessage) -> str | None:
        site = self._problem.fleet.uplink(message.source, message.target)
        return site.region if site else None

    def _uplinks_s(self, chosen: dict[StageMessage, Packing | None]) -> dict[str, float]:
        """Seconds per micro-batch on each shared uplink."""
        return uplinks_s(
            self._problem.fleet, ((m.source, m.target, m.wire_bytes(codec)) for m, codec in chosen.items())
        )
