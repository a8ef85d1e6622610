"""Masked updates of sites: added up as they come, and never seen."""

from __future__ import annotations

import math

from torch import Tensor

from isthmus.errors import PeerError
from isthmus.federated.secure.recovery import MaskedSum
from isthmus.programs.masked import TakeMasksOff
from isthmus.protocol.federated_messages import PhaseId, SumsSent
from isthmus.runtime.federated.site_update_receiver import SiteUpdateReceiver
from isthmus.runtime.messages.federated import MaskedValues, SentValues


class SecureUpdateReceiver(SiteUpdateReceiver):
    """Receives updates to which no rule can be applied, since they are masked. Sites apply the rules."""

    values = MaskedValues
    _masked: dict[str, dict[str, Tensor]]  # updates that wait for the machine's word
    _sum: MaskedSum
    _summing: PhaseId | None

    def prepare(self) -> None:
        self._masked, self._summing = {}, None
        self._sizes = [{name: math.prod(f.shape) for name, f in forms.items()} for forms in self._server.sums]
        self._most_bytes = max(8 * sum(sizes.values()) for sizes in self._sizes) + 1024

    def _keep(self, executor: str, sums: SumsSent, values: SentValues, tensors: dict[str, Tensor]) -> SumsSent:
        client, samples = self._clients[executor], self._samples[executor]
        if [r.client for r in sums.refused] == [client] and not sums.timed and not tensors:
            self._note(f"site {executor}: has no update of round {sums.phase.round + 1}: {sums.refused[0].reason}")
            return sums
        self._check_of(executor, sums, client, samples)
        if not 0 <= sums.phase.number < len(self._sizes):
            raise PeerError(f"sent an update of pass {sums.phase.number + 1}")
        MaskedSum(self._sizes[sums.phase.number]).check(tensors)
        self._masked[executor] = tensors
        return sums

    def merge(self, executor: str) -> None:
        update, phase = self._masked.pop(executor, None), self._server.phase
        if update is None:
            return  # it has none, and said why
        assert phase is not None, "a phase is open"
        if phase != self._summing:
            self._sum, self._summing = MaskedSum(self._sizes[phase.number]), phase
        self._sum.add(update)

    def unmask(self, recovered: TakeMasksOff) -> frozenset[tuple[str, str]]:
        """Returns holder and owner of each share that is wrong. PeerError where those of the others are not enough."""
        sums, weights = self._sum.unmasked(recovered, self._run)
        largest = self._server.check(sums, range(weights.clients), weights)
        self._server.merge(sums, weights, largest)
        return self._sum.wrong

    def ignore(self, executor: str) -> None:
        self._masked.pop(executor, None)
        self._note(f"site {executor}: its masked update came too late: it is ignored")
