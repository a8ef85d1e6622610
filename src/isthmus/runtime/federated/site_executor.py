"""The executor of a site: sends what its one client returned, not sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from isthmus.errors import UserError
from isthmus.federated.site import Site
from isthmus.protocol.federated_messages import (
    ExecutorOrder,
    PhaseDropped,
    PhaseId,
    PhaseOpened,
    SumsSent,
    UpdateRefused,
)
from isthmus.protocol.secure_messages import SecureOrder
from isthmus.protocol.secure_site import Revealed
from isthmus.runtime.federated.executor import Executor
from isthmus.runtime.messages.federated import FromExecutor, SiteValues
from isthmus.runtime.transport.channel import SocketChannel
from isthmus.runtime.transport.message_sender import MessageSender, headers_of


@dataclass(frozen=True, kw_only=True)
class SiteLink:
    """A site's connection to the coordinator of a run."""

    name: str
    """The site's."""
    run: str
    channel: SocketChannel
    sender: MessageSender
    timeout_s: float
    log: Callable[[str], None]
    left: Callable[[PhaseId, str, int, Sequence[str]], None] = lambda phase, what, size_bytes, summed: None
    """Called before anything of the site's data leaves it: in which phase, what, how many bytes, and of shares that are
    revealed, the sites of the sum."""
    revealed: Revealed = field(default_factory=dict[tuple[int, int], frozenset[str]])
    """Of the run, before."""
    rounds: int | None = None
    """Of the whole run, as its owner's rules or word allowed it; None: any number."""


class SiteExecutor(Executor):
    """Without masks."""

    def __init__(self, site: Site, link: SiteLink) -> None:
        super().__init__(site, link.channel, link.sender, link.run, link.timeout_s, clients_per_vmap=1)
        self._own = site
        self._log, self._left, self._rounds = link.log, link.left, link.rounds

    def _on_order(self, order: ExecutorOrder | SecureOrder) -> None:
        match order:
            case PhaseOpened(opening=opening) if self._rounds is not None and opening.phase.round >= self._rounds:
                what = f"round {opening.phase.round + 1} of a run of {self._rounds}"
                raise UserError(f"rounds: the coordinator opened {what}: this site leaves the run")
            case UpdateRefused(phase=phase, reason=reason):
                self._log(f"the update of round {phase.round + 1} was refused: {reason}")
            case PhaseDropped(phase=phase, again=again):
                what = "is tried again" if again else "closed before this site's update arrived"
                self._log(f"round {phase.round + 1} {what}: this site's update is ignored")
            case _:
                pass

    def _send_sums(self, sums: SumsSent) -> None:
        update = self._own.update
        if update is None or not sums.timed:
            raise UserError("; ".join(r.reason for r in sums.refused) or "the client returned nothing")
        values = SiteValues(weight=update.weight)
        size_bytes = sum(value.nbytes for value in update.values.values())
        self._left(sums.phase, f"the update as it is: {', '.join(update.values)}", size_bytes, ())
        message = FromExecutor(run=self._run, body=sums, values=values, tensors=headers_of(update.values))
        self._sender.put(message, list(update.values.values()))
        self._sender.flush()  # the values' memory is used again
