"""The coordinator's side of secure aggregation: who is in which step of a phase, and what is asked of whom.

    idle ──opened──► keys ──all here, or time──► shares ──all here, or time──► training ──sums wanted──► unmasking
      ▲                └──too few──► idle                                          └──dropped──► idle        │
      └────────────────────────────enough shares: masks are taken off; too few: failed───────────────────────┘

Bonawitz et al. 2017, with SecAgg+'s graph. Sites train while keys and shares go around. Who is lost
before `training` is not masked with; whose masked update is not in by the end is *dropped*: shares of its mask key
take its masks with the others off. Whose update is in is *summed*, whatever becomes of it: shares of its seed take its
own mask off. An update that comes after that is ignored, and its own mask is still on it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from isthmus.programs.merging import Why
from isthmus.programs.open_phase import OpenPhase
from isthmus.programs.rounds import RoundPort, Rounds
from isthmus.protocol.federated_messages import ExecutorJoined, ExecutorReport, PhaseId, RefusedUpdate, SumsSent
from isthmus.protocol.federated_planning import RoundRules, SecureRules
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
from isthmus.protocol.secure_site import neighbours, threshold_of
from isthmus.session.program import OutOfPhase, Policy, report


class Secrets(msgspec.Struct, frozen=True, kw_only=True):
    """Shares that give back one secret, and what it must fit."""

    keys: SiteKeys
    shares: Mapping[int, bytes]  # shares by their holder's number, from 1 on; at least `threshold` of them
    threshold: int  # so many give it back
    holders: Mapping[int, str]  # the site of every number, whether it is here or not


class TakeMasksOff(msgspec.Struct, frozen=True, kw_only=True):
    """Take off the own masks of summed sites, and the masks that summed sites share with dropped ones."""

    phase: PhaseId
    summed: Mapping[str, Secrets]
    dropped: Mapping[str, Secrets]
    peers: Mapping[str, tuple[SiteKeys, ...]]  # the summed sites that masked with each dropped site


class Unmasking(NamedTuple):
    reason: str = ""  # why the shares that are here do not give back the secrets; empty: the masks are off
    wrong: frozenset[tuple[str, str]] = frozenset()
    """Holder and owner of each share that is wrong; the others were enough."""


class SecurePort(Protocol):
    """Secure aggregation asks this of its host. All calls that one event leads to come after the
    last change of state: a host that leaves out a site may answer by `sums_wanted`."""

    def tell(self, site: str, order: SecureOrder) -> None:
        """Send a site what it is to do."""

    def leave_out(self, phase: PhaseId, sites: tuple[str, ...], reason: str) -> None:
        """The phase goes on without these sites: nothing that they send counts."""

    def take_masks_off(self, recovered: TakeMasksOff) -> Unmasking:
        """Take the masks off the sum."""
        ...

    def unmasked(self, phase: PhaseId, reason: str) -> None:
        """The phase is over: the masks are off, or they stay on for this reason."""


MOST_DISPUTED = 1  # a wrong share between two sites may be the fault of either: no site is named for one

_LeftOut = Sequence[tuple[Collection[str], str]]  # sites, and why they are left out
_STEP: Mapping[str, type[SecureReport]] = {"keys": KeysSent, "shares": SharesSent, "unmasking": SharesRevealed}
"""The answer that a step waits for."""


class Masked(Policy[SecurePort]):
    """One phase after another. Its host sets `port`."""

    def __init__(self, rules: SecureRules) -> None:
        super().__init__("idle")
        self._rules = rules
        self._phase_id = PhaseId(-1)
        self._opened: frozenset[str] = frozenset()
        self._waits: set[str] = set()  # sites whose answer of this step is not in
        self._since_s = self._now_s = 0.0
        self._keys: dict[str, SiteKeys] = {}
        self._peers: dict[str, tuple[str, ...]] = {}  # neighbours of every site whose keys are in
        self._dealt: dict[str, dict[str, bytes]] = {}  # the sealed shares of each owner, by holder
        self._gone: set[str] = set()
        self._out_of: dict[str, str] = {}  # sites that lied, and how: the run goes on without them
        self._apart: set[str] = set()
        """Sites of this phase that are no neighbours of all that they would be, after a wrong share."""
        self._disputes: set[tuple[str, str]] = set()
        """Holder and owner of each share that was wrong or could not be opened, in any phase: one of the two lies."""
        self._masking: frozenset[str] = frozenset()
        """Sites that were delivered shares: they mask with their neighbours among them."""
        self._summed: frozenset[str] = frozenset()
        self._seeds: dict[str, dict[int, bytes]] = {}
        self._mask_keys: dict[str, dict[int, bytes]] = {}
        self._failed = False  # some shares of this phase are wrong: the next try is the last, of all that come

    @property
    def due_s(self) -> float | None:
        """The time, by the host's clock, at which a step ends without the sites that did not answer."""
        return self._since_s + self._rules.wait_s if self.phase in _STEP else None

    def takes(self, site: str, phase: PhaseId) -> bool:
        """Return whether a masked update of this site may count."""
        return self.phase == "training" and phase == self._phase_id and site in self._masking

    def is_late(self, device: str, body: SecureReport) -> bool:
        if isinstance(body, SharesDisputed):
            here = self.phase == "training" and device in self._masking
        else:
            here = type(body) is _STEP.get(self.phase) and device in self._waits
        return body.phase != self._phase_id or not here

    # What the host says

    def opened(self, phase: PhaseId, sites: frozenset[str]) -> None:
        """These sites were sent the opening of a phase."""
        self._phase_id, self.phase, self._out_of = phase, "keys", self._liars()
        self._opened, self._waits, self._since_s = sites, set(sites - self._out_of.keys()), self._now_s
        self._keys, self._peers, self._dealt = {}, {}, {}
        self._seeds, self._mask_keys = {}, {}
        self._gone, self._masking, self._summed, self._failed = set(), frozenset(), frozenset(), False

    def gone(self, site: str) -> None:
        """It is lost, or has no update."""
        self._gone.add(site)
        self._waits.discard(site)
        if self.phase in _STEP:
            self._go_on()

    def clock(self, now_s: float) -> None:
        """The time; before what happened then."""
        self._now_s = now_s

    def looked(self) -> None:
        """Time alone may end a step."""
        if self.phase in _STEP and self._now_s - self._since_s >= self._rules.wait_s:
            self._end_step("did not answer in time")

    def sums_wanted(self, phase: PhaseId, summed: frozenset[str]) -> None:
        """The phase is over: masked updates of these sites are in."""
        if phase != self._phase_id:
            self.stale += 1
        elif self.phase == "unmasking":
            raise OutOfPhase("sums were wanted twice")
        else:
            self._unmask(summed)

    # Steps

    def _go_on(self) -> None:
        if not self._waits:
            self._end_step("")

    def _end_step(self, reason: str) -> None:
        """End the step with the sites that answered. The others are left out."""
        late, self._waits, self._since_s = sorted(self._waits), set(), self._now_s
        match self.phase:
            case "keys":
                lied = [([site], self._out_of[site]) for site in sorted(self._opened & self._out_of.keys())]
                self._list_keys([*lied, (late, reason)])
            case "shares":
                self._deliver([(late, reason)])
            case _:
                self._recover()

    def _say(self, left_out: _LeftOut, orders: Mapping[str, SecureOrder] = {}) -> None:
        """Leave sites out, then send the orders."""
        phase = self._phase_id
        for sites, reason in left_out:
            if sites:
                self.port.leave_out(phase, tuple(sorted(sites)), f"secure aggregation: {reason}")
        for site, order in orders.items():
            self.port.tell(site, order)

    # Keys and shares

    @report(KeysSent, "keys")
    def _on_keys(self, site: str, sent: KeysSent) -> None:
        self._waits.discard(site)
        self._keys[site] = msgspec.structs.replace(sent.keys, site=site)
        self._go_on()

    def _list_keys(self, left_out: _LeftOut) -> None:
        here = {site: keys for site, keys in self._keys.items() if site not in self._gone}
        if len(here) < self._rules.fewest:
            self.phase = "idle"
            few = f"{len(here)} sites sent keys, expected at least {self._rules.fewest}"
            self._say([*left_out, (here, few)])
            return
        self._peers = self._graph(here)
        self.phase, self._waits = "shares", set(here)
        orders = {
            site: KeysListed(phase=self._phase_id, peers=tuple(here[peer] for peer in peers))
            for site, peers in self._peers.items()
        }
        self._say(left_out, orders)

    @report(SharesSent, "shares")
    def _on_shares(self, site: str, sent: SharesSent) -> None:
        self._waits.discard(site)
        dealt = {share.site: share.sealed for share in sent.shares}
        left_out: _LeftOut = []
        if len(sent.shares) == len(dealt) and dealt.keys() == set(self._peers[site]):
            self._dealt[site] = dealt
        else:
            self._gone.add(site)
            left_out = [([site], "dealt shares that are not those of its neighbours")]
        if self._waits:
            self._say(left_out)
        else:
            self._since_s = self._now_s
            self._deliver(left_out)

    @report(SharesDisputed, "training")
    def _on_disputed(self, site: str, sent: SharesDisputed) -> None:
        self._waits.discard(site)
        self._disputes |= {(site, owner) for owner in sent.owners if owner in self._peers[site]}
        self._gone.add(site)

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

    def _deliver(self, left_out: _LeftOut) -> None:
        able = self._able(self._dealt.keys() - self._gone)
        left = self._dealt.keys() - self._gone - able
        if len(able) < self._rules.fewest:
            self.phase = "idle"
            few = f"{len(able)} sites dealt shares to enough neighbours: too few"
            self._say([*left_out, (able | left, few)])
            return
        self.phase, self._masking = "training", frozenset(able)
        orders = {site: SharesDelivered(phase=self._phase_id, shares=self._shares_for(site)) for site in able}
        self._say([*left_out, (left, "too few of its neighbours dealt shares")], orders)

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

    def _unmask(self, summed: frozenset[str]) -> None:
        if self.phase != "training" or not summed <= self._masking:
            self.phase = "idle"
            self.port.unmasked(self._phase_id, "secure aggregation: no shares were dealt")
            return
        if not summed:
            self._end("secure aggregation: no site's update is in the sum")
            return
        self._summed, self.phase, self._since_s = summed, "unmasking", self._now_s
        here = summed - self._gone
        self._waits = set(here)
        if (lacking := self._lacking(here)) is not None:
            self._end(lacking)
        else:
            self._say([], {site: self._question(site) for site in sorted(here)})

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

    @report(SharesRevealed, "unmasking")
    def _on_revealed(self, site: str, sent: SharesRevealed) -> None:
        self._waits.discard(site)
        asked = self._question(site)
        if tuple(s.site for s in sent.seeds) != asked.summed or tuple(k.site for k in sent.keys) != asked.dropped:
            self._gone.add(site)  # as one that does not answer
        else:
            for found, shares in ((self._seeds, sent.seeds), (self._mask_keys, sent.keys)):
                for share in shares:
                    found.setdefault(share.site, {})[self._number(site, share.site)] = share.share
        enough = all(len(self._revealed(one)) >= self._threshold(one) for one in self._wanted)
        if enough and not self._failed:
            self._recover()
        else:
            self._go_on()

    def _number(self, holder: str, owner: str) -> int:
        """At which the owner's polynomials were evaluated for this holder."""
        return number_of(holder, self._holders(owner))

    def _revealed(self, site: str) -> Mapping[int, bytes]:
        return (self._seeds if site in self._summed else self._mask_keys).get(site, {})

    def _recover(self) -> None:
        short = [one for one in sorted(self._wanted) if len(self._revealed(one)) < self._threshold(one)]
        if short:
            got, needed = len(self._revealed(short[0])), self._threshold(short[0])
            self._end(f"secure aggregation: {got} shares of {short[0]}'s secret came, expected {needed}")
            return
        secrets = {one: self._secrets(one) for one in self._wanted}
        dropped = sorted(secrets.keys() - self._summed)
        recovered = TakeMasksOff(
            phase=self._phase_id,
            summed={site: secrets[site] for site in sorted(self._summed)},
            dropped={site: secrets[site] for site in dropped},
            peers={site: self._summed_peers(site) for site in dropped},
        )
        reason, wrong = self.port.take_masks_off(recovered)
        self._disputes |= wrong
        if reason and self._waits:
            self._failed = True  # those that are missing may make the honest ones enough
        else:
            self._end(reason)

    def _secrets(self, site: str) -> Secrets:
        holders = {self._number(holder, site): holder for holder in self._holders(site)}
        shares = dict(sorted(self._revealed(site).items()))
        return Secrets(keys=self._keys[site], shares=shares, threshold=self._threshold(site), holders=holders)

    def _summed_peers(self, site: str) -> tuple[SiteKeys, ...]:
        return tuple(self._keys[peer] for peer in self._peers[site] if peer in self._summed)

    def _end(self, reason: str) -> None:
        self.phase, self._waits = "idle", set()
        self.port.unmasked(self._phase_id, reason)


def number_of(holder: str, holders: Collection[str]) -> int:
    """A holder's number among those of one secret, from 1 on: where its share is evaluated."""
    return 1 + sorted(holders).index(holder)


class MaskedRoundPort(RoundPort, Protocol):
    """Rounds whose sums are masked ask this of their host."""

    def tell(self, site: str, order: SecureOrder) -> None:
        """Send a site a step of secure aggregation."""

    def take_masks_off(self, recovered: TakeMasksOff) -> Unmasking:
        """Take the masks off the sum."""
        ...


class MaskedRounds(Rounds):
    """Rounds whose sums are masked: a phase that is over is unmasked before the server's update.

    running ──phase over──► unmasking ──masks are off, or stay on──► running, as in `Rounds`
    """

    port: MaskedRoundPort  # pyright: ignore[reportIncompatibleVariableOverride]  # its hosts do more

    def __init__(self, executors: Iterable[str], rules: RoundRules, *given: Any, **named: Any) -> None:
        """Do the same as `Rounds`."""
        super().__init__(executors, rules, *given, **named)
        self._masks = Masked(rules.secure or SecureRules())
        self._masks.port = self
        self._why: Why = "all"  # why the phase is over whose sum is unmasked
        self._left_out: set[str] = set()  # sites that were left out of the phase that was opened last

    @property
    def due_s(self) -> float | None:
        times_s = (super().due_s, self._masks.due_s)
        return min((time_s for time_s in times_s if time_s is not None), default=None)

    def is_late(self, device: str, body: ExecutorReport) -> bool:
        unmasked = self.phase == "unmasking" and not isinstance(body, ExecutorJoined)
        return unmasked or super().is_late(device, body)  # what is in the sum cannot change any more

    def _lose(self, executor: str, reason: str) -> None:
        super()._lose(executor, reason)
        if not self.over:
            self._masks.gone(executor)

    def _reported(self, executor: str, body: ExecutorReport | SecureReport) -> None:
        if isinstance(body, SecureReport):
            self._masks.heard(executor, body)
        elif isinstance(body, SumsSent):
            self._on_masked(executor, body)
        else:
            super()._reported(executor, body)

    def _on_masked(self, site: str, sums: SumsSent) -> None:
        """An update that is masked with others, or the news that there is none."""
        if sums.phase == self._newest and site in self._left_out:
            self.port.ignore(site, sums.phase)
            return
        is_due = self.rounds_late(site, sums.phase) == 0 and self.phase == "running"
        if sums.timed and is_due and not self._masks.takes(site, sums.phase):
            self.port.ignore(site, sums.phase)
            self.refused(site, "sent an update before it had keys to mask it with")
            return
        super()._reported(site, sums)
        if not (sums.timed or self.over):
            self._masks.gone(site)

    def clock(self, now_s: float) -> None:
        super().clock(now_s)
        self._masks.clock(now_s)

    def _tick(self) -> None:
        self._masks.looked()
        if not self.over:
            super()._tick()

    def _invited(self, opened: OpenPhase) -> None:
        if opened.held:
            self._left_out = set()
            self._masks.opened(opened.phase, frozenset(opened.held))

    def _look(self) -> None:
        if self.phase != "unmasking":
            super()._look()

    def _answered(self, opened: OpenPhase, why: Why) -> None:
        if opened.done < opened.least:
            super()._answered(opened, why)
            return
        self.phase, self._why = "unmasking", why
        self._masks.sums_wanted(opened.phase, frozenset(name for name, timed in opened.timed.items() if timed))

    # What secure aggregation asks

    def tell(self, site: str, order: SecureOrder) -> None:
        self.port.tell(site, order)

    def take_masks_off(self, recovered: TakeMasksOff) -> Unmasking:
        found = self.port.take_masks_off(recovered)
        for holder, owner in sorted(found.wrong):
            what = f"the share that {owner} dealt and {holder} revealed is wrong: one of the two lies"
            self._note(f"round {recovered.phase.round + 1}: {what}")
        return found

    def unmasked(self, phase: PhaseId, reason: str) -> None:
        opened = self._opened
        self.phase = "running"
        if reason:
            self._note(f"round {phase.round + 1}: {reason}")
            opened.void(reason)
        self._close_phase(self._why)

    def leave_out(self, phase: PhaseId, sites: tuple[str, ...], reason: str) -> None:
        """Go on as if each had said that it has no update of the phase."""
        self._left_out |= set(sites)
        for site in sites:
            if self.is_here(site) and self.rounds_late(site, phase) == 0:
                self._note(f"site {site}: left out of round {phase.round + 1}: {reason}")
                refused = (RefusedUpdate(self.clients[site], reason),)
                super()._reported(site, SumsSent(phase=phase, timed=(), refused=refused))
