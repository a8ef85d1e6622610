"""The bodies of frames of secure aggregation: what sites and their coordinator say besides the frames of a round.

Keys, shares and signatures are bytes to the machines. Only a site's driver knows what is in them.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from isthmus.protocol.federated_messages import PhaseId, RoundBody
from isthmus.wire_types import Name

MOST_SITES = 1 << 16
"""The most sites of a sum, and so neighbours of a site: 32 bytes of each are two MiB, half of a frame's largest
header."""
_Each = TypeVar("_Each")
Sites = Annotated[tuple[_Each, ...], Meta(max_length=MOST_SITES)]
Key = Annotated[bytes, Meta(min_length=32, max_length=32)]
Share = Annotated[bytes, Meta(min_length=32, max_length=32)]


class SiteKeys(msgspec.Struct, frozen=True, array_like=True):
    """A site's public keys of one phase, signed."""

    site: Name
    cipher: Key  # an X25519 key: shares for the site are sealed under the secret that it agrees with a peer
    mask: Key  # an X25519 key: the secret that the site agrees with a peer is the seed of their common mask
    commitment: Key  # sHA-256 of the seed of its own mask
    certificate: Annotated[bytes, Meta(max_length=4096)] = b""
    """The certificate of the key that signed, as the fleet's authority issued it (DER)."""
    signature: Annotated[bytes, Meta(max_length=256)] = b""


class SealedShare(msgspec.Struct, frozen=True, array_like=True):
    """An owner's two shares for one holder, which only the holder can read."""

    site: Name  # the holder, on the way to the coordinator; the owner, on the way from it
    sealed: Annotated[bytes, Meta(max_length=128)]


class RevealedShare(msgspec.Struct, frozen=True, array_like=True):
    """A holder's share of one secret of an owner."""

    site: Name  # the owner
    share: Share


# Coordinator to site


class KeysListed(RoundBody, frozen=True, kw_only=True):
    """The keys of a site's neighbours, its own not among them: it deals them shares."""

    phase: PhaseId
    peers: Sites[SiteKeys]


class SharesDelivered(RoundBody, frozen=True, kw_only=True):
    """Shares that a site's neighbours dealt it. It masks its update with these neighbours."""

    phase: PhaseId
    shares: Sites[SealedShare]


class UnmaskAsked(RoundBody, frozen=True, kw_only=True):
    """The sums are in. Of `summed`, shares of their own masks are wanted; of `dropped`, shares of their keys."""

    phase: PhaseId
    summed: Sites[Name]  # the receiver itself among them
    dropped: Sites[Name]


SecureOrder = KeysListed | SharesDelivered | UnmaskAsked


# Site to coordinator


class KeysSent(RoundBody, frozen=True, kw_only=True):
    """The answer to a phase's opening."""

    phase: PhaseId
    keys: SiteKeys


class SharesSent(RoundBody, frozen=True, kw_only=True):
    """The answer to `KeysListed`: a sealed share for each neighbour."""

    phase: PhaseId
    shares: Sites[SealedShare]


class SharesDisputed(RoundBody, frozen=True, kw_only=True):
    """Shares of these owners cannot be opened: they did not seal them for the sender, or somebody changed them. It has
    no update of the phase: a holder without shares masks with nobody."""

    phase: PhaseId
    owners: Sites[Name]


class SharesRevealed(RoundBody, frozen=True, kw_only=True):
    """The answer to `UnmaskAsked`: of each owner one share, never two."""

    phase: PhaseId
    seeds: Sites[RevealedShare]  # shares of the seeds of summed sites' own masks, the sender's own among them
    keys: Sites[RevealedShare]  # shares of dropped sites' mask keys


SecureReport = KeysSent | SharesSent | SharesDisputed | SharesRevealed
