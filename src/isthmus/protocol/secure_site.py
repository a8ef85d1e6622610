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
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Literal

import msgspec

from isthmus.protocol.federated_messages import PhaseDropped, PhaseId, PhaseOpened, UpdateRefused
from isthmus.protocol.machine import Machine, Transitions
from isthmus.protocol.run_messages import Halt
from isthmus.protocol.secure_graph import LEAST_SUMMED, threshold_of
from isthmus.protocol.secure_messages import KeysListed, SealedShare, SharesDelivered, SiteKeys, UnmaskAsked

# From the driver


class UpdateReady(msgspec.Struct, frozen=True, kw_only=True):
    """The update of this phase is trained. It is there to be masked unless it was `refused`."""

    phase: PhaseId
    refused: bool = False
    of: tuple[str, ...] = ()
    """Digests of the values that shares of its masks reveal: of the model that it was trained from, and of the update
    itself."""


SecureSiteEvent = (
    PhaseOpened | KeysListed | SharesDelivered | UnmaskAsked | PhaseDropped | UpdateRefused | UpdateReady | Halt
)


# To the driver


class MakeKeys(msgspec.Struct, frozen=True):
    """Draw keys and a seed, and send the public ones."""

    phase: PhaseId


class DealShares(msgspec.Struct, frozen=True):
    """Check these keys, deal each peer a share of the seed and of the mask key, and send them. `threshold` of all
    shares, the own ones among them, give back a secret."""

    phase: PhaseId
    peers: tuple[SiteKeys, ...]
    threshold: int


class OpenShares(msgspec.Struct, frozen=True):
    """Read what peers dealt."""

    phase: PhaseId
    shares: tuple[SealedShare, ...]


class MaskUpdate(msgspec.Struct, frozen=True):
    """Mask the update with these peers, and by the own seed; send it."""

    phase: PhaseId
    peers: tuple[str, ...]


class SendRefusal(msgspec.Struct, frozen=True):
    """Say that there is no update of this phase."""

    phase: PhaseId
    reason: str = ""
    """Empty: as training said."""


class RevealShares(msgspec.Struct, frozen=True):
    """Send the shares of these sites' seeds, and of those sites' mask keys; of none where another sum of the round had
    them."""

    phase: PhaseId
    seeds: tuple[str, ...]
    keys: tuple[str, ...]
    of: tuple[str, ...] = ()
    """As the update's."""
    parties: tuple[str, ...] = ()
    """The sites of the sum as they are remembered: by name and device."""


class ForgetSecrets(msgspec.Struct, frozen=True):
    """All secrets of the phase."""


class Distrust(msgspec.Struct, frozen=True):
    """The coordinator asked for what it must not have: leave the run."""

    reason: str


SecureSiteInstruction = (
    MakeKeys | DealShares | OpenShares | MaskUpdate | SendRefusal | RevealShares | ForgetSecrets | Distrust
)
Revealed = Mapping[str, frozenset[str]]
"""The sites of the sum for which shares were revealed, by the digest of the value that they reveal. A peer is given by
name and device, `NAME:ID`: a coordinator that has certificates of its own has another device under the same name, and
knows that one's update."""
TOO_MUCH = "with other sites, are revealed: two sums would tell too much"
REMEDY = (
    ". Begin with the sites and devices of that sum, or from another model: by another federated.seed; where weights "
    "are given, by others, for example these after some steps of training"
)
SecureSitePhase = Literal["idle", "keyed", "dealt", "ready", "masked", "stopped"]

_OVER = {PhaseOpened: "keyed", PhaseDropped: "idle", UpdateRefused: "idle", Halt: "stopped"}

SECURE_SITE = Transitions(
    "idle",
    "stopped",
    {
        "idle": {
            **_OVER,
            KeysListed: "idle",
            SharesDelivered: "idle",
            UnmaskAsked: "idle",
            UpdateReady: "idle",
        },
        "keyed": {**_OVER, KeysListed: "dealt idle stopped", UpdateReady: "keyed idle"},
        "dealt": {**_OVER, SharesDelivered: "ready masked idle stopped", UpdateReady: "dealt idle"},
        "ready": {**_OVER, UpdateReady: "masked idle"},
        "masked": {**_OVER, UnmaskAsked: "idle stopped"},
    },
)


class SecureSiteMachine(Machine[SecureSitePhase, SecureSiteEvent, SecureSiteInstruction]):
    """The machine. One update per phase."""

    transitions = SECURE_SITE

    def __init__(
        self,
        site: str,
        share: float,
        revealed: Revealed | None = None,
        fewest: int = LEAST_SUMMED,
        device_of: Callable[[SiteKeys], str] = lambda keys: "",
    ) -> None:
        """More than `share` of a secret's shares give it back. `revealed`: of rounds of this run, and of models and
        updates of any, before; None: nothing.
        `fewest`: updates in a sum, where all sites are neighbours. `device_of`: the id in a peer's certificate, which
        the driver checks before it deals shares; PeerError for none."""
        super().__init__()
        self._site = site
        self._share = share
        self._fewest = fewest
        self._device_of = device_of
        self._parties: dict[str, str] = {}
        """Name and device of each peer."""
        self._revealed = dict(revealed or {})
        self._phase_id: PhaseId | None = None
        self._holders: frozenset[str] = frozenset()
        """Holders of this site's secrets: its neighbours and itself."""
        self._owners: frozenset[str] = frozenset()
        """With whom it masks: neighbours whose shares it holds."""
        self._update: UpdateReady | None = None

    @property
    def revealed(self) -> Revealed:
        """For the machine of the next connection."""
        return self._revealed

    def _is_stale(self, event: SecureSiteEvent) -> bool:
        return not isinstance(event, Halt | PhaseOpened) and event.phase != self._phase_id

    def _take(self, event: SecureSiteEvent) -> list[SecureSiteInstruction]:
        match event:
            case PhaseOpened(opening=opening):
                self._phase_id, self._phase = opening.phase, "keyed"
                self._holders = self._owners = frozenset()
                self._update = None
                return [ForgetSecrets(), MakeKeys(opening.phase)]
            case KeysListed(phase=phase, peers=peers):
                return self._on_keys(phase, peers)
            case SharesDelivered(phase=phase, shares=shares):
                return self._on_shares(phase, shares)
            case UpdateReady():
                return self._on_update(event)
            case UnmaskAsked(phase=phase, summed=summed, dropped=dropped):
                return self._on_asked(phase, summed, dropped)
            case PhaseDropped() | UpdateRefused():
                return self._forget("idle")
            case Halt():
                return self._forget("stopped")

    def _forget(self, phase: Literal["idle", "stopped"]) -> list[SecureSiteInstruction]:
        self._phase_id, self._phase, self._update = None, phase, None
        return [ForgetSecrets()]

    def _on_keys(self, phase: PhaseId, peers: tuple[SiteKeys, ...]) -> list[SecureSiteInstruction]:
        if self._phase == "idle":
            return []
        names = {peer.site for peer in peers}
        public = [key for peer in peers for key in (peer.cipher, peer.mask)]
        if len(names) < len(peers) or self._site in names or len(set(public)) < len(public):
            return self._distrust("listed one site's keys twice")
        if len(names) + 1 < LEAST_SUMMED:
            return self._distrust(f"listed {len(names) + 1} sites, expected at least {LEAST_SUMMED}")
        self._holders = frozenset(names | {self._site})
        self._parties = {p.site: f"{p.site}:{device}" if (device := self._device_of(p)) else p.site for p in peers}
        if self._tells_more((round_key(phase),), self._holders):
            return self._refuse(phase, "this round")
        self._phase = "dealt"
        return [DealShares(phase, peers, threshold_of(len(self._holders), self._share))]

    def _on_shares(self, phase: PhaseId, shares: tuple[SealedShare, ...]) -> list[SecureSiteInstruction]:
        if self._phase == "idle":
            return []
        owners = {share.site for share in shares}
        if len(owners) < len(shares) or not owners <= self._holders - {self._site}:
            return self._distrust("delivered shares of sites that are no neighbours")
        if len(owners) + 1 < max(LEAST_SUMMED, threshold_of(len(self._holders), self._share)):
            return self._distrust(f"delivered shares of {len(owners)} sites: too few to mask with")
        self._owners, self._phase = frozenset(owners), "ready"
        return [OpenShares(phase, shares), *(self._on_update(self._update) if self._update is not None else [])]

    def _on_update(self, event: UpdateReady) -> list[SecureSiteInstruction]:
        if self._phase == "idle":
            return []
        if event.refused:
            return [SendRefusal(event.phase), *self._forget("idle")]
        if self._phase != "ready":
            self._update = event
            return []
        if self._tells_more(event.of, self._owners | {self._site}):
            return self._refuse(event.phase, "this update, or of one from the same model", REMEDY)
        self._phase, self._update = "masked", event
        return [MaskUpdate(event.phase, tuple(sorted(self._owners)))]

    def _on_asked(
        self, phase: PhaseId, summed: Collection[str], dropped: Collection[str]
    ) -> list[SecureSiteInstruction]:
        if self._phase == "idle":
            return []
        wanted, gone = frozenset(summed), frozenset(dropped)
        if wanted & gone or wanted | gone != self._owners | {self._site} or self._site not in wanted:
            return self._distrust("asked for shares of both kinds, or not of every neighbour")
        if len(wanted) < max(self._fewest, threshold_of(len(self._holders), self._share)):
            return self._distrust(f"asked to unmask a sum of {len(wanted)} sites that this one knows: too few")
        assert self._update is not None, "it is masked"
        of = self._update.of
        if self._tells_more((round_key(phase), *of), wanted):
            return [RevealShares(phase, (), ()), *self._forget("idle")]
        parties = self._known(wanted)
        self._revealed |= dict.fromkeys((round_key(phase), *of), parties)
        shares = RevealShares(phase, tuple(sorted(wanted)), tuple(sorted(gone)), of, tuple(sorted(parties)))
        return [shares, *self._forget("idle")]

    def _known(self, sites: Collection[str]) -> frozenset[str]:
        return frozenset(self._parties.get(site, site) for site in sites)

    def _tells_more(self, of: Collection[str], sites: Collection[str]) -> bool:
        """Whether shares for a sum of these sites tell more than those that are revealed."""
        parties = self._known(sites)
        return any(self._revealed.get(key, parties) != parties for key in of)

    def _refuse(self, phase: PhaseId, of: str, remedy: str = "") -> list[SecureSiteInstruction]:
        return [SendRefusal(phase, f"its shares of a sum of {of}, {TOO_MUCH}{remedy}"), *self._forget("idle")]

    def _distrust(self, reason: str) -> list[SecureSiteInstruction]:
        return [*self._forget("stopped"), Distrust(reason)]


def round_key(phase: PhaseId) -> str:
    """Return the name of a pass of a round, the same for all attempts."""
    return f"round {phase.round} pass {phase.number}"
