"""The weights of a simulated run are the list of the updates made to them. A check says which lists are right.

Every part of the model goes through the same updates: each range of samples once and in order, and none of an epoch's
line that ended.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

from isthmus.errors import InternalError
from isthmus.protocol.recovery import Lineage


class HistoryEntry:
    """The newest update of a part, with those before it; None stands for the model's own weights."""

    __slots__ = ("before", "epoch", "first_sample", "steps")

    def __init__(self, before: HistoryEntry | None, first_sample: int, epoch: int) -> None:
        self.before = before
        self.first_sample = first_sample
        self.epoch = epoch
        self.steps: int = 1 if before is None else before.steps + 1


State = Mapping[str, HistoryEntry | None]  # the newest update of each part


def updated(state: State, first_sample: int, epoch: int) -> State:
    """The state after one more step, of all replicas' samples from `first_sample` on."""
    made: dict[int, HistoryEntry] = {}
    return {part: made.setdefault(id(last), HistoryEntry(last, first_sample, epoch)) for part, last in state.items()}


def after(state: State, step: int, parts: Iterable[str]) -> State:
    """Parts of the state as they were after so many steps."""
    found: dict[str, HistoryEntry | None] = {}
    for part in parts:
        last = state[part]
        while last is not None and last.steps > step:
            last = last.before
        found[part] = last
    return found


def check_state(state: State, parts: Iterable[str], step: int, batch: int, lineage: Lineage) -> None:
    """InternalError unless every part went through `step` updates, of `batch` samples each, in order, on one line."""
    missing = set(parts) - state.keys()
    if missing:
        raise InternalError(f"simulation: the state after step {step} lacks {sorted(missing)}")
    for last in {id(last): last for last in state.values()}.values():
        updates = list(_updates(last))
        if [u.first_sample for u in updates] != [n * batch for n in range(step)]:
            raise InternalError(f"simulation: samples from {[u.first_sample for u in updates]} on, in {step} steps")
        if any(a.epoch > b.epoch for a, b in itertools.pairwise(updates)):
            raise InternalError("simulation: an epoch went on from a later one")
        for at, update in enumerate(updates):
            if not lineage.counts(update.epoch, at + 1):
                raise InternalError(f"simulation: step {at} of epoch {update.epoch} is of a line that ended")


def _updates(last: HistoryEntry | None) -> Iterable[HistoryEntry]:
    found: list[HistoryEntry] = []
    while last is not None:
        found.append(last)
        last = last.before
    return reversed(found)
