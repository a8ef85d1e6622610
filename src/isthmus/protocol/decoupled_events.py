"""Messages between decoupled replicas and their merger, the parts of a merge, and which of them are too large.

A merge has a number, from 1 on. A fragment's version is the number of the merge that made it; 0 is the start.

Decides the next message to a replica: the newest version of each fragment, then the order that it was given.

A replica that is stopped or slow to receive piles up nothing: versions that it missed are skipped, and it gets the
newest one whole.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping

import msgspec

from isthmus.protocol.run_messages import Halt
from isthmus.wire_types import Count, CountOrNone, Finite, Many

NEVER = -1  # in place of a merge's number


class MergeRules(msgspec.Struct, frozen=True, kw_only=True):
    """When a merge begins and ends, and when the run does."""

    samples: int | None
    """After which the run ends, all replicas together. None: when every one that is there has made its last step."""
    merge_every: float  # samples of all replicas together from one merge to the next
    fragments: int
    quorum: int  # contributions without which a merge does not end, where so many replicas are there
    grace: float  # how long a merge that has its quorum waits for others, as a share of the time between two merges
    timeout_s: float  # after which a run ends that has no replica
    step_samples: int | None = None  # samples of a replica's step, at most; None: its own script says how many


class MergesDone(msgspec.Struct, frozen=True, kw_only=True):
    """Where a run of merges is: another process goes on from there."""

    merge: Count = 0  # the number of the newest merge
    samples: Count = 0  # samples that all replicas have trained on
    steps: dict[str, Count] = {}  # steps that each replica has made


NOTHING_MERGED = MergesDone()


# Replica to merger


class StepsMade(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    steps: Count  # steps that this replica has made, this one included
    samples: Count  # samples of this step
    loss: Finite | None = None  # None for one that is not a number


class VersionTaken(msgspec.Struct, frozen=True, array_like=True):
    """A fragment's version that a replica took, and how many steps it had made."""

    fragment: Count
    merge: Count
    steps: Count


class Contributed(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """With it come the packed changes of the fragments that were asked for."""

    merge: Count
    fragments: Many[Count]
    steps: Count
    samples: Many[Count]  # samples of each fragment that were trained on since the last contribution that was merged
    last: bool = False  # whether no step comes after it
    taken: Many[VersionTaken] = ()  # versions since the newest contribution that it knows to be merged
    taken_before: Count = 0  # how many it took before those


class LastStepMade(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """This replica trains no more: it gives what it is asked for at once, and waits for the end of the run."""


ReplicaReport = StepsMade | Contributed | LastStepMade


# Merger to replica


class CollectChanges(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Contribute after the present step."""

    merge: Count
    fragments: Many[Count]
    last: bool = False  # no step comes after it


class FragmentSent(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """With it comes the fragment: what has changed since the version that this replica has, or all of it."""

    fragment: Count
    merge: Count  # the version
    whole: bool
    included: CountOrNone
    """The newest contribution of this replica to this fragment that is merged, by the merge that asked for it."""
    first: bool
    """On this connection: a contribution that is not merged yet is void, and its change is to be given again."""
    samples: Count  # samples of all replicas until then: the learning rate follows them


ReplicaOrder = CollectChanges | FragmentSent | Halt


# Merges


class Contribution(msgspec.Struct, frozen=True, kw_only=True):
    replica: str
    number: int
    """The number of the merge that asked for it: either it is in that merge, or it came too late for that one."""
    steps: int  # that the replica had made
    samples: int  # trained on since its contribution before
    taken: tuple[VersionTaken, ...]
    taken_before: int


class MergedFragment(msgspec.Struct, frozen=True, kw_only=True):
    fragment: int
    contributions: tuple[Contribution, ...]  # in the order of the replicas' names


class MergeChanges(msgspec.Struct, frozen=True, kw_only=True):
    """Make the outer step of these fragments with these contributions, weighted by samples; then every replica is to
    have the result. It is a line of the run's record."""

    merge: int
    fragments: tuple[MergedFragment, ...]
    samples: int  # samples that all replicas have trained on so far


class Delivery:
    """To one replica. `next` is what fits on its link now."""

    def __init__(self, fragments: int, begun: MergesDone = NOTHING_MERGED) -> None:
        """`begun`: where a run goes on, with a version of every fragment."""
        self._sent = [NEVER] * fragments
        """The version of each fragment that it has, or will once what is on its way has arrived."""
        self._newest = [begun.merge] * fragments
        self._before = [NEVER] * fragments  # the version that each newest one was made from
        self._included = [NEVER] * fragments
        self._samples = [begun.samples] * fragments
        self._asked: CollectChanges | Halt | None = None
        self._halt: Halt | None = None
        self._newest_first = self._is_halted = False

    def publish(self, fragment: int, merge: int, samples: int, included: int = NEVER) -> None:
        """A version is made. `included`: the contribution of this replica that is in it."""
        self._before[fragment], self._newest[fragment] = self._newest[fragment], merge
        self._samples[fragment] = samples
        if included != NEVER:
            self._included[fragment] = included

    def restart(self) -> None:
        """The connection is another one: what was on its way may not have arrived."""
        self._sent = [NEVER] * len(self._sent)
        self._asked, self._is_halted = None, False

    def ask(self, order: CollectChanges | Halt) -> None:
        """After the newest versions. An end is that of this connection alone."""
        self._asked = order

    def halt(self, halt: Halt, *, newest_first: bool = False) -> None:
        """Nothing follows. `newest_first`: it is to have the newest versions before."""
        self._halt, self._newest_first = halt, newest_first

    def next(self) -> ReplicaOrder | None:
        """The next message, which counts as sent; None where nothing is to be sent. A fragment comes before what is
        asked of it: a replica must know of one contribution's fate before it makes the next."""
        if self._halt is not None and not self._newest_first:
            return self._halted()
        for fragment, (sent, newest) in enumerate(zip(self._sent, self._newest, strict=True)):
            if sent != newest:
                self._sent[fragment] = newest
                return FragmentSent(
                    fragment=fragment,
                    merge=newest,
                    whole=sent == NEVER or sent != self._before[fragment],
                    included=self._included[fragment],
                    first=sent == NEVER,
                    samples=self._samples[fragment],
                )
        if self._halt is not None:
            return self._halted()
        asked, self._asked = self._asked, None
        return asked

    def _halted(self) -> Halt | None:
        halt, self._is_halted = None if self._is_halted else self._halt, True
        return halt


LARGEST_WEIGHTS = 10.0
"""Root mean square of a fragment's merged weights, as a multiple of that of its first ones, or of 1 if that is more.
Beyond it the changes of a merge are compared with those of other replicas."""
UNLIKE_OTHERS = 10.0  # times as far for each sample as others have moved: such a change is not merged beyond the limit


class FragmentGrowth:
    """Limits how far replicas move one fragment. Sizes are root mean squares.

    Replicas of one job move about as far for each sample. Where all together make the weights large, the model needs it
    or all diverge, and nobody is to blame: the limit gives way.
    """

    def __init__(self, first: float) -> None:
        """`first` is the size of the run's first weights."""
        self._limit = LARGEST_WEIGHTS * max(1.0, first)
        self._moved: dict[str, tuple[float, int]] = {}  # the summed sizes and samples of each replica's merged changes

    def unlike_others(self, weights: float, changes: Mapping[str, tuple[float, int]]) -> dict[str, float]:
        """Return how many times as far for each sample a change moves the weights as others, for each change of a merge
        that is not to be merged. `changes` gives each replica's size and samples, `weights` the size of the weights
        now."""
        merged, found = dict(changes), dict[str, float]()
        while (reached := weights + _mean(merged)) > self._limit:
            name = max(merged, key=lambda one: _rate(merged[one]), default=None)
            others = [_rate(self._with(one, merged)) for one in {*self._moved, *merged} - {name}]
            usual = statistics.median_low(others) if others else 0.0
            if name is None or not others or _rate(merged[name]) <= UNLIKE_OTHERS * usual:
                self._limit = 2 * reached
                break
            rate = _rate(merged.pop(name))
            found[name] = rate / usual if usual else math.inf
            self._moved.pop(name, None)
        self._moved |= {name: self._with(name, merged) for name in merged}
        return found

    def _with(self, name: str, changes: Mapping[str, tuple[float, int]]) -> tuple[float, int]:
        """Return the size and samples that a replica has moved, the changes of this merge included."""
        (size, samples), (more, of) = self._moved.get(name, (0.0, 0)), changes.get(name, (0.0, 0))
        return size + more, samples + of


def _rate(moved: tuple[float, int]) -> float:
    size, samples = moved
    return size / max(1, samples)


def _mean(changes: Mapping[str, tuple[float, int]]) -> float:
    """Return an upper bound of the size of the changes' mean, weighted by samples."""
    total = sum(samples for _, samples in changes.values())
    return sum(size * samples for size, samples in changes.values()) / max(1, total)
