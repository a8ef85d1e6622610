"""The bodies of frames of secure aggregation: what sites and their coordinator say besides the frames of a round.

Keys, shares and signatures are bytes to the machines. Only a site's driver knows what is in them.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from isthmus.protocol.federated_messages import PhaseId, RoundBody

Name = Annotated[str, Meta(max_length=200)]
Key = Annotated[bytes, Meta(min_length=32, max_length=32)]
Share = Annotated[bytes, Meta(min_length=32, max_length=32)]


class SiteKeys(msgspec.Struct, frozen=True, array_like=True):
    """A site's public keys of one phase, signed."""

    site: Name
    cipher: Key
    """Of X25519: under what it agrees with a peer, shares for it are sealed."""
    mask: Key
    """Of X25519: what it agrees with a peer is the seed of their common mask."""
    commitment: Key
    """SHA-256 of the seed of its own mask."""
    certificate: Annotated[bytes, Meta(max_length=4096)] = b""
    """Of the key that signed, as the fleet's authority issued it (DER)."""
    signature: Annotated[bytes, Meta(max_length=256)] = b""


class SealedShare(msgspec.Struct, frozen=True, array_like=True):
    """An owner's two shares for one holder, which only the holder can read."""

    site: Name
    """The holder, on the way to the coordinator; the owner, on the way from it."""
    sealed: Annotated[bytes, Meta(max_length=128)]


class RevealedShare(msgspec.Struct, frozen=True, array_like=True):
    """A holder's share of one secret of an owner."""

    site: Name
    """The owner."""
    share: Share


# Coordinator to site


class KeysListed(RoundBody, frozen=True, kw_only=True):
    """The keys of a site's neighbours, its own not among them: it deals them shares."""

    phase: PhaseId
    peers: tuple[SiteKeys, ...]


class SharesDelivered(RoundBody, frozen=True, kw_only=True):
    """What a site's neighbours dealt it. It masks its update with these neighbours."""

    phase: PhaseId
    shares: tuple[SealedShare, ...]


class UnmaskAsked(RoundBody, frozen=True, kw_only=True):
    """The sums are in. Of `summed`, shares of their own masks are wanted; of `dropped`, shares of their keys."""

    phase: PhaseId
    summed: tuple[Name, ...]
    """The receiver itself among them."""
    dropped: tuple[Name, ...]


SecureOrder = KeysListed | SharesDelivered | UnmaskAsked


# Site to coordinator


class KeysSent(RoundBody, frozen=True, kw_only=True):
    """The answer to a phase's opening."""

    phase: PhaseId
    keys: SiteKeys


class SharesSent(RoundBody, frozen=True, kw_only=True):
    """The answer to `KeysListed`: a sealed share for each neighbour."""

    phase: PhaseId
    shares: tuple[SealedShare, ...]


class SharesRevealed(RoundBody, frozen=True, kw_only=True):
    """The answer to `UnmaskAsked`: of each owner one share, never two."""

    phase: PhaseId
    seeds: tuple[RevealedShare, ...]
    """Of the seeds of summed sites' own masks, the sender's own among them."""
    keys: tuple[RevealedShare, ...]
    """Of dropped sites' mask keys."""


SecureReport = KeysSent | SharesSent | SharesRevealed
