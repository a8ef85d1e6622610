"""A site's executor whose updates leave it under masks: the host of `SecureSite`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from isthmus.errors import PeerError, UserError
from isthmus.federated.secure.masks import WEIGHTS, Vector, joined, parted
from isthmus.federated.secure.site_noise import SiteNoise
from isthmus.federated.secure.site_secrets import Signer, SiteSecrets, digest_of
from isthmus.federated.site import Site
from isthmus.protocol.federated_messages import ExecutorOrder, PhaseId, PhaseOpened, SumsSent
from isthmus.protocol.federated_rules import SecureRules
from isthmus.protocol.secure_graph import LEAST_SUMMED
from isthmus.protocol.secure_messages import SealedShare, SecureOrder, SecureReport, SharesRevealed, SiteKeys
from isthmus.protocol.secure_site import SecureSite
from isthmus.runtime.federated.executor import Broadcast
from isthmus.runtime.federated.site_executor import SharesOf, SiteExecutor, SiteLink
from isthmus.runtime.identity import party_of
from isthmus.runtime.messages.federated import FromExecutor, MaskedValues
from isthmus.runtime.transport.message_sender import headers_of
from isthmus.session.program import OutOfPhase


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
