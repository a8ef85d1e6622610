"""One phase of secure aggregation in one process: the machines and secrets of real sites, and no network.

For tests, for the benchmark, and to try what becomes of a phase whose sites are lost at any moment.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec
from torch import Tensor

from isthmus.errors import InternalError, PeerError
from isthmus.federated.partial import AggregationWeights
from isthmus.federated.secure.masks import WEIGHTS, joined, parted
from isthmus.federated.secure.recovery import MaskedSum
from isthmus.federated.secure.shamir import Draw
from isthmus.federated.secure.site_secrets import SiteSecrets
from isthmus.programs.masked import Masked, TakeMasksOff, Unmasking
from isthmus.protocol.federated_messages import ClientTime, PhaseId, PhaseOpened, PhaseSetup, SumsSent
from isthmus.protocol.federated_planning import SecureRules
from isthmus.protocol.secure_messages import (
    KeysSent,
    SealedShare,
    SecureOrder,
    SecureReport,
    SharesRevealed,
    SharesSent,
    SiteKeys,
)
from isthmus.protocol.secure_site import SecureSite

Step = Literal["keys", "shares", "update", "reveal"]  # the first message that a site no longer sends
_STEPS: Mapping[type[SecureReport], Step] = {KeysSent: "keys", SharesSent: "shares", SharesRevealed: "reveal"}


class Unsigned:
    """Stands for signatures between sites in one process."""

    def sign(self, text: bytes) -> tuple[bytes, bytes]:
        return b"", b""

    def check(self, certificate: bytes, signature: bytes, text: bytes) -> str:
        return hashlib.sha256(text).hexdigest()


class SecureResult(NamedTuple):
    """`sums` is None where the masks could not be taken off, for this `reason`."""

    summed: frozenset[str]
    sums: dict[str, Tensor] | None
    weights: AggregationWeights
    reason: str


class _Site:
    """The port of a site's policy, with its secrets."""

    def __init__(self, name: str, values: Mapping[str, Tensor], phase: SecurePhase, share: float) -> None:
        self._name = name
        self._values = values
        self._phase = phase
        self.policy = SecureSite(self, name, share)
        self._secrets: SiteSecrets | None = None

    def device_of(self, keys: SiteKeys) -> str:
        return ""

    def make_keys(self, phase: PhaseId) -> SiteKeys:
        self._secrets = SiteSecrets(self._name, "run", phase, Unsigned(), self._phase.draw)
        return self._secrets.public()

    def deal(self, peers: Sequence[SiteKeys], threshold: int) -> list[SealedShare]:
        return self._own.deal(peers, threshold)

    def open_shares(self, phase: PhaseId, shares: Sequence[SealedShare]) -> tuple[str, ...]:
        return self._own.open(shares)

    def reveal(
        self, phase: PhaseId, seeds: Sequence[str], keys: Sequence[str], parties: Sequence[str], of: Sequence[str]
    ) -> SharesRevealed:
        of_seeds, of_keys = self._own.reveal(seeds, keys)
        return SharesRevealed(phase=phase, seeds=tuple(of_seeds), keys=tuple(of_keys))

    def send(self, report: SecureReport) -> None:
        self._phase.report(self._name, report)

    def send_masked(self, sums: SumsSent, peers: Sequence[str]) -> None:
        vector = joined(self._values)
        self._own.mask(vector, peers)
        self._phase.update(self._name, parted(vector, {n: len(v) for n, v in self._values.items()}))

    def send_none(self, sums: SumsSent) -> None:
        """It has no update."""

    def forget_secrets(self) -> None:
        self._secrets = None

    def distrust(self, reason: str) -> None:
        raise InternalError(f"{self._name} does not trust its coordinator, which {reason}")

    @property
    def _own(self) -> SiteSecrets:
        assert self._secrets is not None, "keys come first"
        return self._secrets


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
        machine: Masked | None = None,
        round_: int = 0,
        heard: Callable[[str, SecureReport | Mapping[str, Tensor]], None] = lambda site, sent: None,
    ) -> None:
        """`lost` sites are gone before they send that; updates of `late` ones come when the masks are taken off.
        `heard` gets all that comes to the coordinator. `machine` is the coordinator's of rounds before."""
        self.draw, self._lost, self._late, self._heard = draw, lost, late, heard
        self._sites = {name: _Site(name, values, self, rules.share) for name, values in updates.items()}
        self._machine = Masked(rules) if machine is None else machine
        self._machine.port = self
        sizes = {name: len(value) for name, value in next(iter(updates.values())).items() if name != WEIGHTS}
        self._sum = MaskedSum(sizes)
        self._phase = PhaseId(round_)
        self._reports: deque[tuple[str, SecureReport | None]] = deque()
        """Messages of sites, in order; None where one is lost."""
        self._summed: set[str] = set()
        self._result: SecureResult | None = None
        self.bytes_up = self.bytes_down = 0
        """Bytes of all sites, values and frames of the protocol."""

    def run(self) -> SecureResult:
        setup = PhaseSetup(phase=self._phase, clients=len(self._sites), samples=1)
        trained = SumsSent(phase=self._phase, timed=(ClientTime(0, 1, 0.0),))
        self._machine.opened(self._phase, frozenset(self._sites))
        for name in self._sites:
            self._sites[name].policy.ordered(PhaseOpened(opening=setup, tasks=()))
        self._settle()
        for name in self._sites:
            self._sites[name].policy.trained(trained)
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
                self._machine.looked()

    # What the machine asks

    def tell(self, site: str, order: SecureOrder) -> None:
        self.bytes_down += len(msgspec.msgpack.encode(order))
        self._sites[site].policy.ordered(order)

    def leave_out(self, phase: PhaseId, sites: tuple[str, ...], reason: str) -> None:
        """The machine ignores what they send."""

    def take_masks_off(self, recovered: TakeMasksOff) -> Unmasking:
        for name in self._late:
            assert not self._machine.takes(name, self._phase), "its update comes too late"
        try:
            sums, weights = self._sum.unmasked(recovered, "run")
        except PeerError as e:
            return Unmasking(str(e))
        self._result = SecureResult(frozenset(self._summed), sums, weights, "")
        return Unmasking(wrong=self._sum.wrong)

    def unmasked(self, phase: PhaseId, reason: str) -> None:
        if reason:
            none = AggregationWeights(clients=0, total=0)
            self._result = SecureResult(frozenset(self._summed), None, none, reason)

    # Sites

    def report(self, site: str, report: SecureReport) -> None:
        """A site sends this."""
        if not self._is_lost(site, _STEPS.get(type(report), "shares")):
            self.bytes_up += len(msgspec.msgpack.encode(report))
            self._heard(site, report)
            self._reports.append((site, report))

    def update(self, site: str, values: Mapping[str, Tensor]) -> None:
        """A site sends its masked update."""
        if self._is_lost(site, "update") or site in self._late:
            return
        self._heard(site, values)
        self.bytes_up += sum(value.nbytes for value in values.values())
        if self._machine.takes(site, self._phase):
            self._sum.check(values)
            self._sum.add(values)
            self._summed.add(site)

    def _is_lost(self, name: str, step: Step) -> bool:
        steps: tuple[Step, ...] = ("keys", "shares", "update", "reveal")
        if name not in self._lost or steps.index(step) < steps.index(self._lost[name]):
            return False
        self._reports.append((name, None))
        return True
