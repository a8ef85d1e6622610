"""A device's connection to the coordinator of a run, made again when it breaks; and what it tells the coordinator of an
error.

The device works on meanwhile, as far as its leases reach, and keeps what it holds in memory. A coordinator that was
started again asks for that. One that has fenced this device takes it back as a joining device.
"""

from __future__ import annotations

import queue
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
from torch import Tensor

from isthmus.errors import IsthmusError, PeerError, StepError
from isthmus.protocol.recovery import StateHolding
from isthmus.protocol.run_messages import DeviceFailed, GiveState, Halt, OpenItem
from isthmus.protocol.step_failures import MemoryShortage, StepFailure
from isthmus.runtime.device.weight_exchange import OpenedExchange
from isthmus.runtime.identity import Identity
from isthmus.runtime.messages.all_messages import AnyMessage, content
from isthmus.runtime.messages.assignment import Peer, ReceiveStateMessage, ServeStage, ServingOrder
from isthmus.runtime.messages.run import AssignMessage, Heartbeat, JoinRun, ToDevice
from isthmus.runtime.transport.lanes import FLUSH_S, PackedMessage, Packer, SendLane, payload_of
from isthmus.runtime.transport.reconnection import CoordinatorConnection, CoordinatorGone, Outage, Retry, dial_lane
from isthmus.runtime.transport.tcp import Unreached, until_reached
from isthmus.session.program import OutOfPhase
from isthmus.session.session import reason_and_fault
from isthmus.training.faults import is_drivers, is_short_of_memory
from isthmus.training.snapshot import Snapshot
from isthmus.training.stored import Sent

AWAY_TIMEOUTS = 10  # for so many times its timeout a device waits for a coordinator that went away
ORDERS = ToDevice | AssignMessage | ReceiveStateMessage | ServingOrder


class CoordinatorLink:
    """Orders and leases go to the inbox; in the end, of a coordinator that stays away, a CoordinatorGone."""

    def __init__(
        self,
        coordinator: tuple[str, int],
        identity: Identity | None,
        join: JoinRun,
        inbox: queue.SimpleQueue[object],
        holdings: Callable[[], tuple[StateHolding, ...]],
        give: Callable[[GiveState, Sequence[Peer]], None],
        timeout_s: float,
    ) -> None:
        """Dials: PeerError when nobody answers before the timeout. `holdings` and `give` may be called by another
        thread: state is given while the device is busy with its stage."""
        self._join = join
        self._inbox = inbox
        self._holdings = holdings
        self._give = give
        self._away_s = AWAY_TIMEOUTS * timeout_s
        self._newest_epoch = -1
        self._connection = CoordinatorConnection(
            lambda: dial_lane(coordinator, "coordinator", timeout_s, identity),
            self._joining,
            run=join.run,
            timeout_s=timeout_s,
            retry=Retry(away_s=self._away_s),
            on_lost=self._lost,
        )
        until_reached(self._connection.connect, timeout_s, Unreached)
        threading.Thread(target=self._listen, name="receive from coordinator", daemon=True).start()

    def send(self, message: AnyMessage, tensors: Sequence[Sent] = (), of: Snapshot | None = None) -> None:
        """Put a message into the lane; the caller does not wait. A message is lost while the coordinator is away: it
        will ask anew. Tensors `of` a snapshot are sent when that is copied."""
        if (lane := self._lane) is not None:
            lane.put(message, tensors, _when_whole(message, tensors, of))

    def outdated(self, epoch: int) -> bool:
        """Return whether the coordinator has begun another epoch since, or the run is over."""
        return self._newest_epoch > epoch or self._connection.over.is_set()

    def close(self) -> None:
        self._connection.close(FLUSH_S)

    @property
    def _lane(self) -> SendLane | None:
        return connection.sender if (connection := self._connection.current) is not None else None

    def _joining(self) -> JoinRun:
        self._newest_epoch = -1  # a coordinator that was started again does not know of epochs that never began
        return msgspec.structs.replace(self._join, holdings=self._holdings())

    def _lost(self, outage: Outage) -> None:
        if outage.log:
            print(
                f"device {self._join.device}: waiting for the coordinator: no message for {outage.silent_s:.0f} s, the "
                f"limit is {self._away_s:g} s: {outage.error}",
                file=sys.stderr,
                flush=True,
            )

    def _listen(self) -> None:
        try:
            self._connection.serve(lambda connection: connection.receive(self._on_message))
        except CoordinatorGone as e:
            self._inbox.put(e)

    def _on_message(self, message: AnyMessage, tensors: list[Tensor]) -> None:
        body = message.body if isinstance(message, ToDevice) else None
        if isinstance(body, OpenItem):
            amounts = {h.name: t for h, t in zip(message.tensors, tensors, strict=True)}
            self._inbox.put(body if body.exchange is None else OpenedExchange(body, body.exchange, amounts))
        elif isinstance(message, ToDevice) and isinstance(body, GiveState):
            self._give(body, message.peers)
        elif isinstance(message, ORDERS):
            begun = message if isinstance(message, ServeStage) else body
            self._newest_epoch = max(self._newest_epoch, begun.epoch if begun is not None else -1)
            if isinstance(body, Halt):
                self._connection.over.set()
            self._inbox.put(CoordinatorMessage(message, tensors))
        elif not isinstance(message, Heartbeat):
            self._inbox.put(CoordinatorGone(f"coordinator: sent {type(message).__name__}, not for a device"))


def _when_whole(message: AnyMessage, tensors: Sequence[Sent], of: Snapshot | None) -> Packer | None:
    if of is None or of.whole:
        return None

    def packed() -> PackedMessage:
        of.wait()
        return PackedMessage(message, [payload_of(tensor) for tensor in tensors])

    return packed


class CoordinatorMessage(NamedTuple):
    """A message of the coordinator that is not for a stage at work."""

    message: AnyMessage
    tensors: list[Tensor]


def of_order(error: Exception, order: CoordinatorMessage) -> Exception:
    """Do the same as `unfollowable`; the coordinator is named."""
    found = unfollowable(error, order.message)
    return error if found is error else PeerError(f"coordinator: {found}")


def unfollowable(error: Exception, order: msgspec.Struct) -> Exception:
    """Return the error to report for an order: PeerError for an order that nobody can follow; any other error of
    Isthmus, of memory, of files or of a driver as it is."""
    known = isinstance(error, IsthmusError | OSError) and not isinstance(error, OutOfPhase)
    if known or is_short_of_memory(error) or is_drivers(error):
        return error
    traceback.print_exception(error)
    return PeerError(f"sent {type(content(order)).__name__} that cannot be followed: {reason_and_fault(error)[0]}")


def failed(
    epoch: int,
    error: Exception,
    failure: StepFailure | None = None,
    shortage: MemoryShortage | None = None,
) -> DeviceFailed:
    """`failure` and `shortage` of an error that was for want of memory."""
    reason, fault = reason_and_fault(error)
    if isinstance(error, StepError) and failure is None:
        failure = StepFailure(step=error.step, what=error.what, reason=reason)
    return DeviceFailed(
        epoch=epoch,
        reason=failure.reason if shortage is not None and failure is not None else reason,
        fault="device" if shortage is not None else fault,
        failure=failure,
        shortage=shortage,
        starts_again=shortage is None and is_drivers(error),
    )
