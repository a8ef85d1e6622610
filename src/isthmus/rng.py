"""Random numbers: one stream per client, round and use, independent of the process and of the order.

A stream is a place in a counter that is put through a cipher (Salmon et al., Parallel Random Numbers: As Easy as 1, 2,
3, 2011), so to go to another client's costs next to nothing. (Rejected: a generator seeded with all four, whose seeding
takes ten times as long as the order of a small client's samples.)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Use = Literal["order", "model", "cohort", "dropout", "data", "noise", "partition", "pace", "augment"]
_USES: tuple[Use, ...] = ("order", "model", "cohort", "dropout", "data", "noise", "partition", "pace", "augment")
_WORD = 2**64 - 1
_GAMMA, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # splitMix64's


def _bits(seed: int, use: Use, round_: int, client: int) -> np.random.Philox:
    key = np.array([seed & _WORD, _USES.index(use)], dtype=np.uint64)
    return np.random.Philox(key=key, counter=np.array([0, 0, round_, client], dtype=np.uint64))


def stream(seed: int, use: Use, round_: int = 0, client: int = 0) -> np.random.Generator:
    """Equal numbers for equal arguments, unrelated ones for others. All from 0 on; of the seed 64 bits count."""
    return np.random.Generator(_bits(seed, use, round_, client))


def orders(seed: int, round_: int, clients: Sequence[int], size: int, times: int) -> NDArray[np.int64]:
    """(clients, times, size): of each client `times` orders of `size` things.

    Things are in the order of numbers that are drawn for them: of all clients at once, by a generator that is a hash of
    a counter (SplitMix64: Steele et al., Fast Splittable Pseudorandom Number Generators, 2014), begun at a place of the
    seed, the round and the client. (Rejected: each client's `stream`: to set it takes longer than to put the things of
    a small client in order.)
    """
    place = _hashed(_hashed(seed & _WORD, _USES.index("order")), round_)
    begun = np.array([_hashed(place, client) for client in clients], dtype=np.uint64)
    numbers = begun[:, None] + _counted(times * size)
    numbers = (numbers ^ (numbers >> 30)) * _FIRST
    numbers = (numbers ^ (numbers >> 27)) * _SECOND
    numbers ^= numbers >> 31
    return numbers.reshape(len(clients), times, size).argsort(axis=-1, kind="stable")


def _hashed(place: int, what: int) -> int:
    """A step of SplitMix64 from a place that `what` has been added to."""
    number = (place + what + _GAMMA) & _WORD
    number = (number ^ (number >> 30)) * _FIRST & _WORD
    number = (number ^ (number >> 27)) * _SECOND & _WORD
    return number ^ (number >> 31)


@lru_cache(maxsize=64)
def _counted(count: int) -> NDArray[np.uint64]:
    return np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GAMMA)


def torch_seed(seed: int, round_: int, client: int) -> int:
    """For a model that draws while it trains (dropout)."""
    return int(stream(seed, "model", round_, client).integers(2**62))
