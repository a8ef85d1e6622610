"""A site's side of secure aggregation without keys and masks: its policy, for simulations."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

from isthmus.protocol.federated_messages import PhaseId, SumsSent
from isthmus.protocol.federated_planning import SecureRules
from isthmus.protocol.secure_messages import RevealedShare, SealedShare, SecureReport, SharesRevealed, SiteKeys
from isthmus.protocol.secure_site import SecureSite, SecureSitePort

NO_SHARE = bytes(32)


class SimulatedSecrets(SecureSitePort):
    """With names in place of keys; a simulated coordinator is honest."""

    def __init__(
        self,
        site: str,
        rules: SecureRules,
        tell: Callable[[SecureReport | SumsSent], None],
        before: SimulatedSecrets | None = None,
    ) -> None:
        """`before` are those of the site's connection before this one."""
        self._site, self._tell = site, tell
        self.policy = SecureSite(self, site, rules.share, None if before is None else before.policy.revealed)

    def device_of(self, keys: SiteKeys) -> str:
        return ""

    def make_keys(self, phase: PhaseId) -> SiteKeys:
        about = (f"{self._site} {phase} {kind}" for kind in ("cipher", "mask"))
        cipher, mask = (hashlib.sha256(text.encode()).digest() for text in about)
        return SiteKeys(self._site, cipher, mask, NO_SHARE)

    def deal(self, peers: Sequence[SiteKeys], threshold: int) -> list[SealedShare]:
        return [SealedShare(peer.site, b"") for peer in peers]

    def open_shares(self, phase: PhaseId, shares: Sequence[SealedShare]) -> tuple[str, ...]:
        return ()

    def reveal(
        self, phase: PhaseId, seeds: Sequence[str], keys: Sequence[str], parties: Sequence[str], of: Sequence[str]
    ) -> SharesRevealed:
        of_seeds, of_keys = (tuple(RevealedShare(site, NO_SHARE) for site in sites) for sites in (seeds, keys))
        return SharesRevealed(phase=phase, seeds=of_seeds, keys=of_keys)

    def send(self, report: SecureReport) -> None:
        self._tell(report)

    def send_masked(self, sums: SumsSent, peers: Sequence[str]) -> None:
        self._tell(sums)

    def send_none(self, sums: SumsSent) -> None:
        self._tell(sums)
