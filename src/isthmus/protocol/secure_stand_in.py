"""A site's side of secure aggregation without keys and masks: its machine, for simulations."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from isthmus.protocol.federated_messages import (
    ExecutorOrder,
    PhaseDropped,
    PhaseOpened,
    RefusedUpdate,
    SumsSent,
    UpdateRefused,
)
from isthmus.protocol.federated_rules import SecureRules
from isthmus.protocol.secure_messages import (
    KeysListed,
    KeysSent,
    RevealedShare,
    SealedShare,
    SecureOrder,
    SecureReport,
    SharesDelivered,
    SharesRevealed,
    SharesSent,
    SiteKeys,
    UnmaskAsked,
)
from isthmus.protocol.secure_site import (
    DealShares,
    MakeKeys,
    MaskUpdate,
    RevealShares,
    SecureSiteEvent,
    SecureSiteMachine,
    SendRefusal,
    UpdateReady,
)

NO_SHARE = bytes(32)


class SimulatedSecrets:
    """The messages of one site's machine, with names in place of keys."""

    def __init__(self, site: str, rules: SecureRules, before: SimulatedSecrets | None = None) -> None:
        """`before` are those of the site's connection before this one."""
        self._site = site
        self._machine = SecureSiteMachine(site, rules.share, None if before is None else before._machine.revealed)
        self._client = 0
        self._sums: SumsSent | None = None

    def hear(self, order: ExecutorOrder | SecureOrder) -> Iterator[SecureReport | SumsSent]:
        """Yield the site's answers, at once."""
        if isinstance(order, PhaseOpened) and order.tasks:
            self._client = order.tasks[0].client
        match order:
            case PhaseOpened() | PhaseDropped() | UpdateRefused() | KeysListed() | SharesDelivered() | UnmaskAsked():
                yield from self._answers(order)
            case _:
                pass

    def ready(self, sums: SumsSent) -> Iterator[SecureReport | SumsSent]:
        """The update is trained."""
        self._sums = sums
        yield from self._answers(UpdateReady(phase=sums.phase, refused=not sums.timed))

    def _answers(self, event: SecureSiteEvent) -> Iterator[SecureReport | SumsSent]:
        for instruction in self._machine.handle(event):
            match instruction:
                case MakeKeys(phase=phase):
                    yield KeysSent(phase=phase, keys=self._keys(f"{phase}"))
                case DealShares(phase=phase, peers=peers):
                    yield SharesSent(phase=phase, shares=tuple(SealedShare(peer.site, b"") for peer in peers))
                case MaskUpdate() | SendRefusal(reason=""):
                    assert self._sums is not None, "the update is ready"
                    yield self._sums
                case SendRefusal(phase=phase, reason=reason):
                    yield SumsSent(phase=phase, timed=(), refused=(RefusedUpdate(self._client, reason),))
                case RevealShares(phase=phase, seeds=seeds, keys=keys):
                    of_seeds, of_keys = (tuple(RevealedShare(site, NO_SHARE) for site in of) for of in (seeds, keys))
                    yield SharesRevealed(phase=phase, seeds=of_seeds, keys=of_keys)
                case _:
                    pass

    def _keys(self, phase: str) -> SiteKeys:
        cipher, mask = (hashlib.sha256(f"{self._site} {phase} {kind}".encode()).digest() for kind in ("cipher", "mask"))
        return SiteKeys(self._site, cipher, mask, NO_SHARE)
