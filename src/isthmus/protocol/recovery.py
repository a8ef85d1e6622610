"""Where a run continues after a loss: which device holds which state, and which device sends each part.

A part is a name for something that training changes, a parameter or a buffer. The run's whole state after a step is
all parts of that step. Each plan epoch begins from such a state, so the epochs that trained make one line:

    epoch 0   0 ──────────────── 40 ─ ─ 47     steps 40..46 were trained, and are gone
    epoch 1                      40 ─────────── 90
    epoch 3                                     90 ──►

What a device holds counts if it lies on the unbroken line: epoch 0's state after step 47 does not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set

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
    sizes: Mapping[str, int] = {}  # bytes of each part's state, about; of others it is not known
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


Donated = dict[str, frozenset[str]]  # by donor, the parts that it gives to one device
SecondsPerByte = Callable[[str, str], float]  # of the link from a donor to a device that gets state


def _alike(donor: str, receiver: str) -> float:
    return 1.0


def state_donors(
    needs: Mapping[str, Set[str]],
    holds: Mapping[str, Set[str]],
    sizes: Mapping[str, int] = {},
    seconds_per_byte: SecondsPerByte = _alike,
) -> dict[str, dict[str, frozenset[str]]]:
    """Return for each device which device gives it the parts that it needs and does not hold. The largest parts are
    assigned first, each to the holder that is done with it first. Parts that nobody holds are left out."""
    missing = [(part, device) for device, wanted in needs.items() for part in wanted - holds.get(device, frozenset())]
    busy_s: defaultdict[str, float] = defaultdict(float)
    found: dict[str, dict[str, set[str]]] = {}
    for part, device in sorted(missing, key=lambda one: (-sizes.get(one[0], 1), *one)):
        done_s = {
            donor: busy_s[donor] + sizes.get(part, 1) * seconds_per_byte(donor, device)
            for donor, parts in holds.items()
            if part in parts
        }
        if done_s:
            donor = min(done_s, key=lambda d: (done_s[d], d))
            busy_s[donor] = done_s[donor]
            found.setdefault(device, {}).setdefault(donor, set()).add(part)
    return {d: {donor: frozenset(parts) for donor, parts in given.items()} for d, given in found.items()}


class RecoveryPoint(msgspec.Struct, frozen=True):
    step: int
    in_memory: bool  # whether devices hold the state; else it is the last checkpoint's
    own: Mapping[str, frozenset[str]]  # parts that each device holds


def recovery_point(layout: StateLayout, held: Held, lineage: Lineage, saved_step: int) -> RecoveryPoint:
    """The latest step whose whole state is in memory, unless the last checkpoint is of a later one."""
    step = recovery_step(layout.all_parts, held, lineage)
    if step is None or step < saved_step:
        return RecoveryPoint(saved_step, False, {})
    return RecoveryPoint(step, True, holders_at(step, held, lineage))


class StateSources:
    """The devices that give parts in an epoch, to whom, and others that could."""

    def __init__(
        self, layout: StateLayout, holds: Mapping[str, frozenset[str]], seconds_per_byte: SecondsPerByte = _alike
    ) -> None:
        """`holds`: parts that each device has of the state that the epoch begins from."""
        self.holds = holds
        self._sizes = layout.sizes
        self._seconds_per_byte = seconds_per_byte
        self.donors = state_donors(layout.parts, holds, layout.sizes, seconds_per_byte)
        """The parts that each donor gives, by the device that gets them."""
        self._tried: set[tuple[str, str]] = set()  # donor and receiver

    def receivers(self) -> dict[str, dict[str, frozenset[str]]]:
        """Return the parts that each device gets, by donor."""
        found: dict[str, dict[str, frozenset[str]]] = {}
        for device, donors in self.donors.items():
            for donor, parts in donors.items():
                found.setdefault(donor, {})[device] = parts
        return found

    def gives(self, donor: str, device: str, parts: Set[str]) -> bool:
        """Return whether the donor is to give the device these parts."""
        return bool(parts) and parts <= self.donors.get(device, {}).get(donor, frozenset())

    def instead(self, donor: str, device: str, parts: Set[str]) -> Donated | None:
        """Return who else gives the device these parts, as the donor does not; None where nobody else has one."""
        self._tried.add((donor, device))
        given = self.donors[device]
        given[donor] = given[donor] - parts
        holds = {d: held for d, held in self.holds.items() if d != device and (d, device) not in self._tried}
        found = state_donors({device: parts}, holds, self._sizes, self._seconds_per_byte).get(device, {})
        if frozenset[str]().union(*found.values()) != parts:
            return None
        for other, more in found.items():
            given[other] = given.get(other, frozenset()) | more
        return found
