"""Copies of the stage's state on the host, made while the stage goes on; and copies of them on another device, sent a
little after each item, behind all that the pipeline sends.

Nothing waits for them. What a snapshot costs is one copy in memory, and link time that would have been idle as far as
there is any: the interval between snapshots is chosen so (`snapshot_interval`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from isthmus.errors import PeerError
from isthmus.runtime.device.copy_streams import CopyStreams
from isthmus.runtime.messages.assignment import SnapshotMessage, SnapshotPart, SnapshotReplication
from isthmus.training.snapshot import IncomingSnapshot, Snapshot, check_state, scarce, snapshot, stretches


class Snapshots:
    """Used by the compute lane alone."""

    def __init__(self, ways: CopyStreams | None, kept: Callable[[int, Snapshot], None]) -> None:
        """`kept` gets step and snapshot of what is to be kept, once it is whole. `ways` is None on the CPU."""
        self._way = ways.way("down") if ways is not None else None
        self._kept = kept
        self._under_way: deque[tuple[int, Snapshot]] = deque()

    def of(self, state: Mapping[str, Tensor], *, on_disk: bool = False) -> Snapshot:
        """It may still be being copied. That of a large state on the CPU can go into a temporary file."""
        return snapshot(state, self._way, on_disk=on_disk)

    def keep(self, step: int, state: Mapping[str, Tensor]) -> None:
        self._under_way.append((step, self.of(state, on_disk=scarce(sum(t.nbytes for t in state.values())))))

    def hand_on(self, *, wait: bool = False) -> None:
        """Hand on the snapshots that are to be kept and are whole; with `wait`, all of them."""
        while self._under_way and (wait or self._under_way[0][1].whole):
            step, taken = self._under_way.popleft()
            taken.wait()
            self._kept(step, taken)

    def here(self, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """In host memory: a copy, unless the state is there."""
        if self._way is None:
            return state
        taken = self.of(state)
        taken.wait()
        return taken.tensors()

    def hold(self) -> None:
        """The accelerator's next work waits for the copies made so far: it may change the state."""
        if self._way is not None:
            self._way.hold()

    def tell(self) -> None:
        """Add the copies that are done to the trace."""
        if self._way is not None:
            self._way.tell()


SPARE_ITEMS = 0.8  # the share of the items between two snapshots in which one is sent: the last ones are to spare
Put = Callable[[SnapshotMessage | SnapshotPart, Sequence[Tensor]], None]


class SnapshotSender:
    """Sends the snapshots of one stage. Used by the compute lane alone."""

    def __init__(self, run: str, epoch: int, source: int, snapshot_copy: SnapshotReplication, put: Put) -> None:
        """`put` hands a message to the link, behind all others."""
        self._run, self._epoch, self._source = run, epoch, source
        self._snapshot_copy = snapshot_copy
        self._put = put
        self._snapshot: Snapshot | None = None
        self._step = self._sent = self._share_bytes = 0

    def begin(self, step: int, taken: Snapshot) -> None:
        begun = SnapshotMessage(run=self._run, epoch=self._epoch, source=self._source, step=step, headers=taken.headers)
        self._put(begun, ())
        self._snapshot, self._step, self._sent = taken, step, 0
        items = max(1, int(SPARE_ITEMS * self._snapshot_copy.every))
        self._share_bytes = -(-taken.flat.numel() // items)

    def go_on(self) -> None:
        """An item is done: hand over the next part of the snapshot."""
        if self._snapshot is None:
            return
        flat, first = self._snapshot.flat, self._sent
        self._sent = min(flat.numel(), first + self._share_bytes)
        for offset, stretch, headers in stretches(flat[first : self._sent], self._snapshot_copy.stretch_bytes):
            message = SnapshotPart(
                run=self._run,
                epoch=self._epoch,
                source=self._source,
                step=self._step,
                offset=first + offset,
                tensors=headers,
            )
            self._put(message, [stretch])
        if self._sent == flat.numel():
            self._snapshot = None


class SnapshotReceiver:
    """Takes the snapshots of the stages that this device keeps copies of. Each stage's link has one thread."""

    def __init__(
        self, shapes: Mapping[int, Mapping[str, tuple[int, ...]]], complete: Callable[[int, int, Snapshot], None]
    ) -> None:
        """`shapes`: by stage, of its parts. `complete` gets stage, step and the whole snapshot."""
        self._shapes = shapes
        self._complete = complete
        self._begun: dict[int, tuple[int, IncomingSnapshot]] = {}
        """The snapshot that arrives from each stage, with its step."""

    def guard(self, message: SnapshotMessage | SnapshotPart) -> None:
        """Refuse what the plan does not expect before anything is allocated for it."""
        if message.source not in self._shapes:
            raise PeerError(
                f"stage {message.source} sent a snapshot, expected none: this device keeps no replica of it"
            )
        if isinstance(message, SnapshotMessage):
            if message.tensors:
                raise PeerError("a snapshot's first frame has tensors")
            check_state(self._shapes[message.source], message.headers)
            return
        step, begun = self._begun.get(message.source, (None, None))
        if begun is None or message.step != step or not begun.expects(message.offset, message.tensors):
            raise PeerError(f"stage {message.source} sent bytes {message.offset} of a snapshot out of order")

    def accept(self, message: SnapshotMessage | SnapshotPart, tensors: Sequence[Tensor]) -> None:
        source = message.source
        if isinstance(message, SnapshotMessage):
            self._begun[source] = message.step, IncomingSnapshot(message.headers)
        else:
            self._begun[source][1].add(tensors[0])
        step, begun = self._begun[source]
        if begun.whole:
            del self._begun[source]
            self._complete(source, step, begun.snapshot)
