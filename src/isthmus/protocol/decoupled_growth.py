"""Which replica makes merged weights too large, where each of its changes alone is admissible."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping

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
