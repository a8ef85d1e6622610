"""Where a run continues after a loss: which device holds which state, and which device sends each part.

A part is a name for something that training changes, a parameter or a buffer. The run's whole state after a step is
all parts of that step. Each plan epoch begins from such a state, so the epochs that trained make one line:

    epoch 0   0 ──────────────── 40 ─ ─ 47     steps 40..46 were trained, and are gone
    epoch 1                      40 ─────────── 90
    epoch 3                                     90 ──►

What a device holds counts if it lies on the unbroken line: epoch 0's state after step 47 does not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set

import msgspec

from isthmus.wire_types import Count, Distinct, Text


class StateHolding(msgspec.Struct, frozen=True, kw_only=True):
    """Parts of the state after `step` steps, as plan epoch `epoch` made it, in a device's memory."""

    epoch: Count
    step: Count
    parts: Distinct[Text]


class StateLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of the state that each device holds under a plan."""

    parts: Mapping[str, frozenset[str]]  # per device, what its stage changes in training. Replicas hold the same parts.
    snapshot_copies: Mapping[str, str] = {}  # per device, which other one keeps a copy of its snapshots
    keep_every: int = 0  # steps between snapshots in memory, at least; 0 for none
    number: int = 0  # the plan's number, given by its planner
    period: int = 1  # steps after which replicas are equal: snapshots and changes of plan wait for it
    repeats: bool = False
    """Whether who has a state and each step's gradients can do the steps again: so joining devices get theirs, while
    the others train."""

    @property
    def all_parts(self) -> frozenset[str]:
        return frozenset[str]().union(*self.parts.values())


class Lineage:
    """The epochs that trained, each with the step that it began from."""

    def __init__(self, began: Iterable[tuple[int, int]] = ()) -> None:
        self._began = dict(began)

    @property
    def began(self) -> tuple[tuple[int, int], ...]:
        return tuple(self._began.items())

    @property
    def next_epoch(self) -> int:
        return 1 + max(self._began, default=-1)

    def begin(self, epoch: int, step: int) -> None:
        self._began[epoch] = step

    def counts(self, epoch: int, step: int) -> bool:
        """Return whether the state that the epoch had after so many steps is on the line."""
        own = self._began.get(epoch)
        return own is not None and own <= step <= min((s for e, s in self._began.items() if e > epoch), default=step)


Held = Mapping[str, Sequence[StateHolding]]  # the states that each device reports to hold


def holders_at(step: int, held: Held, lineage: Lineage) -> dict[str, frozenset[str]]:
    """Return the parts of the state after `step` that each device holds."""
    return {
        device: frozenset[str]().union(*(h.parts for h in holdings if h.step == step and lineage.counts(h.epoch, step)))
        for device, holdings in held.items()
    }


def recovery_step(parts: Set[str], held: Held, lineage: Lineage) -> int | None:
    """The latest step whose whole state is in somebody's memory; None when there is none."""
    steps = {h.step for holdings in held.values() for h in holdings}
    whole = (s for s in steps if parts <= frozenset[str]().union(*holders_at(s, held, lineage).values()))
    return max(whole, default=None)


def state_donors(needs: Mapping[str, Set[str]], holds: Mapping[str, Set[str]]) -> dict[str, frozenset[str]]:
    """Return the parts that each device sends to devices that need them and do not hold them. Each part is sent once,
    by the holder that sends the fewest parts so far."""
    missing = sorted({part for device, wanted in needs.items() for part in wanted - holds.get(device, frozenset())})
    given: Counter[str] = Counter()
    found: dict[str, set[str]] = {}
    for part in missing:
        donor = min((d for d, parts in holds.items() if part in parts), key=lambda d: (given[d], d))
        given[donor] += 1
        found.setdefault(donor, set()).add(part)
    return {device: frozenset(parts) for device, parts in found.items()}


class RecoveryPoint(msgspec.Struct, frozen=True):
    """From where a run goes on."""

    step: int
    in_memory: bool  # whether devices hold the state; else it is the last checkpoint's
    own: Mapping[str, frozenset[str]]  # parts that each device holds
    donors: Mapping[str, frozenset[str]]  # parts that each device sends to others


def recovery_point(layout: StateLayout, held: Held, lineage: Lineage, saved_step: int) -> RecoveryPoint:
    """The latest step whose whole state is in memory, unless the last checkpoint is of a later one."""
    step = recovery_step(layout.all_parts, held, lineage)
    if step is None or step < saved_step:
        return RecoveryPoint(saved_step, False, {}, {})
    own = holders_at(step, held, lineage)
    return RecoveryPoint(step, True, own, state_donors(layout.parts, own))
