"""A site's side of secure aggregation: when it deals shares, masks its update, and which shares it reveals.

    idle ──opened──► keyed ──keys listed──► dealt ──shares delivered──► ready ──update ready──► masked ──asked──► idle
                                              └──update ready first: masked as soon as the shares are there

Bonawitz et al., Practical Secure Aggregation for Privacy-Preserving Machine Learning, 2017. The coordinator is not
believed: a site reveals of each peer one share, of its seed or of its key, and only once; and only if as many sites are
in the sum as it takes to give back a secret. So nobody can take off both masks of one update.

A round may be repeated. Two sums of it with different sites differ by the others' updates. So in each pass of a round a
site reveals shares for one set of sites, whatever the attempt, also after a restart. The numbers are the coordinator's,
so what was revealed is kept under what it reveals of too: the model that was trained from, and the update. Of one
model, and of one update, no two sums of different sites are opened, in whatever rounds and runs.

A sum takes shares of more than half of its sites, so each of the sums that differ takes some that no other takes: no
combination is one update.

The graph of sites that share masks: everybody with everybody, or, from about 100 sites on, each with some (SecAgg+).

Bell, Bonawitz, Gascon, Lepoint and Raykova, Secure Single-Server Aggregation with (Poly)Logarithmic Overhead, 2020:
a random graph in which each site has about log(n) neighbours hides each update as well, as long as few sites of a
neighbourhood collude or drop out.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from isthmus.protocol.federated_messages import (
    ExecutorOrder,
    PhaseDropped,
    PhaseId,
    PhaseOpened,
    RefusedUpdate,
    SumsSent,
    UpdateRefused,
)
from isthmus.protocol.secure_messages import (
    KeysListed,
    KeysSent,
    SealedShare,
    SecureOrder,
    SecureReport,
    SharesDelivered,
    SharesDisputed,
    SharesRevealed,
    SharesSent,
    SiteKeys,
    UnmaskAsked,
)
from isthmus.session.program import OVER, OutOfPhase, Policy
from isthmus.units import exact

COMPLETE_BELOW = 100  # sites: fewer are all neighbours
LEAST_SUMMED = 2  # updates in a sum: of one update the sum is that update
PER_DOUBLING = 10
"""Neighbours for each doubling of the sites: of up to 1,000 sites a fifth may collude, and a fifth drop out. That any
neighbourhood has a majority of either then has a probability below 2^-30."""


def neighbour_count(sites: int) -> int:
    """Return how many neighbours each of so many sites has. It is even where the graph is sparse."""
    if sites < COMPLETE_BELOW:
        return sites - 1
    return min(sites - 1, 2 * math.ceil(PER_DOUBLING * math.log2(sites) / 2))


def neighbours(keys: Mapping[str, bytes]) -> dict[str, tuple[str, ...]]:
    """Return the neighbours of each site, ascending. `keys` are the sites' public keys: they shuffle the ring in which
    each site has its nearest ones for neighbours, so a coordinator that follows the protocol does not choose them."""
    count = neighbour_count(len(keys))
    if count == len(keys) - 1:
        return {site: tuple(sorted(keys.keys() - {site})) for site in keys}
    salt = hashlib.sha256(b"".join(keys[site] for site in sorted(keys))).digest()
    ring = sorted(keys, key=lambda site: hashlib.sha256(salt + site.encode()).digest())
    steps = [step for half in range(1, count // 2 + 1) for step in (half, -half)]
    return {site: tuple(sorted(_at(ring, place, steps))) for place, site in enumerate(ring)}


def _at(ring: Sequence[str], place: int, steps: Sequence[int]) -> list[str]:
    return [ring[(place + step) % len(ring)] for step in steps]


def threshold_of(holders: int, share: float) -> int:
    """Shares that give back a secret that was dealt to so many: more than `share` of them."""
    return min(holders, math.floor(exact(share) * holders) + 1)


Revealed = Mapping[str, frozenset[str]]
"""The sites of the sum for which shares were revealed, by the digest of the value that they reveal. A peer is given by
name and device, `NAME:ID`: a coordinator that has certificates of its own has another device under the same name, and
knows that one's update."""
TOO_MUCH = "with other sites, are revealed: two sums would tell too much"
REMEDY = (
    ". Begin with the sites and devices of that sum, or from another model: by another training.seed; where weights "
    "are given, by others, for example these after some steps of training"
)


class SecureSitePort(Protocol):
    """A site's policy asks this of its host."""

    def device_of(self, keys: SiteKeys) -> str:
        """Return the id in a peer's certificate, which `deal` checks; empty where there are none. PeerError for a
        certificate that cannot be read."""
        ...

    def make_keys(self, phase: PhaseId) -> SiteKeys:
        """Draw keys and a seed; return the public keys."""
        ...

    def deal(self, peers: Sequence[SiteKeys], threshold: int) -> Sequence[SealedShare]:
        """Check these keys; return a share of the seed and of the mask key for each peer. `threshold` of all shares,
        the own ones among them, give back a secret. PeerError for keys that their site did not sign."""
        ...

    def open_shares(self, phase: PhaseId, shares: Sequence[SealedShare]) -> Sequence[str]:
        """Keep what peers dealt; return the peers whose shares cannot be opened."""
        ...

    def reveal(
        self, phase: PhaseId, seeds: Sequence[str], keys: Sequence[str], parties: Sequence[str], of: Sequence[str]
    ) -> SharesRevealed:
        """Return the shares of these sites' seeds, and of those sites' mask keys. Before, remember the sites of the sum
        (`parties`, by name and device) under the phase and under the digests `of` what the shares reveal."""
        ...

    def send(self, report: SecureReport) -> None: ...

    def send_masked(self, sums: SumsSent, peers: Sequence[str]) -> None:
        """Mask the update with these peers, and by the own seed; send it."""

    def send_none(self, sums: SumsSent) -> None:
        """Send this without an update."""

    def forget_secrets(self) -> None:
        """Drop all secrets of the phase, and the update."""

    def distrust(self, reason: str) -> None:
        """Leave the run: the coordinator asked for what it must not have."""


class SecureSite(Policy[SecureSitePort]):
    """One site. It has one update per phase."""

    def __init__(
        self,
        port: SecureSitePort,
        site: str,
        share: float,
        revealed: Revealed | None = None,
        fewest: int = LEAST_SUMMED,
    ) -> None:
        """More than `share` of a secret's shares give it back. `revealed`: of rounds of this run, and of models and
        updates of any, before; None: nothing.
        `fewest`: updates in a sum, where all sites are neighbours."""
        super().__init__("idle")
        self.port = port
        self._site = site
        self._share = share
        self._fewest = fewest
        self._parties: dict[str, str] = {}  # name and device of each peer
        self._revealed = dict(revealed or {})
        self._phase_id: PhaseId | None = None  # the phase that is open; None while it is idle, and when it is over
        self._client = 0
        self._holders: frozenset[str] = frozenset()  # holders of this site's secrets: its neighbours and itself
        self._owners: frozenset[str] = frozenset()  # with whom it masks: neighbours whose shares it holds
        self._sums: SumsSent | None = None  # sent with the update, which is trained
        self._of: tuple[str, ...] = ()

    @property
    def revealed(self) -> Revealed:
        """For the policy of the next connection."""
        return self._revealed

    # What the coordinator orders

    def ordered(self, order: ExecutorOrder | SecureOrder) -> None:
        """OutOfPhase for an order that does not follow those before."""
        match order:
            case _ if self.over:
                pass
            case PhaseOpened(opening=opening, tasks=tasks):
                self._end("keyed", opening.phase)
                self._client = tasks[0].client if tasks else 0
                self._holders = self._owners = frozenset()
                self.port.forget_secrets()
                self.port.send(KeysSent(phase=opening.phase, keys=self.port.make_keys(opening.phase)))
            case _ if self._is_late(order.phase):
                pass
            case PhaseDropped() | UpdateRefused():
                self._end()
                self.port.forget_secrets()
            case KeysListed(phase=phase, peers=peers):
                self._check("KeysListed", "keyed")
                self._deal(phase, peers)
            case SharesDelivered(phase=phase, shares=shares):
                self._check("SharesDelivered", "dealt")
                self._take(phase, shares)
            case UnmaskAsked(phase=phase, summed=summed, dropped=dropped):
                self._check("UnmaskAsked", "masked")
                self._reveal(phase, frozenset(summed), frozenset(dropped))
            case _:
                pass  # the executor's alone

    # What its host says

    def trained(self, sums: SumsSent, of: tuple[str, ...] = ()) -> None:
        """The update of a phase is there to be masked, unless `sums` have no client. `of`: digests of the values that
        shares of its masks reveal: of the model that it was trained from, and of the update itself."""
        if self.over or self._is_late(sums.phase):
            return
        self._check("an update", "keyed", "dealt", "ready")
        if not sums.timed:
            self._send_none(sums)
            return
        self._sums, self._of = sums, of
        if self.phase == "ready":
            self._mask(sums)

    def _is_late(self, phase: PhaseId) -> bool:
        self.stale += phase != self._phase_id
        return phase != self._phase_id

    def _check(self, what: str, *phases: str) -> None:
        if self.phase not in phases:
            raise OutOfPhase(f"{what} came in phase {self.phase!r}")

    def _end(self, phase: str = "idle", opened: PhaseId | None = None) -> None:
        self.phase, self._phase_id = phase, opened
        self._sums, self._of = None, ()

    def _deal(self, phase: PhaseId, peers: Sequence[SiteKeys]) -> None:
        names = {peer.site for peer in peers}
        public = [key for peer in peers for key in (peer.cipher, peer.mask)]
        if len(names) < len(peers) or self._site in names or len(set(public)) < len(public):
            self._distrust("listed one site's keys twice")
            return
        if len(names) + 1 < LEAST_SUMMED:
            self._distrust(f"listed {len(names) + 1} sites, expected at least {LEAST_SUMMED}")
            return
        devices = {peer.site: self.port.device_of(peer) for peer in peers}
        self._holders = frozenset(names | {self._site})
        self._parties = {site: f"{site}:{device}" if device else site for site, device in devices.items()}
        if self._tells_more((round_key(phase),), self._holders):
            self._refuse(phase, f"its shares of a sum of this round, {TOO_MUCH}")
            return
        self.phase = "dealt"
        shares = self.port.deal(peers, threshold_of(len(self._holders), self._share))
        self.port.send(SharesSent(phase=phase, shares=tuple(shares)))

    def _take(self, phase: PhaseId, shares: Sequence[SealedShare]) -> None:
        owners = {share.site for share in shares}
        if len(owners) < len(shares) or not owners <= self._holders - {self._site}:
            self._distrust("delivered shares of sites that are no neighbours")
            return
        if len(owners) + 1 < max(LEAST_SUMMED, threshold_of(len(self._holders), self._share)):
            self._distrust(f"delivered shares of {len(owners)} sites: too few to mask with")
            return
        self._owners, self.phase = frozenset(owners), "ready"
        if disputed := self.port.open_shares(phase, shares):
            self.port.send(SharesDisputed(phase=phase, owners=tuple(disputed)))
            self._refuse(phase, f"the shares that {', '.join(disputed)} dealt cannot be opened")
        elif self._sums is not None:
            self._mask(self._sums)

    def _mask(self, sums: SumsSent) -> None:
        if self._tells_more(self._of, self._owners | {self._site}):
            what = "this update, or of one from the same model"
            self._refuse(sums.phase, f"its shares of a sum of {what}, {TOO_MUCH}{REMEDY}")
            return
        self.phase = "masked"
        self.port.send_masked(sums, tuple(sorted(self._owners)))

    def _reveal(self, phase: PhaseId, summed: frozenset[str], dropped: frozenset[str]) -> None:
        if summed & dropped or summed | dropped != self._owners | {self._site} or self._site not in summed:
            self._distrust("asked for shares of both kinds, or not of every neighbour")
            return
        if len(summed) < max(self._fewest, threshold_of(len(self._holders), self._share)):
            self._distrust(f"asked to unmask a sum of {len(summed)} sites that this one knows: too few")
            return
        of = self._of
        self._end()
        found = SharesRevealed(phase=phase, seeds=(), keys=())
        if not self._tells_more((round_key(phase), *of), summed):
            parties = self._known(summed)
            self._revealed |= dict.fromkeys((round_key(phase), *of), parties)
            found = self.port.reveal(phase, tuple(sorted(summed)), tuple(sorted(dropped)), tuple(sorted(parties)), of)
        self.port.send(found)
        self.port.forget_secrets()

    def _known(self, sites: Collection[str]) -> frozenset[str]:
        return frozenset(self._parties.get(site, site) for site in sites)

    def _tells_more(self, of: Collection[str], sites: Collection[str]) -> bool:
        """Return whether shares for a sum of these sites tell more than those that are revealed."""
        parties = self._known(sites)
        return any(self._revealed.get(key, parties) != parties for key in of)

    def _refuse(self, phase: PhaseId, reason: str) -> None:
        self._send_none(SumsSent(phase=phase, timed=(), refused=(RefusedUpdate(self._client, reason),)))

    def _send_none(self, sums: SumsSent) -> None:
        self._end()
        self.port.send_none(sums)
        self.port.forget_secrets()

    def _distrust(self, reason: str) -> None:
        self._end(OVER)
        self.port.forget_secrets()
        self.port.distrust(reason)


def round_key(phase: PhaseId) -> str:
    """Return the name of a pass of a round, the same for all attempts."""
    return f"round {phase.round} pass {phase.number}"
