"""What the coordinator does with masked updates: adds them up as they come, and takes the masks off the sum."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from torch import Tensor

from isthmus.errors import PeerError
from isthmus.federated.partial import AggregationWeights
from isthmus.federated.secure.masks import WEIGHTS, Vector, add_mask, check_masked, joined, parted
from isthmus.federated.secure.shamir import recover
from isthmus.federated.secure.site_secrets import context, key_of, mask_key, mask_sign
from isthmus.protocol.secure_coordinator import Secrets, TakeMasksOff


class MaskedSum:
    """Of one phase. Only the sum is kept: no update is."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        """`sizes` are the numbers of each value that is summed."""
        self.sizes = {**sizes, WEIGHTS: 2}
        self._total: Vector | None = None

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
        back what the sites committed to."""
        assert self._total is not None, "an update is in"
        total, self._total = self._total, None
        bound_to = context(run, recovered.phase)
        for site, secrets in recovered.summed.items():
            add_mask(total, seed_of(site, secrets), -1)
        for site, secrets in recovered.dropped.items():
            private = private_of(site, secrets)
            for peer in recovered.peers[site]:
                key = mask_key(private, peer.mask, bound_to, (site, peer.site))
                add_mask(total, key, -mask_sign(peer.site, site))
        found = parted(total, self.sizes)
        weight, clients = found.pop(WEIGHTS).tolist()
        if clients != len(recovered.summed):
            raise PeerError(f"the sum is of {clients} updates, expected {len(recovered.summed)}")
        return found, AggregationWeights(clients=clients, total=weight)


def seed_of(site: str, secrets: Secrets) -> bytes:
    """PeerError unless it is the one that the site committed to."""
    seed = recover(secrets.shares)
    if hashlib.sha256(seed).digest() != secrets.keys.commitment:
        raise PeerError(f"the shares of {site}'s seed do not give it back: a site sent a wrong one")
    return seed


def private_of(site: str, secrets: Secrets) -> X25519PrivateKey:
    """As `seed_of`, of its mask key."""
    private = key_of(recover(secrets.shares))
    if private.public_key().public_bytes_raw() != secrets.keys.mask:
        raise PeerError(f"the shares of {site}'s key do not give it back: a site sent a wrong one")
    return private
