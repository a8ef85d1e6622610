"""The micro-batches of each replica, from how fast each is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def share_out(
    times: Sequence[tuple[float, float]], micro_batches: int, most: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Micro-batches per replica, one at least and `most` of each at most, so that the last replica ends as early as
    possible.

    `times` are (fill, period) per replica. The next micro-batch always goes to the replica that would end first with
    it, which is optimal because a replica's end only rises with its share; all that end before a time at which not all
    are done yet are handed out at once. AssertionError for too few or too many.
    """
    assert micro_batches >= len(times), "every replica needs a micro-batch"
    limits = np.full(len(times), micro_batches) if most is None else np.asarray(most)
    assert limits.min() >= 1 and limits.sum() >= micro_batches, "the replicas have room for all"
    fills = np.array([fill for fill, _ in times], dtype=np.float64)
    periods = np.maximum([period for _, period in times], 1e-300)
    # When all would be done if micro-batches could be split, by the replicas that fill first: the least over how many
    # these are. Nobody ends earlier, and rounding down leaves few over.
    first = np.argsort(fills)
    rate, filled = np.cumsum(1.0 / periods[first]), np.cumsum(fills[first] / periods[first])
    time_s = float(((micro_batches - len(times) + filled) / rate).min())
    done = 1 + np.clip((time_s - fills) / periods, 0, micro_batches).astype(np.int64)
    done = np.minimum(done, limits)
    shares = done if done.sum() <= micro_batches else np.ones(len(times), dtype=np.int64)
    while shares.sum() < micro_batches:
        shares[int(np.where(shares < limits, fills + shares * periods, np.inf).argmin())] += 1
    return tuple(int(share) for share in shares)
