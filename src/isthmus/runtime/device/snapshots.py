"""Copies of the stage's state on the host, made while the stage goes on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

from torch import Tensor

from isthmus.runtime.device.copy_streams import CopyStreams
from isthmus.training.snapshot import Snapshot, snapshot


class Snapshots:
    """Used by the compute lane alone."""

    def __init__(self, ways: CopyStreams | None, kept: Callable[[int, Snapshot], None]) -> None:
        """`kept` gets step and snapshot of what is to be kept, once it is whole. `ways` is None on the CPU."""
        self._way = ways.way("down") if ways is not None else None
        self._kept = kept
        self._under_way: deque[tuple[int, Snapshot]] = deque()

    def of(self, state: Mapping[str, Tensor]) -> Snapshot:
        """It may still be being copied."""
        return snapshot(state, self._way)

    def keep(self, step: int, state: Mapping[str, Tensor]) -> None:
        self._under_way.append((step, self.of(state)))

    def hand_on(self, *, wait: bool = False) -> None:
        """What is to be kept, and is whole; or all of it."""
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
        """Of copies that are done, to the trace."""
        if self._way is not None:
            self._way.tell()
