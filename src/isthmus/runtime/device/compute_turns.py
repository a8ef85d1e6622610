"""What the stages of one device share: its compute, one piece of work at a time, and the way to each other."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator
from contextlib import AbstractContextManager

from isthmus.protocol.compute_lane import ComputeLane
from isthmus.protocol.events import Work


class ComputeTurns:
    """Among stages that run in threads of one process."""

    def __init__(self) -> None:
        self.doors: dict[str, tuple[str, int]] = {}
        """Where each listens, by worker id: what one sends another does not leave the device."""
        self._lane = ComputeLane()
        self._choosing = threading.Lock()

    @property
    def waiting(self) -> int:
        """How many stages wait for a turn."""
        return self._lane.waiting

    def of(self, stage: int) -> StageTurns:
        return StageTurns(self._lane, self._choosing, stage)


class StageTurns:
    """The turns of one stage. It keeps its turn until it is known whether the stage has more to compute: so its next
    work is among the candidates when the lane chooses, as in the simulator."""

    def __init__(self, lane: ComputeLane, choosing: threading.Lock, stage: int) -> None:
        self._lane = lane
        self._choosing = choosing
        self._stage = stage
        self._held = False

    @contextlib.contextmanager
    def turn(self, work: Work) -> Generator[None]:
        """Inside of it, and until `give`, the device is this stage's. Nothing may be waited for there that another
        stage computes."""
        mine = threading.Event()
        with self._choosing:
            self._lane.take(work, self._stage, mine.set)
        self.give()
        mine.wait()
        self._held = True
        yield

    def give(self) -> None:
        """Let other stages compute, if this one has the turn."""
        if self._held:
            self._held = False
            with self._choosing:
                self._lane.release()


class NoTurns:
    """Of a device that has one stage."""

    def turn(self, work: Work) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def give(self) -> None:
        pass
