"""A device's connection to the coordinator of a run, made again when it breaks; and what it tells the coordinator of an
error.

The device works on meanwhile, as far as its leases reach, and keeps what it holds in memory. A coordinator that was
started again asks for that. One that has fenced this device takes it back as a joining device.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import msgspec
from torch import Tensor

from isthmus.errors import IsthmusError, PeerError, StepError, UserError
from isthmus.protocol.failures import StepFailure
from isthmus.protocol.memory_shortage import MemoryShortage
from isthmus.protocol.recovery import StateHolding
from isthmus.protocol.run_messages import DeviceFailed, Halt, OpenItem
from isthmus.runtime.device.weight_exchange import OpenedExchange
from isthmus.runtime.identity import Identity, Party
from isthmus.runtime.messages.all_messages import AnyMessage, content
from isthmus.runtime.messages.generation import ServeStage, ServingOrder
from isthmus.runtime.messages.run import AssignMessage, Heartbeat, JoinRun, ToDevice
from isthmus.runtime.messages.state_transfer import ReceiveStateMessage, StateMessage, StatePart
from isthmus.runtime.transport.channel import MAX_ASSIGNMENT_BYTES, SocketChannel, dial
from isthmus.runtime.transport.lanes import PackedMessage, Packer, SendLane
from isthmus.runtime.transport.message_sender import start_heartbeats
from isthmus.runtime.transport.tcp import WAITS_S, Unreached, until_reached
from isthmus.session.program import OutOfPhase
from isthmus.training.faults import is_drivers, is_short_of_memory
from isthmus.training.layout import pack
from isthmus.training.snapshot import Snapshot

TELL_S = 3.0
"""After so long without word from it a device says so, then each time after twice as long."""
AWAY_TIMEOUTS = 10
"""For so many times its timeout a device waits for a coordinator that went away."""
ORDERS = ToDevice | AssignMessage | ReceiveStateMessage | StateMessage | StatePart | ServingOrder


class CoordinatorGone(PeerError):
    """It stays away, or does not speak as one."""


class CoordinatorLink:
    """Orders and leases go to the inbox; in the end, of a coordinator that stays away, a CoordinatorGone."""

    def __init__(
        self,
        coordinator: tuple[str, int],
        identity: Identity | None,
        join: JoinRun,
        inbox: queue.SimpleQueue[object],
        holdings: Callable[[], tuple[StateHolding, ...]],
        timeout_s: float,
    ) -> None:
        """Dials: PeerError when nobody answers before the timeout. `holdings` may be called by another thread."""
        self._coordinator = coordinator
        self._identity = identity
        self._join = join
        self._inbox = inbox
        self._holdings = holdings
        self._timeout_s = timeout_s
        self._over = threading.Event()
        self._newest_epoch = -1
        self._channel, self._lane = until_reached(self._connected, timeout_s, Unreached)
        threading.Thread(target=self._listen, name="receive from coordinator", daemon=True).start()
        start_heartbeats(join.run, timeout_s, self._over, lambda: (self._lane,))

    def send(self, message: AnyMessage, tensors: Sequence[Tensor] = (), of: Snapshot | None = None) -> None:
        """Put a message into the lane; the caller does not wait. A message is lost while the coordinator is away: it
        will ask anew. Tensors `of` a snapshot are sent when that is copied."""
        self._lane.put(message, tensors, _when_whole(message, tensors, of))

    def send_background(self, message: AnyMessage, tensors: Sequence[Tensor] = (), of: Snapshot | None = None) -> None:
        """Put a message that all others are sent before."""
        self._lane.put(message, tensors, _when_whole(message, tensors, of), background=True)

    def background_bytes(self) -> int:
        """Return the bytes of background messages that wait to be sent."""
        return self._lane.background_bytes()

    def forget_meanwhile(self) -> None:
        self._lane.drop_background()

    def outdated(self, epoch: int) -> bool:
        """Whether the coordinator has begun another epoch since, or the run is over."""
        return self._newest_epoch > epoch or self._over.is_set()

    def close(self) -> None:
        self._over.set()
        self._lane.close()
        self._channel.close()

    def _connected(self) -> tuple[SocketChannel, SendLane]:
        channel = dial(
            *self._coordinator,
            "coordinator",
            self._timeout_s,
            identity=self._identity,
            expected=Party("coordinator", ""),
            most_header_bytes=MAX_ASSIGNMENT_BYTES,
        )
        lane = SendLane(channel, timeout_s=self._timeout_s, on_error=lambda _: channel.close())
        lane.put(msgspec.structs.replace(self._join, holdings=self._holdings()))
        return channel, lane

    def _listen(self) -> None:
        """Until the end of the run: on one connection after another."""
        received_s = time.monotonic()
        failed, why, sent_s = 0, PeerError("coordinator: closed the connection"), TELL_S
        while not self._over.is_set():
            try:
                while (received := self._channel.receive(idle_s=self._timeout_s)) is not None:
                    received_s, failed, sent_s = time.monotonic(), 0, TELL_S
                    self._on_message(*received)
            except PeerError as e:
                why = e
            if self._over.is_set():
                return
            away_s, gone_s = AWAY_TIMEOUTS * self._timeout_s, time.monotonic() - received_s
            if gone_s >= sent_s:
                sent_s = 2 * max(gone_s, TELL_S)
                print(
                    f"device {self._join.device}: waiting for the coordinator: no message for {gone_s:.0f} s, the "
                    f"limit is {away_s:g} s: {why}",
                    file=sys.stderr,
                    flush=True,
                )
            if gone_s > away_s:
                self._inbox.put(CoordinatorGone(f"{why}; it did not come back for {away_s:g} s"))
                return
            self._over.wait(WAITS_S[min(failed, len(WAITS_S) - 1)])
            failed += 1
            try:
                lane = self._lane
                self._channel, self._lane = self._connected()
                self._newest_epoch = -1  # a coordinator that was started again does not know of epochs that never began
                lane.close(0.0)
            except PeerError as e:
                why = e

    def _on_message(self, message: AnyMessage, tensors: list[Tensor]) -> None:
        body = message.body if isinstance(message, ToDevice) else None
        if isinstance(body, OpenItem):
            amounts = {h.name: t for h, t in zip(message.tensors, tensors, strict=True)}
            self._inbox.put(body if body.exchange is None else OpenedExchange(body, body.exchange, amounts))
        elif isinstance(message, ORDERS):
            begun = message if isinstance(message, ServeStage) else body
            self._newest_epoch = max(self._newest_epoch, begun.epoch if begun is not None else -1)
            if isinstance(body, Halt):
                self._over.set()
            self._inbox.put(CoordinatorMessage(message, tensors))
        elif not isinstance(message, Heartbeat):
            self._inbox.put(CoordinatorGone(f"coordinator: sent {type(message).__name__}, not for a device"))


def _when_whole(message: AnyMessage, tensors: Sequence[Tensor], of: Snapshot | None) -> Packer | None:
    if of is None or of.whole:
        return None

    def packed() -> PackedMessage:
        of.wait()
        return PackedMessage(message, [pack(tensor) for tensor in tensors])

    return packed


class CoordinatorMessage(NamedTuple):
    """A message of the coordinator that is not for a stage at work."""

    message: AnyMessage
    tensors: list[Tensor]


def of_order(error: Exception, order: CoordinatorMessage) -> Exception:
    """As `unfollowable`; the coordinator is named."""
    found = unfollowable(error, order.message)
    return error if found is error else PeerError(f"coordinator: {found}")


def unfollowable(error: Exception, order: msgspec.Struct) -> Exception:
    """Return the error to report for an order: PeerError for an order that nobody can follow; any other error of
    Isthmus, of memory, of files or of a driver as it is."""
    known = isinstance(error, IsthmusError | OSError) and not isinstance(error, OutOfPhase)
    if known or is_short_of_memory(error) or is_drivers(error):
        return error
    traceback.print_exception(error)
    return PeerError(f"sent {type(content(order)).__name__} that cannot be followed: {_reason(error)}")


def failed(
    epoch: int,
    error: Exception,
    failure: StepFailure | None = None,
    shortage: MemoryShortage | None = None,
) -> DeviceFailed:
    """`failure` and `shortage` of an error that was for want of memory."""
    if isinstance(error, StepError) and failure is None:
        failure = StepFailure(step=error.step, what=error.what, reason=_reason(error))
    return DeviceFailed(
        epoch=epoch,
        reason=failure.reason if shortage is not None and failure is not None else _reason(error),
        fault="device" if shortage is not None else _fault(error),
        failure=failure,
        shortage=shortage,
        starts_again=shortage is None and is_drivers(error),
    )


def _reason(error: Exception) -> str:
    text = in_one_line(error)
    return text if isinstance(error, IsthmusError) else f"{type(error).__name__}: {text}"


def in_one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:500]


def _fault(error: Exception) -> Literal["user", "device", "other"]:
    if isinstance(error, UserError):
        return "user"
    return "other" if isinstance(error, PeerError) else "device"
