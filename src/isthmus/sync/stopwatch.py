"""Moments on the device's own clock: on CUDA the host is far ahead of what it has asked for."""

from __future__ import annotations

import time

import torch

Moment = float | torch.cuda.Event


def now(device: torch.device) -> Moment:
    """This moment of the work that was given to the device."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between_s(start: Moment, end: Moment) -> float:
    """Seconds between two moments of one device; waits for the second."""
    if isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        end.synchronize()
        return start.elapsed_time(end) / 1e3
    assert isinstance(start, float) and isinstance(end, float), "moments of different clocks"
    return end - start
