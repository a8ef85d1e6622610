"""The executor of a site: sends what its one client returned, not sums."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from isthmus.errors import PeerError, UserError
from isthmus.federated.secure.masks import WEIGHTS, Vector, joined, parted
from isthmus.federated.secure.site_noise import SiteNoise
from isthmus.federated.secure.site_secrets import Signer, SiteSecrets, digest_of
from isthmus.federated.site import Site
from isthmus.protocol.federated_messages import (
    ExecutorOrder,
    PhaseDropped,
    PhaseId,
    PhaseOpened,
    SumsSent,
    UpdateRefused,
)
from isthmus.protocol.federated_planning import SecureRules
from isthmus.protocol.secure_messages import SealedShare, SecureOrder, SecureReport, SharesRevealed, SiteKeys
from isthmus.protocol.secure_site import LEAST_SUMMED, Revealed, SecureSite
from isthmus.runtime.federated.executor import Broadcast, Executor
from isthmus.runtime.identity import party_of
from isthmus.runtime.messages.federated import FromExecutor, MaskedValues, SiteValues
from isthmus.runtime.transport.message_sender import MessageSender, headers_of
from isthmus.runtime.transport.reconnection import OpenConnection
from isthmus.session.program import OutOfPhase


class SharesOf(NamedTuple):
    """Shares that are revealed."""

    summed: tuple[str, ...]  # the sites of the sum: this one by its name, the others as `NAME:ID`, with their device
    of: tuple[str, ...]  # digests of what this site's part is of


Left = Callable[[PhaseId, str, int, SharesOf | None], None]


@dataclass(frozen=True, kw_only=True)
class SiteLink:
    """A site's connection to the coordinator of a run, and its owner's rules for it."""

    name: str  # the site's
    connection: OpenConnection[MessageSender]
    log: Callable[[str], None]
    left: Left = lambda phase, what, size_bytes, shares: None
    """Called before anything of the site's data leaves it: in which phase, what, how many bytes, and which shares."""
    reports: bool = False  # whether the site's figures go along: no noise covers its update either
    revealed: Revealed = field(default_factory=dict[str, frozenset[str]])  # before
    devices: Mapping[str, str] = field(default_factory=dict[str, str])
    """The id of the only device that its owner's rules allow to have a site's name, by site."""
    check: Callable[[ExecutorOrder | SecureOrder], None] = lambda order: None
    """PeerError for what is not of the run as its owner's rules or word allowed it."""


class SiteExecutor(Executor):
    """Without masks."""

    def __init__(self, site: Site, link: SiteLink) -> None:
        super().__init__(site, link.connection, clients_per_vmap=1)
        self._own = site
        self._log, self._left, self._check = link.log, link.left, link.check
        self._reports = link.reports
        self._latest: PhaseId | None = None  # the phase that was opened here

    def _on_order(self, order: ExecutorOrder | SecureOrder, broadcast: Broadcast) -> None:
        self._check(order)
        self._check_sequence(order)
        match order:
            case PhaseOpened(opening=opening):
                self._own.check_broadcast(broadcast)
                self._latest = opening.phase
            case UpdateRefused(phase=phase, reason=reason):
                self._log(f"the update of round {phase.round + 1} was refused: {reason}")
            case PhaseDropped(phase=phase, again=again):
                what = "is tried again" if again else "closed before this site's update arrived"
                self._log(f"round {phase.round + 1} {what}: this site's update is ignored")
            case _:
                pass

    def _check_sequence(self, order: ExecutorOrder | SecureOrder) -> None:
        """PeerError for a phase that is opened again, or after a later one, and for what belongs to one that was not
        opened. It may be dropped though: an opening is taken back if it waits to be sent."""
        latest = self._latest
        if isinstance(order, PhaseOpened):
            if latest is not None and order.opening.phase <= latest:
                raise PeerError(f"coordinator: opened {order.opening.phase} again, or after {latest}")
        elif not isinstance(order, PhaseDropped) and (latest is None or order.phase > latest):
            raise PeerError(f"coordinator: sent {type(order).__name__} of {order.phase}, which was not opened")

    def _send_sums(self, sums: SumsSent) -> None:
        update = self._own.update
        if update is None or not sums.timed:
            raise UserError("; ".join(r.reason for r in sums.refused) or "the client returned nothing")
        values = SiteValues(weight=update.weight, figures=dict(self._own.figures) if self._reports else {})
        size_bytes = sum(value.nbytes for value in update.values.values())
        what = [f"the update as it is: {', '.join(update.values)}", *values.figures]
        self._left(sums.phase, ", ".join(what), size_bytes, None)
        message = FromExecutor(run=self._run, body=sums, values=values, tensors=headers_of(update.values))
        self._sender.put(message, list(update.values.values()))
        self._sender.flush()  # the values' memory is used again


class SecureSiteExecutor(SiteExecutor):
    """Keys and shares go around in the thread that receives, while the main thread trains. Each may be the one that
    masks the update: whichever comes last."""

    def __init__(
        self,
        site: Site,
        link: SiteLink,
        rules: SecureRules,
        signer: Signer,
        noise: SiteNoise | None = None,
        fewest: int = LEAST_SUMMED,
    ) -> None:
        """`noise` is added to an update before it is masked. A sum of fewer than `fewest` neighbours is refused."""
        super().__init__(site, link)
        self._name, self._signer, self._noise = link.name, signer, noise
        self._secure = SecureSite(self, link.name, rules.share, link.revealed, fewest)
        self._allowed = link.devices
        self._stepping = threading.Lock()
        self._secrets: SiteSecrets | None = None
        self._vector: Vector | None = None  # the update, before it is masked
        self._sizes: dict[str, int] = {}
        self._models: dict[PhaseId, str] = {}
        """The digest of the model that each phase was opened with: a client may be trained for one while another is
        opened."""

    def _on_order(self, order: ExecutorOrder | SecureOrder, broadcast: Broadcast) -> None:
        super()._on_order(order, broadcast)
        if isinstance(order, PhaseOpened):
            phase = order.opening.phase
            self._models[phase] = f"model {digest_of(broadcast, ('model',))} pass {phase.number}"
        self._step(lambda: self._secure.ordered(order))

    def _step(self, step: Callable[[], None]) -> None:
        with self._stepping:
            try:
                step()
            except OutOfPhase as e:
                raise PeerError(f"coordinator: {e}") from None

    def _send_sums(self, sums: SumsSent) -> None:
        """In the main thread: the update is trained, and is sent when the shares are here."""
        of: tuple[str, ...] = ()
        if sums.timed:
            # As it was trained: clips, scales and noise of the coordinator's choice make no other one of it.
            of = (self._models[sums.phase], f"update {digest_of(self._own.trained)}")
            partial = self.site.partial
            weights, values = partial.weights(), partial.tensors(whole=True)
            if self._noise is not None:
                self._noise.cover(values, min(map(partial.unit, values)))
            values[WEIGHTS] = torch.tensor([weights.total, weights.clients])
            vector = joined(values)
            with self._stepping:
                self._vector, self._sizes = vector, {name: len(value) for name, value in values.items()}
        self.site.clear()
        self._step(lambda: self._secure.trained(sums, of))

    # What the policy of masks asks

    def device_of(self, keys: SiteKeys) -> str:
        try:
            device = party_of(keys.certificate).id
        except ValueError:
            raise PeerError(f"coordinator: keys of {keys.site} have no certificate that can be read") from None
        if (allowed := self._allowed.get(keys.site, device)) != device:
            raise PeerError(f"coordinator: {keys.site} has device {device}, approval.sites allows {allowed}")
        return device

    def make_keys(self, phase: PhaseId) -> SiteKeys:
        self._secrets = SiteSecrets(self._name, self._run, phase, self._signer)
        return self._secrets.public()

    def deal(self, peers: Sequence[SiteKeys], threshold: int) -> list[SealedShare]:
        return self._own_secrets.deal(peers, threshold)

    def open_shares(self, phase: PhaseId, shares: Sequence[SealedShare]) -> tuple[str, ...]:
        if owners := self._own_secrets.open(shares):
            what = f"the shares that {', '.join(owners)} dealt cannot be opened"
            self._log(f"round {phase.round + 1}: {what}: this site's update is left out")
        return owners

    def reveal(
        self, phase: PhaseId, seeds: Sequence[str], keys: Sequence[str], parties: Sequence[str], of: Sequence[str]
    ) -> SharesRevealed:
        of_seeds, of_keys = self._own_secrets.reveal(seeds, keys)
        what = f"the seeds of {', '.join(seeds)}" + (f", the keys of {', '.join(keys)}" if keys else "")
        self._left(phase, f"shares of {what}", 0, SharesOf(tuple(parties), tuple(of)))
        return SharesRevealed(phase=phase, seeds=tuple(of_seeds), keys=tuple(of_keys))

    def send(self, report: SecureReport) -> None:
        self._sender.put(FromExecutor(run=self._run, body=report))

    def send_masked(self, sums: SumsSent, peers: Sequence[str]) -> None:
        assert self._vector is not None, "the update is ready"
        self._own_secrets.mask(self._vector, peers)
        devices = (f"{peer} ({self._own_secrets.devices[peer][:8]})" for peer in peers)
        noise = "" if self._noise is None else ", with noise"
        self._left(sums.phase, f"the update{noise}, masked with {', '.join(devices)}", self._vector.nbytes, None)
        self._put_sums(sums, parted(self._vector, self._sizes))
        self._sender.flush()  # the vector's memory goes

    def send_none(self, sums: SumsSent) -> None:
        self._put_sums(sums, {})

    def forget_secrets(self) -> None:
        self._secrets = self._vector = None

    def distrust(self, reason: str) -> None:
        raise UserError(f"secure aggregation: the coordinator {reason}: this site leaves the run")

    @property
    def _own_secrets(self) -> SiteSecrets:
        assert self._secrets is not None, "they were made when the phase was opened"
        return self._secrets

    def _put_sums(self, sums: SumsSent, tensors: Mapping[str, Tensor]) -> None:
        message = FromExecutor(run=self._run, body=sums, values=MaskedValues(), tensors=headers_of(tensors))
        self._sender.put(message, list(tensors.values()))
