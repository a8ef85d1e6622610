"""What devices lend for newcomers, passed on to those who follow them. The coordinator keeps none of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from isthmus.errors import PeerError
from isthmus.protocol.coordinator_events import Follow, FollowingEnded
from isthmus.runtime.conducting.script import Script
from isthmus.runtime.messages.following import FollowMessage, LentMessage, LentPart
from isthmus.runtime.transport.lanes import SendLane

MOST_STRETCH_BYTES = 1 << 20
MOST_WAITING = 32
"""Bytes for each element of a parameter that may wait to be sent on: two copies of a state with Adam, and some more."""


class Newcomers:
    """Who follows whom. `check` may be called by any thread, all else by one."""

    def __init__(self, run: str, script: Script, lanes: Mapping[str, SendLane]) -> None:
        """`lanes` to the devices that are here."""
        self._run = run
        self._script = script
        self._lanes = lanes
        self._followers: dict[str, list[str]] = {}
        """By device that lends its state."""
        self._most_waiting_bytes: dict[str, int] = {}
        """By newcomer."""
        self._number = 0
        """Of the following; what is still under way of an earlier one goes no further."""

    def follow(self, wanted: Follow, epoch: int) -> None:
        self._number = wanted.number
        for lender in wanted.lent:
            self._followers.setdefault(lender, []).append(wanted.device)
        lent = {lender: self._script.shapes(parts) for lender, parts in wanted.lent.items()}
        elements = sum(math.prod(shape) for shapes in lent.values() for shape in shapes.values())
        self._most_waiting_bytes[wanted.device] = MOST_WAITING * elements
        trained, config = self._script.updates()
        if (lane := self._lanes.get(wanted.device)) is not None:
            lane.put(FollowMessage(
                run=self._run, epoch=epoch, number=wanted.number, lent=lent, trained=trained, config=config
            ))  # fmt: skip
        self._script.note(f"{wanted.device} gets its state, from step {wanted.step} on, while the others train")

    def forget(self, lender: str) -> None:
        """It lends no more."""
        for newcomer in self._followers.pop(lender, ()):
            self._drop(newcomer)

    def clear(self) -> None:
        for newcomer in {n for newcomers in self._followers.values() for n in newcomers}:
            self._drop(newcomer)
        self._followers.clear()

    def _drop(self, newcomer: str) -> None:
        """What it will not follow any more need not go down its line beside its work."""
        if (lane := self._lanes.get(newcomer)) is not None:
            lane.drop_background()

    def check(self, device: str, message: LentMessage | LentPart, epoch: int) -> None:
        """Before its tensors are received: PeerError unless it is a stretch of bytes, or says what bytes will be."""
        sizes = [h.nbytes for h in message.tensors if h.dtype == "uint8"]
        fits = len(sizes) == len(message.tensors) <= 1 and sum(sizes) <= MOST_STRETCH_BYTES
        if message.of != device or not fits:
            raise PeerError(f"lent what is not its own, or no stretch of bytes: {message.of!r}, {sizes}")
        if isinstance(message, LentMessage) and message.epoch == epoch:
            self._script.check_parts(message.headers)

    def pass_on(
        self, device: str, message: LentMessage | LentPart, tensors: Sequence[Tensor]
    ) -> list[FollowingEnded]:  # fmt: skip
        """To those who follow the device. One whose line is slower than the device's would fill our memory."""
        if message.number != self._number:
            return []
        for newcomer in self._followers.get(device, ()):
            if (lane := self._lanes.get(newcomer)) is not None:
                if lane.background_bytes() > self._most_waiting_bytes[newcomer]:
                    return [FollowingEnded(device=newcomer, number=message.number, epoch=message.epoch)]
                lane.put(message, tensors, background=True)
        return []
