"""Passes the state that donors send on to the joining devices that receive it. The coordinator keeps none of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from isthmus.errors import PeerError
from isthmus.runtime.messages.state_transfer import ReceiveStateMessage, StateMessage, StatePart
from isthmus.runtime.transport.lanes import SendLane
from isthmus.training.snapshot import stretch_bytes

if TYPE_CHECKING:
    from isthmus.runtime.coordinator.run import RunController

MOST_STRETCH_BYTES = 1 << 20
MOST_WAITING = 32
"""Bytes for each element of a parameter that may wait to be sent on: two copies of a state with Adam, and some more."""


class Joiners:
    """Joiners and whom they follow. `check` may be called by any thread, all else by one."""

    def __init__(self, run: str, callbacks: RunController, lanes: Mapping[str, SendLane]) -> None:
        """`lanes` to the devices that are here."""
        self._run = run
        self._callbacks = callbacks
        self._lanes = lanes
        self._receivers: dict[str, list[str]] = {}  # joining devices by the device that sends them its state
        self._most_waiting_bytes: dict[str, int] = {}  # bytes that may wait to be sent to each joining device
        self._number = self._step = 0
        """The number of the state transfer, and the step from which on states are given; messages of an earlier
        transfer go no further."""

    def follow(self, device: str, number: int, step: int, donated: Mapping[str, frozenset[str]], epoch: int) -> None:
        """A joining device gets the state after `step` steps of the parts that each device sends."""
        self._number, self._step = number, step
        for donor in donated:
            self._receivers.setdefault(donor, []).append(device)
        shapes = {donor: self._callbacks.shapes(parts) for donor, parts in donated.items()}
        elements = sum(math.prod(shape) for of_donor in shapes.values() for shape in of_donor.values())
        self._most_waiting_bytes[device] = MOST_WAITING * elements
        trained, config = self._callbacks.updates()
        if (lane := self._lanes.get(device)) is not None:
            lane.put(
                ReceiveStateMessage(
                    run=self._run, epoch=epoch, number=number, donated=shapes, trained=trained, config=config
                )
            )
        self._callbacks.note(f"{device} gets its state, from step {step} on, while the others train")

    def forget(self, donor: str) -> None:
        """It sends no more."""
        for joiner in self._receivers.pop(donor, ()):
            self._drop(joiner)

    def clear(self) -> None:
        for joiner in {n for joiners in self._receivers.values() for n in joiners}:
            self._drop(joiner)
        self._receivers.clear()

    def _drop(self, joiner: str) -> None:
        """Drop the state that waits to be sent to a device that does not catch up any more: it need not use the
        device's line."""
        if (lane := self._lanes.get(joiner)) is not None:
            lane.drop_background()

    def check(self, device: str, message: StateMessage | StatePart, epoch: int, done: int) -> None:
        """Before its tensors are received: PeerError unless it is a stretch of bytes, or says what bytes will be, of a
        step that it can have done: at most `done` are leased."""
        if isinstance(message, StatePart):
            size = stretch_bytes(message.tensors)
            fits = size is not None and size <= MOST_STRETCH_BYTES
        else:
            fits = not message.tensors
        if message.of != device or not fits:
            sizes = [h.nbytes for h in message.tensors]
            raise PeerError(f"sent what is not its own, or no stretch of bytes: {message.of!r}, {sizes}")
        if not isinstance(message, StateMessage) or message.epoch != epoch:
            return
        self._callbacks.check_parts(message.headers)
        first, last = (self._step, self._step) if message.kind == "state" else (self._step + 1, done)
        if message.number > self._number or (message.number == self._number and not first <= message.step <= last):
            raise PeerError(
                f"sent {message.kind} of step {message.step} in transfer {message.number}, expected "
                f"{first} to {last} in transfer {self._number}"
            )

    def pass_on(self, device: str, message: StateMessage | StatePart, tensors: Sequence[Tensor]) -> str | None:
        """To those who follow the device. Returns one whose line is slower than the device's, if any: it would fill our
        memory, and is to get no more."""
        if message.number == self._number:
            for joiner in self._receivers.get(device, ()):
                if (lane := self._lanes.get(joiner)) is not None:
                    if lane.background_bytes() > self._most_waiting_bytes[joiner]:
                        return joiner
                    lane.put(message, tensors, background=True)
        return None
