"""Random numbers: one stream per client, round and use, whoever draws from it and when.

A stream is a place in a counter that is put through a cipher (Salmon et al., Parallel Random Numbers: As Easy as 1, 2,
3, 2011), so to go to another client's costs next to nothing. (Rejected: a generator seeded with all four, whose seeding
takes ten times as long as the order of a small client's samples.)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Use = Literal["order", "model", "cohort", "dropout", "data", "noise", "partition", "pace"]
_USES: tuple[Use, ...] = ("order", "model", "cohort", "dropout", "data", "noise", "partition", "pace")
_WORD = 2**64 - 1


def _bits(seed: int, use: Use, round_: int, client: int) -> np.random.Philox:
    key = np.array([seed & _WORD, _USES.index(use)], dtype=np.uint64)
    return np.random.Philox(key=key, counter=np.array([0, 0, round_, client], dtype=np.uint64))


def stream(seed: int, use: Use, round_: int = 0, client: int = 0) -> np.random.Generator:
    """Equal numbers for equal arguments, unrelated ones for others. All from 0 on; of the seed 64 bits count."""
    return np.random.Generator(_bits(seed, use, round_, client))


def permutations(
    seed: int, use: Use, round_: int, clients: Iterable[int], size: int, times: int
) -> list[list[NDArray[np.int64]]]:
    """For each client, `times` orders of `size` things: the same as its stream gives."""
    bits = _bits(seed, use, round_, 0)
    draws, place = np.random.Generator(bits), bits.state
    found: list[list[NDArray[np.int64]]] = []
    for client in clients:
        place["state"]["counter"][3] = client
        bits.state = place
        found.append([draws.permutation(size) for _ in range(times)])
    return found


def torch_seed(seed: int, round_: int, client: int) -> int:
    """For a model that draws while it trains (dropout)."""
    return int(stream(seed, "model", round_, client).integers(2**62))
