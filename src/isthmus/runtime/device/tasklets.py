"""The tasklets of the compute lane that the stages of one device share: one at a time, when each began and ended, and
how far the host may be ahead of the hardware."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from typing import NamedTuple

import msgspec

from isthmus.accelerators import Accelerator, DeviceEvent
from isthmus.accelerators.accelerator import DeviceClock
from isthmus.protocol.compute_lane import ComputeLane
from isthmus.protocol.run_messages import Work
from isthmus.trace import Span


class ComputeTurns:
    """Among stages that run in threads of one process."""

    def __init__(self) -> None:
        self.doors: dict[str, tuple[str, int]] = {}
        """Where each listens, by worker id: what one sends another does not leave the device."""
        self._lane = ComputeLane()
        self._choosing = threading.Lock()

    @property
    def waiting(self) -> int:
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
        """Inside and until `give` the device is this stage's. Nothing may be waited for that another stage computes."""
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


class _Queued(NamedTuple):
    span: Span
    began: DeviceEvent
    ended: DeviceEvent


class Tasklets:
    """Used by the compute lane alone.

    An accelerator takes a tasklet when its kernels are queued, long before they have run. Were the host to queue all
    that has arrived, a gradient that arrives a moment later would wait behind many forwards. So it queues one tasklet
    behind the one that runs, and chooses the next when that one is done: backward first still decides with what has
    arrived.
    """

    def __init__(
        self,
        device: str,
        accelerator: Accelerator,
        clock: DeviceClock | None,
        record: Callable[[Span], None],
        turns: StageTurns,
    ) -> None:
        """`clock` is that of an accelerator whose tasklets are timed; without one a span of an accelerator is when the
        host was at it. Inside of one of the `turns` no other stage of the device computes."""
        self._device = device
        self._accelerator = accelerator
        self._clock = clock
        self._record = record
        self._turns = turns
        self._queued: deque[_Queued] = deque()
        self._late_s = 0.0

    def take_late_s(self) -> float:
        """Return the seconds by which emulated tasks lasted longer than they should, since the last call."""
        found, self._late_s = self._late_s, 0.0
        return found

    @contextlib.contextmanager
    def micro_batch(self, work: Work, item: int, micro_batch: int, least_s: float | None) -> Generator[None]:
        """Return the same as `tasklet`, for a forward or a backward: it has the device to itself."""
        with self._turns.turn(work), self.tasklet(work, item, micro_batch, least_s):
            yield

    @contextlib.contextmanager
    def tasklet(self, name: str, item: int, micro_batch: int = -1, least_s: float | None = None) -> Generator[None]:
        """Inside of it the lane is at work on this; an emulated device takes `least_s` for it."""
        span = Span(
            device=self._device,
            track="compute",
            name=name,
            start_s=time.monotonic(),
            end_s=0.0,
            step=item,
            micro_batch=micro_batch,
        )
        if not self._accelerator.asynchronous:
            yield
            self._stretched(span, least_s)
            return
        timed = self._clock is not None
        began = self._accelerator.record(timed=timed)
        yield
        self._queued.append(_Queued(span, began, self._accelerator.record(timed=timed)))
        if least_s is not None:
            self.finish(least_s)
        while len(self._queued) > 1:
            self._over(self._queued.popleft())

    def finish(self, least_s: float | None = None) -> None:
        """Wait for all that is queued."""
        while self._queued:
            self._over(self._queued.popleft(), least_s)

    def _over(self, queued: _Queued, least_s: float | None = None) -> None:
        queued.ended.synchronize()
        span = queued.span
        if self._clock is not None:
            start_s, end_s = self._clock.at_s(queued.began), self._clock.at_s(queued.ended)
            span = msgspec.structs.replace(span, start_s=start_s, end_s=end_s)
        if least_s is not None or self._clock is None:
            self._stretched(span, least_s)
        else:
            self._record(span)

    def _stretched(self, span: Span, least_s: float | None) -> None:
        """Ends now, or when an emulated device would be done."""
        if least_s is not None:
            left_s = span.start_s + least_s - time.monotonic()
            if left_s > 0:
                time.sleep(left_s)
            else:
                self._late_s -= left_s
        self._record(msgspec.structs.replace(span, end_s=time.monotonic()))
