"""A site's executor whose updates leave it under masks: the driver of `SecureSiteMachine`."""

from __future__ import annotations

import threading
from collections.abc import Mapping

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
    RefusedUpdate,
    SumsSent,
    UpdateRefused,
)
from isthmus.protocol.federated_rules import SecureRules
from isthmus.protocol.secure_graph import LEAST_SUMMED
from isthmus.protocol.secure_messages import (
    KeysListed,
    KeysSent,
    SecureOrder,
    SecureReport,
    SharesDelivered,
    SharesDisputed,
    SharesRevealed,
    SharesSent,
    SiteKeys,
    UnmaskAsked,
)
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
        self._secure = SecureSiteMachine(link.name, rules.share, link.revealed, fewest, self._device_of)
        self._allowed = link.devices
        self._stepping = threading.Lock()
        self._secrets: SiteSecrets | None = None
        self._sums: SumsSent | None = None
        """Sums of the phase that is trained."""
        self._vector: Vector | None = None
        """The update, before it is masked."""
        self._sizes: dict[str, int] = {}
        self._client = 0
        self._models: dict[PhaseId, str] = {}
        """The digest of the model that each phase was opened with: a client may be trained for one while another is
        opened."""

    def _device_of(self, keys: SiteKeys) -> str:
        try:
            device = party_of(keys.certificate).id
        except ValueError:
            raise PeerError(f"coordinator: keys of {keys.site} have no certificate that can be read") from None
        if (allowed := self._allowed.get(keys.site, device)) != device:
            raise PeerError(f"coordinator: {keys.site} has device {device}, approval.sites allows {allowed}")
        return device

    def _on_order(self, order: ExecutorOrder | SecureOrder, broadcast: Broadcast) -> None:
        super()._on_order(order, broadcast)
        if isinstance(order, PhaseOpened):
            phase = order.opening.phase
            self._models[phase] = f"model {digest_of(broadcast, ('model',))} pass {phase.number}"
            self._client = order.tasks[0].client
        match order:
            case PhaseOpened() | KeysListed() | SharesDelivered() | UnmaskAsked() | PhaseDropped() | UpdateRefused():
                self._step(order)
            case _:
                pass

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
        with self._stepping:
            self._sums = sums
        self._step(UpdateReady(phase=sums.phase, refused=not sums.timed, of=of))

    def _step(self, event: SecureSiteEvent) -> None:
        with self._stepping:
            try:
                instructions = self._secure.handle(event)
            except OutOfPhase as e:
                raise PeerError(f"coordinator: {e}") from None
            for instruction in instructions:
                match instruction:
                    case MakeKeys(phase=phase):
                        self._secrets = SiteSecrets(self._name, self._run, phase, self._signer)
                        self._report(KeysSent(phase=phase, keys=self._secrets.public()))
                    case DealShares(phase=phase, peers=peers, threshold=threshold):
                        shares = self._own_secrets.deal(peers, threshold)
                        self._report(SharesSent(phase=phase, shares=tuple(shares)))
                    case OpenShares(phase=phase, shares=shares):
                        if owners := self._own_secrets.open(shares):
                            self._dispute(phase, owners)
                            return
                    case MaskUpdate(peers=peers):
                        self._send_masked(peers)
                    case SendRefusal(reason=""):
                        self._send_values()
                    case SendRefusal(phase=phase, reason=reason):
                        refused = (RefusedUpdate(self._client, reason),)
                        self._put_sums(SumsSent(phase=phase, timed=(), refused=refused), {})
                    case RevealShares(phase=phase, seeds=seeds, keys=keys, of=digests, parties=parties):
                        of_seeds, of_keys = self._own_secrets.reveal(seeds, keys)
                        if seeds:
                            of = f"the seeds of {', '.join(seeds)}" + (
                                f", the keys of {', '.join(keys)}" if keys else ""
                            )
                            self._left(phase, f"shares of {of}", 0, SharesOf(parties, digests))
                        self._report(SharesRevealed(phase=phase, seeds=tuple(of_seeds), keys=tuple(of_keys)))
                    case ForgetSecrets():
                        self._secrets = self._vector = None
                    case Distrust(reason=reason):
                        raise UserError(f"secure aggregation: the coordinator {reason}: this site leaves the run")

    def _dispute(self, phase: PhaseId, owners: tuple[str, ...]) -> None:
        """The coordinator hears it, and the run goes on: this site has no update of the phase."""
        reason = f"the shares that {', '.join(owners)} dealt cannot be opened"
        self._log(f"round {phase.round + 1}: {reason}: this site's update is left out")
        self._report(SharesDisputed(phase=phase, owners=owners))
        self._put_sums(SumsSent(phase=phase, timed=(), refused=(RefusedUpdate(self._client, reason),)), {})
        self._secure.handle(UpdateRefused(phase=phase, reason=reason))
        self._secrets = self._vector = None

    @property
    def _own_secrets(self) -> SiteSecrets:
        assert self._secrets is not None, "they were made when the phase was opened"
        return self._secrets

    def _report(self, report: SecureReport) -> None:
        self._sender.put(FromExecutor(run=self._run, body=report))

    def _send_masked(self, peers: tuple[str, ...]) -> None:
        assert self._vector is not None, "the update is ready"
        self._own_secrets.mask(self._vector, peers)
        devices = (f"{peer} ({self._own_secrets.devices[peer][:8]})" for peer in peers)
        noise = "" if self._noise is None else ", with noise"
        assert self._sums is not None, "the client was trained"
        self._left(self._sums.phase, f"the update{noise}, masked with {', '.join(devices)}", self._vector.nbytes, None)
        self._send_values(self._vector)

    def _send_values(self, vector: Vector | None = None) -> None:
        assert self._sums is not None, "the client was trained"
        self._put_sums(self._sums, {} if vector is None else parted(vector, self._sizes))
        self._sender.flush()  # the vector's memory goes

    def _put_sums(self, sums: SumsSent, tensors: Mapping[str, Tensor]) -> None:
        message = FromExecutor(run=self._run, body=sums, values=MaskedValues(), tensors=headers_of(tensors))
        self._sender.put(message, list(tensors.values()))
