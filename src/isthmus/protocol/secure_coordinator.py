"""The coordinator's side of secure aggregation: who is in which step of a phase, and what is asked of whom.

    idle ──opened──► keys ──all here, or time──► shares ──all here, or time──► training ──sums wanted──► unmasking
      ▲                └──too few──► idle                                          └──dropped──► idle        │
      └────────────────────────────enough shares: masks are taken off; too few: failed───────────────────────┘

Bonawitz et al. 2017, with SecAgg+'s graph (`secure_graph`). Sites train while keys and shares go around. Who is lost
before `training` is not masked with; whose masked update is not in by the end is *dropped*: shares of its mask key
take its masks with the others off. Whose update is in is *summed*, whatever becomes of it: shares of its seed take its
own mask off. An update that comes after that is ignored, and its own mask is still on it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal

import msgspec

from isthmus.protocol.federated_messages import PhaseId
from isthmus.protocol.federated_rules import SecureRules
from isthmus.protocol.machine import FromDevice, Machine, Transitions
from isthmus.protocol.secure_graph import neighbours, threshold_of
from isthmus.protocol.secure_messages import (
    KeysListed,
    KeysSent,
    RevealedShare,
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

# To the machine, besides the sites' reports


class SecureOpened(msgspec.Struct, frozen=True, kw_only=True):
    """These sites were sent the opening of a phase."""

    phase: PhaseId
    sites: frozenset[str]


class SiteGone(msgspec.Struct, frozen=True, kw_only=True):
    site: str


class SumsWanted(msgspec.Struct, frozen=True, kw_only=True):
    """The phase is over: masked updates of these sites are in."""

    phase: PhaseId
    summed: frozenset[str]


class UnmaskTried(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `TakeMasksOff`."""

    phase: PhaseId
    reason: str = ""
    """Why the shares that are here do not give back the secrets; empty: the masks are off."""
    wrong: frozenset[tuple[str, str]] = frozenset()
    """Holder and owner of each share that is wrong."""


class TimePassed(msgspec.Struct, frozen=True, kw_only=True):
    now_s: float


SecureEvent = FromDevice[SecureReport] | SecureOpened | SiteGone | SumsWanted | UnmaskTried | TimePassed


# From the machine


class TellSite(msgspec.Struct, frozen=True):
    site: str
    body: SecureOrder


class LeaveOut(msgspec.Struct, frozen=True):
    """The phase goes on without these sites: nothing that they send counts."""

    phase: PhaseId
    sites: tuple[str, ...]
    reason: str


class Secrets(msgspec.Struct, frozen=True, kw_only=True):
    """Shares that give back one secret, and what it must fit."""

    keys: SiteKeys
    shares: Mapping[int, bytes]
    """Shares by their holder's number, from 1 on; at least `threshold` of them."""
    threshold: int
    """So many give it back."""
    holders: Mapping[int, str]
    """The site of every number, whether it is here or not."""


class TakeMasksOff(msgspec.Struct, frozen=True, kw_only=True):
    """Take off the own masks of summed sites, and the masks that summed sites share with dropped ones."""

    phase: PhaseId
    summed: Mapping[str, Secrets]
    dropped: Mapping[str, Secrets]
    peers: Mapping[str, tuple[SiteKeys, ...]]
    """The summed sites that masked with each dropped site."""


class SumsLost(msgspec.Struct, frozen=True):
    """The masks cannot be taken off."""

    phase: PhaseId
    reason: str


SecureInstruction = TellSite | LeaveOut | TakeMasksOff | SumsLost
SecurePhase = Literal["idle", "keys", "shares", "training", "unmasking", "over"]

_EVER: Mapping[type[msgspec.Struct], str] = {SecureOpened: "keys"}
MOST_DISPUTED = 1
"""A wrong share between two sites may be the fault of either: no site is named for one."""

SECURE_COORDINATOR = Transitions(
    "idle",
    "over",
    {
        "idle": {**_EVER, SiteGone: "idle", TimePassed: "idle", SumsWanted: "idle"},
        "keys": {
            **_EVER,
            KeysSent: "keys shares idle",
            SiteGone: "keys shares idle",
            TimePassed: "keys shares idle",
            SumsWanted: "idle",
        },
        "shares": {
            **_EVER,
            SharesSent: "shares training idle",
            SiteGone: "shares training idle",
            TimePassed: "shares training idle",
            SumsWanted: "idle",
        },
        "training": {
            **_EVER,
            SharesDisputed: "training",
            SiteGone: "training",
            TimePassed: "training",
            SumsWanted: "unmasking idle",
        },
        "unmasking": {
            **_EVER,
            SharesRevealed: "unmasking idle",
            UnmaskTried: "unmasking idle",
            SiteGone: "unmasking idle",
            TimePassed: "unmasking idle",
        },
    },
)
_STEP: Mapping[SecurePhase, type[msgspec.Struct]] = {
    "keys": KeysSent,
    "shares": SharesSent,
    "unmasking": SharesRevealed,
}


class SecureCoordinator(Machine[SecurePhase, SecureEvent, SecureInstruction]):
    """The machine, one phase after another."""

    transitions = SECURE_COORDINATOR

    def __init__(self, rules: SecureRules) -> None:
        super().__init__()
        self._rules = rules
        self._phase_id = PhaseId(-1)
        self._opened: frozenset[str] = frozenset()
        self._waits: set[str] = set()
        """Sites whose answer of this step is not in."""
        self._since_s = self._now_s = 0.0
        self._keys: dict[str, SiteKeys] = {}
        self._peers: dict[str, tuple[str, ...]] = {}
        """Neighbours of every site whose keys are in."""
        self._dealt: dict[str, dict[str, bytes]] = {}
        """The sealed shares of each owner, by holder."""
        self._gone: set[str] = set()
        self._out_of: dict[str, str] = {}
        """Sites that lied, and how: the run goes on without them."""
        self._apart: set[str] = set()
        """Sites of this phase that are no neighbours of all that they would be, after a wrong share."""
        self._disputes: set[tuple[str, str]] = set()
        """Holder and owner of each share that was wrong or could not be opened, in any phase: one of the two lies."""
        self._masking: frozenset[str] = frozenset()
        """Sites that were delivered shares: they mask with their neighbours among them."""
        self._summed: frozenset[str] = frozenset()
        self._seeds: dict[str, dict[int, bytes]] = {}
        self._mask_keys: dict[str, dict[int, bytes]] = {}
        self._failed = False
        """Some shares of this phase are wrong: the next try is the last, of all that come."""

    @property
    def due_s(self) -> float | None:
        """The time, by the clock of `TimePassed`, at which a step ends without the sites that did not answer."""
        return self._since_s + self._rules.wait_s if self._phase in _STEP else None

    def takes(self, site: str, phase: PhaseId) -> bool:
        """Whether a masked update of this site may count."""
        return self._phase == "training" and phase == self._phase_id and site in self._masking

    def _is_stale(self, event: SecureEvent) -> bool:
        if isinstance(event, FromDevice) and isinstance(event.body, SharesDisputed):
            here = self._phase == "training" and event.device in self._masking
            return event.body.phase != self._phase_id or not here
        if isinstance(event, FromDevice):
            wrong_step = type(event.body) is not _STEP.get(self._phase)
            return event.body.phase != self._phase_id or wrong_step or event.device not in self._waits
        if isinstance(event, UnmaskTried):
            return event.phase != self._phase_id or self._phase != "unmasking"
        return isinstance(event, SumsWanted) and event.phase != self._phase_id

    def _take(self, event: SecureEvent) -> list[SecureInstruction]:
        match event:
            case FromDevice(device=site, body=report):
                return self._on_report(site, report)
            case SecureOpened(phase=phase, sites=sites):
                return self._open(phase, sites)
            case SiteGone(site=site):
                return self._lose(site)
            case TimePassed(now_s=now_s):
                self._now_s = now_s
                late = self._phase in _STEP and now_s - self._since_s >= self._rules.wait_s
                return self._end_step("did not answer in time") if late else []
            case SumsWanted(summed=summed):
                return self._unmask(summed)
            case UnmaskTried(reason=reason, wrong=wrong):
                return self._on_tried(reason, wrong)

    def _on_report(self, site: str, report: SecureReport) -> list[SecureInstruction]:
        self._waits.discard(site)
        match report:
            case SharesDisputed(owners=owners):
                return self._on_disputed(site, owners)
            case KeysSent(keys=keys):
                self._keys[site] = msgspec.structs.replace(keys, site=site)
                return self._go_on()
            case SharesSent(shares=shares):
                return self._on_shares(site, shares)
            case SharesRevealed(seeds=seeds, keys=keys):
                return self._on_revealed(site, seeds, keys)

    def _open(self, phase: PhaseId, sites: frozenset[str]) -> list[SecureInstruction]:
        self._phase_id, self._phase, self._out_of = phase, "keys", self._liars()
        self._opened, self._waits, self._since_s = sites, set(sites - self._out_of.keys()), self._now_s
        self._keys, self._peers, self._dealt = {}, {}, {}
        self._seeds, self._mask_keys = {}, {}
        self._gone, self._masking, self._summed, self._failed = set(), frozenset(), frozenset(), False
        return []

    def _lose(self, site: str) -> list[SecureInstruction]:
        self._gone.add(site)
        self._waits.discard(site)
        return self._go_on() if self._phase in _STEP else []

    def _go_on(self) -> list[SecureInstruction]:
        return [] if self._waits else self._end_step("")

    def _end_step(self, reason: str) -> list[SecureInstruction]:
        """End the step with the sites that answered. The others are left out."""
        late, self._waits, self._since_s = tuple(sorted(self._waits)), set(), self._now_s
        match self._phase:
            case "keys":
                lied = [(site, self._out_of[site]) for site in sorted(self._opened & self._out_of.keys())]
                without = [out for site, how in lied for out in self._leave_out([site], how)]
                return [*without, *self._leave_out(late, reason), *self._list_keys()]
            case "shares":
                return [*self._leave_out(late, reason), *self._deliver()]
            case _:
                return self._recover()

    def _leave_out(self, sites: Collection[str], reason: str) -> list[SecureInstruction]:
        what = f"secure aggregation: {reason}"
        return [LeaveOut(self._phase_id, tuple(sorted(sites)), what)] if sites else []

    # Keys and shares

    def _list_keys(self) -> list[SecureInstruction]:
        here = {site: keys for site, keys in self._keys.items() if site not in self._gone}
        if len(here) < self._rules.fewest:
            self._phase = "idle"
            return self._leave_out(here, f"{len(here)} sites sent keys, expected at least {self._rules.fewest}")
        self._peers = self._graph(here)
        self._phase, self._waits = "shares", set(here)
        return [
            TellSite(site, KeysListed(phase=self._phase_id, peers=tuple(here[peer] for peer in peers)))
            for site, peers in self._peers.items()
        ]

    def _on_shares(self, site: str, shares: tuple[SealedShare, ...]) -> list[SecureInstruction]:
        dealt = {share.site: share.sealed for share in shares}
        if len(shares) != len(dealt) or dealt.keys() != set(self._peers[site]):
            self._gone.add(site)
            return [*self._leave_out([site], "dealt shares that are not those of its neighbours"), *self._go_on()]
        self._dealt[site] = dealt
        return self._go_on()

    def _on_disputed(self, site: str, owners: tuple[str, ...]) -> list[SecureInstruction]:
        self._disputes |= {(site, owner) for owner in owners if owner in self._peers[site]}
        self._gone.add(site)
        return []

    def _liars(self) -> dict[str, str]:
        """And how they are known. One word stands against another: who is in a pair with several that are in fewer, and
        with none that is in more. Of one site that lies all pairs are, so it makes no other a liar."""
        found: dict[str, str] = {}
        while True:
            left = [pair for pair in self._disputes if pair[0] != pair[1] and not found.keys() & set(pair)]
            against = {site: {x for pair in left if site in pair for x in pair} - {site} for p in left for site in p}
            named = [
                site
                for site, others in sorted(against.items())
                if all(len(against[other]) <= len(others) for other in others)
                and sum(len(against[other]) < len(others) for other in others) > MOST_DISPUTED
            ]
            if not named:
                return found
            found |= {site: f"shares between it and {len(against[site])} other sites were wrong" for site in named}

    def _graph(self, here: Mapping[str, SiteKeys]) -> dict[str, tuple[str, ...]]:
        """Sites between whom a share was wrong are no neighbours any more, while each keeps as many as a sum needs."""
        peers, self._apart = neighbours({site: keys.mask for site, keys in here.items()}), set()
        for pair in sorted({tuple(sorted(pair)) for pair in self._disputes}):
            one, other = pair
            if other in peers.get(one, ()) and min(len(peers[one]), len(peers[other])) >= self._rules.fewest:
                peers[one] = tuple(peer for peer in peers[one] if peer != other)
                peers[other] = tuple(peer for peer in peers[other] if peer != one)
                self._apart |= {one, other}
        return peers

    def _deliver(self) -> list[SecureInstruction]:
        able = self._able(self._dealt.keys() - self._gone)
        left = self._dealt.keys() - self._gone - able
        if len(able) < self._rules.fewest:
            self._phase = "idle"
            return self._leave_out(able | left, f"{len(able)} sites dealt shares to enough neighbours: too few")
        self._phase, self._masking = "training", frozenset(able)
        return [
            *self._leave_out(left, "too few of its neighbours dealt shares"),
            *(TellSite(site, SharesDelivered(phase=self._phase_id, shares=self._shares_for(site))) for site in able),
        ]

    def _able(self, sites: set[str]) -> set[str]:
        """Those with enough neighbours among them to give back their secrets."""
        while lacking := {site for site in sites if len(self._holders(site) & sites) < self._threshold(site)}:
            sites = sites - lacking
        return sites

    def _holders(self, site: str) -> set[str]:
        return {site, *self._peers[site]}

    def _threshold(self, site: str) -> int:
        return threshold_of(len(self._holders(site)), self._rules.share)

    def _shares_for(self, site: str) -> tuple[SealedShare, ...]:
        owners = (peer for peer in self._peers[site] if peer in self._masking)
        return tuple(SealedShare(owner, self._dealt[owner][site]) for owner in owners)

    # The end of a phase

    def _unmask(self, summed: frozenset[str]) -> list[SecureInstruction]:
        if self._phase != "training" or not summed <= self._masking:
            self._phase = "idle"
            return [SumsLost(self._phase_id, "secure aggregation: no shares were dealt")]
        if not summed:
            return self._fail("secure aggregation: no site's update is in the sum")
        self._summed, self._phase, self._since_s = summed, "unmasking", self._now_s
        here = summed - self._gone
        self._waits = set(here)
        if (lacking := self._lacking(here)) is not None:
            return self._fail(lacking)
        return [TellSite(site, self._question(site)) for site in sorted(here)]

    def _question(self, site: str) -> UnmaskAsked:
        among = self._holders(site) & self._masking
        summed, dropped = tuple(sorted(among & self._summed)), tuple(sorted(among - self._summed))
        return UnmaskAsked(phase=self._phase_id, summed=summed, dropped=dropped)

    def _lacking(self, here: Collection[str]) -> str | None:
        """Return the reason why the secret of a site cannot be restored from the shares of these sites; None if all
        can."""
        for site in sorted(self._wanted):
            held, needed = len(self._holders(site) & set(here)), self._threshold(site)
            if held < needed:
                return f"secure aggregation: {held} sites have shares of {site}'s secret, expected {needed}"
        for site in sorted(self._apart & set(here)):
            if (known := len(self._question(site).summed)) < self._rules.fewest:
                return f"secure aggregation: {site} knows {known} sites of the sum, expected {self._rules.fewest}"
        return None

    @property
    def _wanted(self) -> set[str]:
        """Sites of whom a secret is to be given back: dropped ones only if a summed one masked with them."""
        dropped = {site for site in self._masking - self._summed if self._holders(site) & self._summed}
        return {*self._summed, *dropped}

    def _on_revealed(
        self, site: str, seeds: tuple[RevealedShare, ...], keys: tuple[RevealedShare, ...]
    ) -> list[SecureInstruction]:
        asked = self._question(site)
        if tuple(s.site for s in seeds) != asked.summed or tuple(k.site for k in keys) != asked.dropped:
            self._gone.add(site)  # as one that does not answer
        else:
            for found, shares in ((self._seeds, seeds), (self._mask_keys, keys)):
                for share in shares:
                    found.setdefault(share.site, {})[self._number(site, share.site)] = share.share
        enough = all(len(self._revealed(one)) >= self._threshold(one) for one in self._wanted)
        return self._recover() if enough and not self._failed else self._go_on()

    def _number(self, holder: str, owner: str) -> int:
        """At which the owner's polynomials were evaluated for this holder."""
        return number_of(holder, self._holders(owner))

    def _revealed(self, site: str) -> Mapping[int, bytes]:
        return (self._seeds if site in self._summed else self._mask_keys).get(site, {})

    def _recover(self) -> list[SecureInstruction]:
        short = [one for one in sorted(self._wanted) if len(self._revealed(one)) < self._threshold(one)]
        if short:
            got, needed = len(self._revealed(short[0])), self._threshold(short[0])
            return self._fail(f"secure aggregation: {got} shares of {short[0]}'s secret came, expected {needed}")
        secrets = {one: self._secrets(one) for one in self._wanted}
        dropped = sorted(secrets.keys() - self._summed)
        return [
            TakeMasksOff(
                phase=self._phase_id,
                summed={site: secrets[site] for site in sorted(self._summed)},
                dropped={site: secrets[site] for site in dropped},
                peers={site: self._summed_peers(site) for site in dropped},
            )
        ]

    def _on_tried(self, reason: str, wrong: Collection[tuple[str, str]]) -> list[SecureInstruction]:
        """Until all answers are in, those that are missing may make the honest ones enough."""
        self._disputes |= set(wrong)
        if reason and self._waits:
            self._failed = True
            return []
        if reason:
            return self._fail(reason)
        self._phase, self._waits = "idle", set()
        return []

    def _secrets(self, site: str) -> Secrets:
        holders = {self._number(holder, site): holder for holder in self._holders(site)}
        shares = dict(sorted(self._revealed(site).items()))
        return Secrets(keys=self._keys[site], shares=shares, threshold=self._threshold(site), holders=holders)

    def _summed_peers(self, site: str) -> tuple[SiteKeys, ...]:
        return tuple(self._keys[peer] for peer in self._peers[site] if peer in self._summed)

    def _fail(self, reason: str) -> list[SecureInstruction]:
        self._phase, self._waits = "idle", set()
        return [SumsLost(self._phase_id, reason)]


def number_of(holder: str, holders: Collection[str]) -> int:
    """A holder's number among those of one secret, from 1 on: where its share is evaluated."""
    return 1 + sorted(holders).index(holder)
