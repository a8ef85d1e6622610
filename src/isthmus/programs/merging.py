"""A merge of what parties have trained, from its invitation to its end: what rounds and merges have in common.

    invite ─► answers come ─► over ─┬─ enough: what came is merged, and the next merge opens
                 ▲            │     └─ too few: dropped, or waited on
                 └── late ◄───┘ who has not answered yet

A merge is over when all that are expected have answered, when its quorum is in, when the others still work for an
earlier merge, or at its deadline. Programs differ in the rest:

| | rounds (`rounds.py`) | merges of decoupled replicas (`merger.py`) |
|---|---|---|
| who is invited | a cohort of clients, given to executors; or each site's own | every replica that is there |
| it opens | when the one before is committed | after so many samples, or when none trains on |
| its quorum counts | at once | after a time of grace |
| too few answers | it is dropped and tried again | it is waited on |
| late answers | are ignored, or count in a later round (FedBuff) | are part of the fragment's next merge |
| what is sent | the model, with the next opening | the fragment, to each as its link allows |

FedBuff's merges are rounds whose quorum is the buffer's size. DiLoCo's are merges whose server makes an outer step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import msgspec

Why = Literal["all", "quorum", "behind", "deadline"]
"""The event that ended a merge: all that were expected have answered; its quorum is in; all others still work for an
earlier one; its deadline is over."""
Outcome = Literal["done", "interrupted", "lost", "diverged", "failed"]
"""Diverged: the numbers of every client of a round are not finite. Failed: the job is at fault. Lost: the run cannot go
on for another reason."""


class Finish(msgspec.Struct, frozen=True):
    """How a run ended."""

    outcome: Outcome
    reason: str = ""


@dataclass(kw_only=True)
class OpenMerge:
    """A merge that is open. A subclass knows who was invited, and counts answers: there may be a million."""

    opened_s: float
    enough: int = 1  # answers that end it, before the last of them is in
    least: int = 1  # fewer make no merge
    deadline_s: float = math.inf  # so long after its opening it is over, however few have answered
    done: int = 0  # answers that are in

    @property
    def outstanding(self) -> int:
        """Answers that are expected and not in."""
        raise NotImplementedError

    def why_over(self, now_s: float, *, behind: int = 0, grace_is_over: bool = True) -> Why | None:
        """Return why it is over; None while it is not. `behind` of the outstanding answers are of those that still work
        for an earlier merge. A quorum counts once its grace is over."""
        if not self.outstanding:
            return "all"
        if grace_is_over and self.done >= self.enough:
            return "quorum"
        if self.outstanding == behind and self.done >= self.least:
            return "behind"
        return "deadline" if now_s - self.opened_s >= self.deadline_s else None
