"""How a newcomer gets the state of the run while the others train: one side lends, the other follows.

By way of the coordinator, behind all else that the lender has to tell it: reports and heartbeats do not wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from isthmus.errors import PeerError
from isthmus.runtime.messages.following import FollowMessage, LendMessage, LentMessage, LentPart
from isthmus.training.following import Follower
from isthmus.training.layout import TensorHeader, check_header, header_of
from isthmus.training.snapshot import Part, Snapshot, by_part, check_state, part_of, size_bytes, snapshot

STRETCH_BYTES = 1 << 18
"""Sent at once: what else there is to say waits for no more."""
STRETCH = "stretch"
MOST_BACKLOG = 2.0
"""Copies of the lent state that may wait to be sent; with more, steps are quicker than their gradients travel."""
Put = Callable[[LentMessage | LentPart, Sequence[Tensor], "Snapshot | None"], None]
"""The tensors are stretches of the snapshot, which may still be being copied."""


class Lender:
    """Gives what newcomers need. Used by the compute lane alone."""

    def __init__(
        self, asked: LendMessage, of: str, put: Put, waiting: Callable[[], int],
        copied: Callable[[Mapping[str, Tensor]], Snapshot] = snapshot,
    ) -> None:  # fmt: skip
        """`of` is this device; `put` hands a message to the connection, behind all others; `waiting` tells how many
        bytes wait there; `copied` copies tensors to host memory."""
        self._asked = asked
        self._of = of
        self.step = asked.step
        """From the state after so many steps on."""
        self._put = put
        self._waiting = waiting
        self._copied = copied
        self._state_bytes = 0
        self.begun = False

    def begin(self, state: Mapping[str, Tensor]) -> None:
        """`state` is the stage's, after `step` steps."""
        self._state_bytes = self._lend("state", state)
        self.begun = True

    def go_on(self, given: Mapping[str, Tensor]) -> bool:
        """The stage has done one more step: `given` are the gradients that its optimizers got, and buffers as they are
        now. False when this can go on no longer."""
        if self._waiting() > MOST_BACKLOG * self._state_bytes:
            return False
        self.step += 1
        self._lend("gradients", given)
        return True

    def _lend(self, kind: Literal["state", "gradients"], tensors: Mapping[str, Tensor]) -> int:
        asked = self._asked
        taken = self._copied({name: t for name, t in tensors.items() if part_of(name) in asked.parts})
        self._put(LentMessage(
            run=asked.run, epoch=asked.epoch, number=asked.number, of=self._of, kind=kind, step=self.step,
            headers=taken.headers,
        ), (), None)  # fmt: skip
        for offset in range(0, taken.flat.numel(), STRETCH_BYTES):
            stretch = taken.flat[offset : offset + STRETCH_BYTES]
            headers = (header_of(STRETCH, stretch),)
            self._put(LentPart(
                run=asked.run, epoch=asked.epoch, number=asked.number, of=self._of, offset=offset, tensors=headers
            ), [stretch], taken)  # fmt: skip
        return taken.flat.numel()


class _Arriving:
    """What is here of one copy."""

    def __init__(self, begun: LentMessage) -> None:
        self.begun = begun
        self.taken = Snapshot(begun.headers, torch.empty(size_bytes(begun.headers), dtype=torch.uint8))
        self.here = 0

    @property
    def whole(self) -> bool:
        return self.here == self.taken.flat.numel()

    def add(self, message: LentPart, stretch: Tensor) -> None:
        until = self.here + stretch.numel()
        fits = stretch.dtype == torch.uint8 and stretch.dim() == 1 and until <= self.taken.flat.numel()
        if message.offset != self.here or not fits:
            raise PeerError(f"device {message.of!r} lent bytes {message.offset} out of turn")
        self.taken.flat[self.here : until] = stretch
        self.here = until


class Borrower:
    """A newcomer's side: the states that it follows. PeerError for what was not agreed."""

    def __init__(self, agreed: FollowMessage) -> None:
        self.number = agreed.number
        self._agreed = agreed
        self._arriving: dict[str, _Arriving] = {}
        self._followers: dict[str, Follower] = {}

    def accept(self, message: LentMessage | LentPart, tensors: Sequence[Tensor]) -> int | None:
        """How many steps the lender's parts have behind them here now, if that is news."""
        of = message.of
        if of not in self._agreed.lent:
            raise PeerError(f"device {of!r} lends what nobody asked for")
        if isinstance(message, LentMessage):
            self._check(message)
            self._arriving[of] = _Arriving(message)
        elif of not in self._arriving or len(tensors) != 1:
            raise PeerError(f"device {of!r} lent bytes out of turn")
        else:
            self._arriving[of].add(message, tensors[0])
        return self._done(of) if self._arriving[of].whole else None

    def states(self) -> Iterator[tuple[int, Mapping[str, Part]]]:
        """What is here: steps, and parts after them."""
        return ((follower.step, by_part(follower.state())) for follower in self._followers.values())

    def _check(self, begun: LentMessage) -> None:
        shapes, follower = self._agreed.lent[begun.of], self._followers.get(begun.of)
        if begun.of in self._arriving:
            raise PeerError(f"device {begun.of!r} began another copy before the last one was whole")
        if begun.kind == "state" and follower is None:
            check_state(shapes, begun.headers)
        elif begun.kind == "state" or follower is None or begun.step != follower.step + 1:
            raise PeerError(f"device {begun.of!r} lent {begun.kind} of step {begun.step} out of turn")
        else:
            _check_gradients(shapes, begun.headers)

    def _done(self, of: str) -> int:
        arrived = self._arriving.pop(of)
        tensors = arrived.taken.tensors()
        if of in self._followers:
            self._followers[of].repeat(tensors)
        else:
            agreed = self._agreed
            self._followers[of] = Follower(agreed.config, agreed.trained, arrived.begun.step, tensors)
        return self._followers[of].step


def _check_gradients(shapes: Mapping[str, tuple[int, ...]], headers: Sequence[TensorHeader]) -> None:
    for header in headers:
        check_header(header)
        if header.shape != shapes.get(header.name) or header.packing is not None:
            raise PeerError(f"lent {header.name!r} of shape {list(header.shape)}, which is not of its stage")
    if len({h.name for h in headers}) < len(headers):
        raise PeerError("lent a tensor twice")
