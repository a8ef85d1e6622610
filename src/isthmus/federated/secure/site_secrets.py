"""A site's secrets of one phase: its keys, the shares that it deals and holds, and its masks.

Of each pair of neighbours one adds the stream of their common key, the other takes it off; each adds the stream of its
own seed too. Keys are agreed by X25519 and derived by HKDF; all are of one run, phase and pair of sites.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import torch
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from torch import Tensor

from isthmus.errors import PeerError
from isthmus.federated.secure.masks import Vector, add_mask
from isthmus.federated.secure.shamir import SECRET_BYTES, Draw, deal, draw_secret
from isthmus.programs.masked import number_of
from isthmus.protocol.federated_messages import PhaseId
from isthmus.protocol.secure_messages import RevealedShare, SealedShare, SiteKeys

_NONCE = bytes(12)  # each key seals one message


def digest_of_values(values: Mapping[str, Tensor], names: Collection[str] | None = None) -> str:
    """SHA-256 of values, of these names if they are there: their types, shapes and bits."""
    found = hashlib.sha256()
    for name in sorted(values.keys() if names is None else values.keys() & set(names)):
        value = values[name].detach().cpu().contiguous()
        found.update(f"{name}|{value.dtype}|{list(value.shape)}|".encode())
        found.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


class Signer(Protocol):
    """The signer of keys, who checks those of others: a fleet's certificates."""

    def sign(self, text: bytes) -> tuple[bytes, bytes]:
        """(certificate, signature)."""
        ...

    def check(self, certificate: bytes, signature: bytes, text: bytes) -> str:
        """The id of the device that signed. PeerError for what nobody of the fleet did."""
        ...


def context(run: str, phase: PhaseId) -> bytes:
    """Return the text that keys and signatures are bound to."""
    return f"isthmus secure aggregation 1|{run}|{phase.round}|{phase.attempt}|{phase.number}|".encode()


def key_of(secret: bytes) -> X25519PrivateKey:
    return X25519PrivateKey.from_private_bytes(secret)


def agreed(private: X25519PrivateKey, public: bytes) -> bytes:
    """Return the secret on which two sites agree. PeerError for a public key of low order."""
    try:
        return private.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        raise PeerError("a public key with which nothing can be agreed") from None


def _derived(secret: bytes, about: bytes) -> bytes:
    return HKDF(SHA256(), 32, salt=None, info=about).derive(secret)


def mask_key(private: X25519PrivateKey, public: bytes, bound_to: bytes, pair: Collection[str]) -> bytes:
    """Return the key of the mask that two sites share."""
    return _derived(agreed(private, public), bound_to + b"mask|" + "|".join(sorted(pair)).encode())


def mask_sign(site: str, peer: str) -> int:
    """Return the sign of the mask with `peer` in the update of `site`."""
    return 1 if site < peer else -1


def signed_text(keys: SiteKeys, bound_to: bytes) -> bytes:
    return bound_to + b"keys|" + keys.site.encode() + b"|" + keys.cipher + keys.mask + keys.commitment


class SiteSecrets:
    """The secrets of one phase. Each phase has new ones."""

    def __init__(self, site: str, run: str, phase: PhaseId, signer: Signer, draw: Draw = os.urandom) -> None:
        """`draw` is another source in tests alone."""
        self._site, self._draw, self._signer = site, draw, signer
        self._bound_to = context(run, phase)
        self._seed, self._mask_secret = draw_secret(draw), draw_secret(draw)
        self._cipher, self._mask = key_of(draw_secret(draw)), key_of(self._mask_secret)
        self._peers: dict[str, SiteKeys] = {}
        self._agreed: dict[str, bytes] = {}  # the key that seals shares for each peer
        self._own: tuple[bytes, bytes] = (b"", b"")
        self._held: dict[str, bytes] = {}  # each owner's shares of the seed and of the mask key
        self.devices: dict[str, str] = {}  # the id of the device that signed each peer's keys

    def public(self) -> SiteKeys:
        commitment = hashlib.sha256(self._seed).digest()
        cipher, mask = (key.public_key().public_bytes_raw() for key in (self._cipher, self._mask))
        keys = SiteKeys(self._site, cipher, mask, commitment)
        certificate, signature = self._signer.sign(signed_text(keys, self._bound_to))
        return SiteKeys(keys.site, keys.cipher, keys.mask, keys.commitment, certificate, signature)

    def deal(self, peers: Sequence[SiteKeys], threshold: int) -> list[SealedShare]:
        """A sealed share for each peer. PeerError for keys that the peer did not sign."""
        self._peers = {peer.site: peer for peer in peers}
        self.devices = {
            peer.site: self._signer.check(peer.certificate, peer.signature, signed_text(peer, self._bound_to))
            for peer in peers
        }
        if len(set(self.devices.values())) < len(peers):
            raise PeerError("listed one device under two names")
        self._agreed = {peer.site: agreed(self._cipher, peer.cipher) for peer in peers}
        holders = [*self._peers, self._site]
        seeds = deal(self._seed, len(holders), threshold, self._draw)
        keys = deal(self._mask_secret, len(holders), threshold, self._draw)
        numbers = {holder: number_of(holder, holders) - 1 for holder in holders}
        self._own = seeds[numbers[self._site]], keys[numbers[self._site]]
        return [SealedShare(peer, self._seal(peer, seeds[numbers[peer]] + keys[numbers[peer]])) for peer in self._peers]

    def _cipher_with(self, peer: str, owner: str, holder: str) -> ChaCha20Poly1305:
        about = self._bound_to + f"share|{owner}|{holder}".encode()
        return ChaCha20Poly1305(_derived(self._agreed[peer], about))

    def _seal(self, peer: str, shares: bytes) -> bytes:
        return self._cipher_with(peer, self._site, peer).encrypt(_NONCE, shares, None)

    def open(self, shares: Sequence[SealedShare]) -> tuple[str, ...]:
        """Keep what peers dealt. Returns those who did not seal theirs for this site."""
        disputed: list[str] = []
        for share in shares:
            opened = b""
            with contextlib.suppress(InvalidTag):
                opened = self._cipher_with(share.site, share.site, self._site).decrypt(_NONCE, share.sealed, None)
            if len(opened) == 2 * SECRET_BYTES:
                self._held[share.site] = opened
            else:
                disputed.append(share.site)
        return tuple(disputed)

    def mask(self, vector: Vector, peers: Collection[str]) -> None:
        """Cover an update, in place."""
        add_mask(vector, self._seed)
        for peer in peers:
            key = mask_key(self._mask, self._peers[peer].mask, self._bound_to, (self._site, peer))
            add_mask(vector, key, mask_sign(self._site, peer))

    def reveal(self, seeds: Collection[str], keys: Collection[str]) -> tuple[list[RevealedShare], list[RevealedShare]]:
        """Shares of these sites' seeds, this one's own among them, and of those sites' mask keys."""
        held: Mapping[str, tuple[bytes, bytes]] = {
            self._site: self._own,
            **{owner: (both[:SECRET_BYTES], both[SECRET_BYTES:]) for owner, both in self._held.items()},
        }
        of_keys = [RevealedShare(site, held[site][1]) for site in keys]
        return [RevealedShare(site, held[site][0]) for site in seeds], of_keys
