"""The executor of a site: sends what its one client returned, not sums."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from isthmus.errors import PeerError, UserError
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
from isthmus.runtime.federated.executor import Broadcast, Executor
from isthmus.runtime.messages.federated import FromExecutor, SiteValues
from isthmus.runtime.transport.message_sender import MessageSender, headers_of
from isthmus.runtime.transport.reconnection import OpenConnection


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
