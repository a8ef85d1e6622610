"""The coordinator's sum of masked updates: it adds them up as they come, and takes the masks off the sum."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, combinations, islice

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from torch import Tensor

from isthmus.errors import PeerError
from isthmus.federated.partial import AggregationWeights
from isthmus.federated.secure.masks import WEIGHTS, Vector, add_mask, check_masked, joined, parted
from isthmus.federated.secure.shamir import is_share, recover, share_of
from isthmus.federated.secure.site_secrets import context, key_of, mask_key, mask_sign
from isthmus.programs.masked import Secrets, TakeMasksOff

MOST_SUBSETS = 1000
"""Sets that are tried for one secret. With a threshold of half, each wrong share doubles how many it takes: of a
hundred neighbours, five liars or six are worked around; all of them where there are at most twelve."""


class MaskedSum:
    """The sum of one phase. No update is kept."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        """`sizes` are the numbers of each value that is summed."""
        self.sizes = {**sizes, WEIGHTS: 2}
        self._total: Vector | None = None
        self.wrong: frozenset[tuple[str, str]] = frozenset()
        """Holder and owner of each share of the last sum that was wrong."""

    def begin(self) -> None:
        self._total = None

    def check(self, values: Mapping[str, Tensor]) -> None:
        """PeerError for what is no masked update."""
        check_masked(values, self.sizes)

    def add(self, values: Mapping[str, Tensor]) -> None:
        """An update that has passed `check`."""
        vector = joined(values)
        if self._total is None:
            self._total = vector
        else:
            np.add(self._total, vector, out=self._total)

    def unmasked(self, recovered: TakeMasksOff, run: str) -> tuple[dict[str, Tensor], AggregationWeights]:
        """The sums and their weights, as an executor sends them. It ends the sum. PeerError for shares that do not give
        back what the sites committed to: then the sum stays, for more shares may come."""
        assert self._total is not None, "an update is in"
        search = ShareSearch()
        seeds = [search.seed_of(site, secrets) for site, secrets in recovered.summed.items()]
        privates = {site: search.private_of(site, secrets) for site, secrets in recovered.dropped.items()}
        self.wrong = frozenset(search.wrong)
        total, self._total = self._total, None
        bound_to = context(run, recovered.phase)
        for seed in seeds:
            add_mask(total, seed, -1)
        for site, private in privates.items():
            for peer in recovered.peers[site]:
                key = mask_key(private, peer.mask, bound_to, (site, peer.site))
                add_mask(total, key, -mask_sign(peer.site, site))
        found = parted(total, self.sizes)
        weight, clients = found.pop(WEIGHTS).tolist()
        if clients != len(recovered.summed):
            raise PeerError(f"the sum is of {clients} updates, expected {len(recovered.summed)}")
        return found, AggregationWeights(clients=clients, total=weight)


class ShareSearch:
    """Secrets of one sum, from shares of which some may be wrong. What a site committed to says which secret is right.

    Two polynomials of degree t - 1 that give one secret agree in t - 2 shares at most. So one that agrees with a of n
    holders' shares is the owner's unless a - t + 2 sites or more lie, and n - a or fewer explain the rest: where the
    first number is the larger one, 2 a > n + t - 2, each share off it is wrong. Else nobody's word counts."""

    def __init__(self) -> None:
        self.wrong: set[tuple[str, str]] = set()
        """Holder and owner of each share that is wrong: one of the two lies; one pair does not show which."""
        self._doubted: set[str] = set()  # holders whose shares are tried last
        self._further = MOST_SUBSETS
        """So many are tried of all secrets together, after the secret is known, to tell whose shares are wrong."""

    def seed_of(self, site: str, secrets: Secrets) -> bytes:
        """PeerError unless shares give back the one that the site committed to."""
        return self._found(site, "seed", secrets, lambda s: hashlib.sha256(s).digest() == secrets.keys.commitment)

    def private_of(self, site: str, secrets: Secrets) -> X25519PrivateKey:
        """Return the same as `seed_of`, of its mask key."""

        def fits(secret: bytes) -> bool:
            return key_of(secret).public_key().public_bytes_raw() == secrets.keys.mask

        return key_of(self._found(site, "key", secrets, fits))

    def _found(self, owner: str, what: str, secrets: Secrets, fits: Callable[[bytes], bool]) -> bytes:
        good = {number: share for number, share in secrets.shares.items() if is_share(share)}
        trusted = tuple(number for number in good if secrets.holders[number] not in self._doubted)
        found: bytes | None = None
        orders = [tuple(good)] if len(trusted) == len(good) else [trusted, tuple(good)]
        bound = len(secrets.holders) + secrets.threshold - 2
        for numbers in chain.from_iterable(_subsets(order, secrets.threshold) for order in orders):
            if found is not None:
                self._further -= 1
                if self._further < 0:
                    break
            chosen = {number: good[number] for number in numbers}
            secret = recover(chosen)
            if not fits(secret):
                continue
            found = secret
            others = {n: share for n, share in secrets.shares.items() if n not in chosen}
            off = {secrets.holders[n] for n, share in others.items() if share_of(n, chosen) != share}
            if 2 * (len(secrets.shares) - len(off)) > bound:
                self.wrong |= {(holder, owner) for holder in off}
                self._doubted |= off
            elif off and 2 * len(good) > bound:
                continue  # another choice may tell more
            break
        if found is None:
            raise PeerError(f"the shares of {owner}'s {what} do not give it back: dealt or sent wrong")
        return found


def _subsets(numbers: Sequence[int], size: int) -> Iterator[tuple[int, ...]]:
    """Yield sets of so many shares: the first ones; then all others, where they are few, or drawn ones."""
    if len(numbers) < size:
        return
    yield tuple(numbers[:size])
    if math.comb(len(numbers), size) <= MOST_SUBSETS:
        yield from islice(combinations(numbers, size), 1, None)
    else:
        draw = random.Random(0)
        yield from (tuple(draw.sample(numbers, size)) for _ in range(MOST_SUBSETS))
