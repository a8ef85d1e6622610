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

    @contextlib.contextmanager
    def turn(self, stage: int, work: Work) -> Generator[None]:
        """Inside of it the device is this stage's. Nothing may be waited for there that another stage computes."""
        mine = threading.Event()
        with self._choosing:
            self._lane.take(work, stage, mine.set)
        mine.wait()
        try:
            yield
        finally:
            with self._choosing:
                self._lane.release()


def no_turns(work: Work) -> AbstractContextManager[None]:
    """Of a device that has one stage."""
    return contextlib.nullcontext()
