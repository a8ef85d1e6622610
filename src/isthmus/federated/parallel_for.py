"""Work on long vectors, number by number, on all cores: what is done between two rounds, while executors wait.

Threads are started for every call. Long vectors take milliseconds and a thread a twentieth of one, and executors are
forked from a process that keeps none.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

LEAST = 1 << 20  # numbers for each thread: fewer are done sooner than it starts


def parallel_chunks(act: Callable[[int, int], None], size: int, align: int = 1) -> None:
    """Call `act(start, stop)` for ranges that make up `size` numbers and begin at multiples of `align`, at the same
    time. Raises what one of them raised."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = max(1, min(cores, size // LEAST))
    step = -(-size // threads // align) * align or align
    ranges = [(start, min(start + step, size)) for start in range(0, size, step)]
    errors: list[Exception] = []

    def run(start: int, stop: int) -> None:
        try:
            act(start, stop)
        except Exception as e:  # raised in the caller's thread
            errors.append(e)

    others = [threading.Thread(target=run, args=each, name="spread", daemon=True) for each in ranges[1:]]
    for other in others:
        other.start()
    try:
        for each in ranges[:1]:
            run(*each)
    finally:  # Ctrl-C as well: the memory is the caller's
        for other in others:
            other.join()
    for error in errors:
        raise error
