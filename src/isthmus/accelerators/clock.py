"""When an accelerator's events were, on the host's monotonic clock."""

from __future__ import annotations

import threading
import time

from isthmus.accelerators.accelerator import Accelerator, DeviceEvent

ANCHOR_S = 30.0
"""How long an anchor is used. The two clocks drift, and the time between two distant events has few digits."""
TRIES = 3


class DeviceClock:
    """Of all threads. Anchored by an event on a stream that has nothing else to do: the host waits for no work of other
    streams."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._stream = accelerator.new_stream()
        self._anchoring = threading.Lock()
        self._anchor = self._anchored()

    def at_s(self, event: DeviceEvent) -> float:
        """Of a timed event that is done."""
        with self._anchoring:
            anchor, anchored_s = self._anchor
            if time.monotonic() - anchored_s > ANCHOR_S:
                self._anchor = anchor, anchored_s = self._anchored()
        return anchored_s + anchor.seconds_to(event)

    def _anchored(self) -> tuple[DeviceEvent, float]:
        tries: list[tuple[float, DeviceEvent, float]] = []
        with self._accelerator.on(self._stream):
            for _ in range(TRIES):
                before_s = time.monotonic()
                event = self._accelerator.record(timed=True)
                event.synchronize()
                after_s = time.monotonic()
                tries.append((after_s - before_s, event, (before_s + after_s) / 2))
        _, event, at_s = min(tries, key=lambda one: one[0])
        return event, at_s
