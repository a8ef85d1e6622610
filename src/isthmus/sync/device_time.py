"""Moments on the device's own clock: the host is far ahead of what it has asked of an accelerator."""

from __future__ import annotations

import time

import torch

Moment = float | torch.Event


def now(device: torch.device) -> Moment:
    """This moment of the work that was given to the device."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.Event(device, enable_timing=True)
    event.record(torch.accelerator.current_stream(device))
    return event


def between_s(start: Moment, end: Moment) -> float:
    """Seconds between two moments of one device; waits for the second."""
    if isinstance(start, torch.Event) and isinstance(end, torch.Event):
        end.synchronize()
        return start.elapsed_time(end) / 1e3
    assert isinstance(start, float) and isinstance(end, float), "moments of different clocks"
    return end - start
