"""One phase of secure aggregation in one process: the machines and secrets of real sites, and no network.

For tests, for the benchmark, and to try what becomes of a phase whose sites are lost at any moment.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import Literal, NamedTuple

import msgspec
from torch import Tensor

from isthmus.errors import InternalError, PeerError
from isthmus.federated.partial import AggregationWeights
from isthmus.federated.secure.masks import WEIGHTS, joined, parted
from isthmus.federated.secure.recovery import MaskedSum
from isthmus.federated.secure.shamir import Draw
from isthmus.federated.secure.site_secrets import SiteSecrets, Unsigned
from isthmus.protocol.federated_messages import PhaseId, PhaseOpened, PhaseSetup
from isthmus.protocol.federated_rules import SecureRules
from isthmus.protocol.secure_coordinator import SecureCoordinator, TakeMasksOff
from isthmus.protocol.secure_messages import KeysSent, SecureOrder, SecureReport, SharesRevealed, SharesSent
from isthmus.protocol.secure_site import (
    DealShares,
    Distrust,
    ForgetSecrets,
    MakeKeys,
    MaskUpdate,
    OpenShares,
    RevealShares,
    SecureSiteEvent,
    SecureSiteMachine,
    SendRefusal,
    UpdateReady,
)

Step = Literal["keys", "shares", "update", "reveal"]
"""What a site does not send any more."""


class SecureResult(NamedTuple):
    """`sums` is None where the masks could not be taken off, for this `reason`."""

    summed: frozenset[str]
    sums: dict[str, Tensor] | None
    weights: AggregationWeights
    reason: str


class _Site:
    def __init__(self, name: str, values: Mapping[str, Tensor], rules: SecureRules) -> None:
        self.name = name
        self.values = values
        self.machine = SecureSiteMachine(name, rules.share)
        self.secrets: SiteSecrets | None = None


class SecurePhase:
    """Sums of int64 vectors by site and name; `WEIGHTS` is one of the names."""

    def __init__(
        self,
        updates: Mapping[str, Mapping[str, Tensor]],
        rules: SecureRules,
        *,
        lost: Mapping[str, Step] = {},
        late: Collection[str] = (),
        draw: Draw = os.urandom,
        machine: SecureCoordinator | None = None,
        round_: int = 0,
        heard: Callable[[str, SecureReport | Mapping[str, Tensor]], None] = lambda site, sent: None,
    ) -> None:
        """`lost` sites are gone before they send that; updates of `late` ones come when the masks are taken off.
        `heard` gets all that comes to the coordinator. `machine` is the coordinator's of rounds before."""
        self._rules, self._lost, self._late, self._draw, self._heard = rules, lost, late, draw, heard
        self._sites = {name: _Site(name, values, rules) for name, values in updates.items()}
        self._machine = SecureCoordinator(rules) if machine is None else machine
        self._machine.port = self
        sizes = {name: len(value) for name, value in next(iter(updates.values())).items() if name != WEIGHTS}
        self._sum = MaskedSum(sizes)
        self._phase = PhaseId(round_)
        self._reports: deque[tuple[str, SecureReport | None]] = deque()
        """What sites sent, in order; None of one that is lost."""
        self._summed: set[str] = set()
        self._result: SecureResult | None = None
        self.bytes_up = self.bytes_down = 0
        """Of all sites, values and frames of the protocol."""

    def run(self) -> SecureResult:
        setup = PhaseSetup(phase=self._phase, clients=len(self._sites), samples=1)
        self._machine.opened(self._phase, frozenset(self._sites))
        for name in self._sites:
            self._tell(name, PhaseOpened(opening=setup, tasks=()))
        self._settle()
        for name in self._sites:
            self._tell(name, UpdateReady(phase=self._phase))
        self._settle()
        if self._result is None:
            self._machine.sums_wanted(self._phase, frozenset(self._summed))
        self._settle()
        if self._result is None:
            raise InternalError("secure aggregation: nobody has anything to do, and the phase is not over")
        return self._result

    def _settle(self) -> None:
        """Until nobody has anything to do: then time passes."""
        for _ in range(3):
            while self._reports:
                site, report = self._reports.popleft()
                if report is None:
                    self._machine.gone(site)
                else:
                    self._machine.heard(site, report)
            if self._result is None and (due_s := self._machine.due_s) is not None:
                self._machine.clock(due_s)

    # What the machine asks

    def tell(self, site: str, order: SecureOrder) -> None:
        self.bytes_down += len(msgspec.msgpack.encode(order))
        self._tell(site, order)

    def leave_out(self, phase: PhaseId, sites: tuple[str, ...], reason: str) -> None:
        """The machine ignores what they send."""

    def take_masks_off(self, recovered: TakeMasksOff) -> None:
        for name in self._late:
            assert not self._machine.takes(name, self._phase), "its update comes too late"
        try:
            sums, weights = self._sum.unmasked(recovered, "run")
        except PeerError as e:
            self._machine.tried(recovered.phase, str(e))
            return
        self._machine.tried(recovered.phase, wrong=self._sum.wrong)
        self._result = SecureResult(frozenset(self._summed), sums, weights, "")

    def sums_lost(self, phase: PhaseId, reason: str) -> None:
        none = AggregationWeights(clients=0, total=0)
        self._result = SecureResult(frozenset(self._summed), None, none, reason)

    # Sites

    def _tell(self, name: str, event: SecureSiteEvent | SecureOrder) -> None:
        site = self._sites[name]
        for instruction in site.machine.handle(event):
            match instruction:
                case MakeKeys(phase=phase):
                    site.secrets = SiteSecrets(name, "run", phase, Unsigned(), self._draw)
                    self._send(site, "keys", KeysSent(phase=phase, keys=site.secrets.public()))
                case DealShares(phase=phase, peers=peers, threshold=threshold):
                    shares = self._secrets(site).deal(peers, threshold)
                    self._send(site, "shares", SharesSent(phase=phase, shares=tuple(shares)))
                case OpenShares(shares=shares):
                    self._secrets(site).open(shares)
                case MaskUpdate(peers=peers):
                    vector = joined(site.values)
                    self._secrets(site).mask(vector, peers)
                    self._send_update(site, parted(vector, {n: len(v) for n, v in site.values.items()}))
                case RevealShares(phase=phase, seeds=seeds, keys=keys):
                    seed_shares, key_shares = self._secrets(site).reveal(seeds, keys)
                    found = SharesRevealed(phase=phase, seeds=tuple(seed_shares), keys=tuple(key_shares))
                    self._send(site, "reveal", found)
                case SendRefusal() | ForgetSecrets():
                    pass
                case Distrust(reason=reason):
                    raise InternalError(f"{name} does not trust its coordinator, which {reason}")

    def _secrets(self, site: _Site) -> SiteSecrets:
        assert site.secrets is not None, "keys come first"
        return site.secrets

    def _send(self, site: _Site, step: Step, report: SecureReport) -> None:
        if self._is_lost(site.name, step):
            return
        self.bytes_up += len(msgspec.msgpack.encode(report))
        self._heard(site.name, report)
        self._reports.append((site.name, report))

    def _send_update(self, site: _Site, values: Mapping[str, Tensor]) -> None:
        if self._is_lost(site.name, "update") or site.name in self._late:
            return
        self._heard(site.name, values)
        self.bytes_up += sum(value.nbytes for value in values.values())
        if self._machine.takes(site.name, self._phase):
            self._sum.check(values)
            self._sum.add(values)
            self._summed.add(site.name)

    def _is_lost(self, name: str, step: Step) -> bool:
        steps: tuple[Step, ...] = ("keys", "shares", "update", "reveal")
        if name not in self._lost or steps.index(step) < steps.index(self._lost[name]):
            return False
        self._reports.append((name, None))
        return True
