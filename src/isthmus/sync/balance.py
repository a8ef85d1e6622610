"""Unequal workers: more steps in a period for the fast ones, so that nobody waits at its end (DreamDDP, 2.3: H_k)."""

from __future__ import annotations

from collections.abc import Sequence


def balanced_steps(period: int, compute_s: Sequence[float]) -> tuple[int, ...]:
    """Steps of each worker, given what one step takes it: about as many together as `period` each, none below 1.

    The sum over the workers of H_k is K H to rounding, so that a period sees the same number of samples.
    """
    speeds = [1 / max(taken_s, 1e-9) for taken_s in compute_s]
    share = period * len(speeds) / sum(speeds)
    return tuple(max(1, round(share * speed)) for speed in speeds)
