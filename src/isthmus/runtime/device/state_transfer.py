"""How a joining device gets the state of the run while the others train: the donor sends, the joining device receives.

The coordinator relays the state. The donor's reports and heartbeats go first: they do not wait for the transfer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Literal

from torch import Tensor, nn

from isthmus.errors import PeerError
from isthmus.protocol.run_messages import SendState
from isthmus.runtime.messages.state_transfer import ReceiveStateMessage, StateMessage, StatePart
from isthmus.training.checkpoint import OPTIMIZER
from isthmus.training.engine import EngineConfig
from isthmus.training.layout import TensorHeader, check_header
from isthmus.training.optim import Optimizers
from isthmus.training.snapshot import (
    IncomingSnapshot,
    Part,
    Snapshot,
    by_part,
    check_state,
    part_of,
    snapshot,
    stretches,
)

STRETCH_BYTES = 1 << 18  # sent at once: what else there is to say waits for no more
MOST_BACKLOG = 2.0
"""Copies of the sent state that may wait to be sent; with more, steps are quicker than their gradients travel."""
Put = Callable[[StateMessage | StatePart, Sequence[Tensor], "Snapshot | None"], None]
"""The tensors are stretches of the snapshot, which may still be being copied."""


class StateDonor:
    """Gives what joining devices need. Used by the compute lane alone."""

    def __init__(
        self,
        asked: SendState,
        run: str,
        of: str,
        put: Put,
        waiting: Callable[[], int],
        copied: Callable[[Mapping[str, Tensor]], Snapshot] = snapshot,
    ) -> None:
        """`of` is this device; `put` hands a message to the connection, behind all others; `waiting` tells how many
        bytes wait there; `copied` copies tensors to host memory."""
        self._asked = asked
        self._run = run
        self._of = of
        self.step = asked.step  # from the state after so many steps on
        self._put = put
        self._waiting = waiting
        self._copied = copied
        self._state_bytes = 0
        self.begun = False

    def begin(self, state: Mapping[str, Tensor]) -> None:
        """`state` is the stage's, after `step` steps."""
        self._state_bytes = self._send_state("state", state)
        self.begun = True

    def go_on(self, given: Mapping[str, Tensor]) -> bool:
        """The stage has done one more step: `given` are the gradients that its optimizers got, and buffers as they are
        now. False when this can go on no longer."""
        if self._waiting() > MOST_BACKLOG * self._state_bytes:
            return False
        self.step += 1
        self._send_state("gradients", given)
        return True

    def _send_state(self, kind: Literal["state", "gradients"], tensors: Mapping[str, Tensor]) -> int:
        asked = self._asked
        taken = self._copied({name: t for name, t in tensors.items() if part_of(name) in asked.parts})
        self._put(
            StateMessage(
                run=self._run,
                epoch=asked.epoch,
                number=asked.number,
                of=self._of,
                kind=kind,
                step=self.step,
                headers=taken.headers,
            ),
            (),
            None,
        )
        for offset, stretch, headers in stretches(taken.flat, STRETCH_BYTES):
            self._put(
                StatePart(
                    run=self._run, epoch=asked.epoch, number=asked.number, of=self._of, offset=offset, tensors=headers
                ),
                [stretch],
                taken,
            )
        return taken.flat.numel()


class StateJoiner:
    """a joining device's side: the states that it follows. PeerError for what was not agreed."""

    def __init__(self, agreed: ReceiveStateMessage) -> None:
        self.number = agreed.number
        self.epoch = agreed.epoch
        self._agreed = agreed
        self._arriving: dict[str, tuple[int, IncomingSnapshot]] = {}
        """The step of the state that arrives now from each donor, or of the gradients that led to it."""
        self._receivers: dict[str, CatchUpState] = {}

    def accept(self, message: StateMessage | StatePart, tensors: Sequence[Tensor]) -> int | None:
        """Return how many steps the donor's parts have behind them here now, if that is news."""
        of = message.of
        if of not in self._agreed.donated:
            raise PeerError(f"device {of!r} sent state that was not requested")
        if isinstance(message, StateMessage):
            try:
                self._check(message)
            except PeerError as e:
                raise PeerError(f"device {of!r}: {e}") from None
            self._arriving[of] = message.step, IncomingSnapshot(message.headers)
        elif of not in self._arriving or not self._arriving[of][1].expects(message.offset, message.tensors):
            raise PeerError(f"device {of!r} sent bytes {message.offset} out of order")
        else:
            self._arriving[of][1].add(tensors[0])
        return self._done(of) if self._arriving[of][1].whole else None

    def states(self) -> Iterator[tuple[int, Mapping[str, Part]]]:
        """Return the states that have arrived: steps, and parts after them."""
        return ((catch_up.step, by_part(catch_up.state())) for catch_up in self._receivers.values())

    def _check(self, begun: StateMessage) -> None:
        """Errors do not name the donor."""
        shapes, catch_up = self._agreed.donated[begun.of], self._receivers.get(begun.of)
        if begun.of in self._arriving:
            raise PeerError("began another copy before the last one was whole")
        if begun.kind == "state" and catch_up is None:
            check_state(shapes, begun.headers)
        elif begun.kind == "state" or catch_up is None or begun.step != catch_up.step + 1:
            raise PeerError(f"sent {begun.kind} of step {begun.step} out of order")
        else:
            _check_gradients(shapes, begun.headers)

    def _done(self, of: str) -> int:
        step, arrived = self._arriving.pop(of)
        tensors = arrived.snapshot.tensors()
        if of in self._receivers:
            self._receivers[of].repeat(tensors)
        else:
            agreed = self._agreed
            self._receivers[of] = CatchUpState(agreed.config, agreed.trained, step, tensors)
        return self._receivers[of].step


def _check_gradients(shapes: Mapping[str, tuple[int, ...]], headers: Sequence[TensorHeader]) -> None:
    for header in headers:
        check_header(header)
        if header.shape != shapes.get(header.name) or header.packing is not None:
            raise PeerError(f"sent {header.name!r} of shape {list(header.shape)}, which is not in its stage")
    if len({h.name for h in headers}) < len(headers):
        raise PeerError("sent a tensor twice")


class CatchUpState:
    """Parts of a model after `step` steps. Bit for bit the stage's own, on a processor of the same kind: an update is
    element by element."""

    def __init__(self, config: EngineConfig, trained: Set[str], step: int, state: Mapping[str, Tensor]) -> None:
        """`state` as a stage's `Engine.state`; of it, optimizers update what is `trained`."""
        own = {name: value for name, value in state.items() if not name.startswith(OPTIMIZER)}
        self._parameters = {n: nn.Parameter(value.clone()) for n, value in own.items() if n in trained}
        self._buffers = {n: value for n, value in own.items() if n not in trained}
        self._optimizers = Optimizers(config.optimizers, self._parameters, config.learning_rate, config.steps)
        self._optimizers.load(state)
        self._config = config
        self.step = step

    def repeat(self, given: Mapping[str, Tensor]) -> None:
        """The next step. `given`: each parameter's gradient as the stage's optimizers get it, none where it has none,
        and the buffers' values."""
        for name, value in given.items():
            if name in self._parameters:
                self._parameters[name].grad = value
            else:
                self._buffers[name] = value
        self._optimizers.step(self.step)
        self.step += 1

    def state(self) -> dict[str, Tensor]:
        """Return the same as `Engine.state`: no copies."""
        found = {name: p.detach() for name, p in self._parameters.items()}
        return found | self._buffers | self._optimizers.state()
