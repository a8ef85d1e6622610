"""Models that are captured once in a worker of the suite: hundreds of tests plan or train the same few.

A capture is a frozen value, and follows from the model's options and the columns alone; `tests/graph` captures anew.
Commands in processes of their own, and the other worker, find those of built-in models in the session's cache folder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from isthmus.graph.captured import Captured, Column
from isthmus.job import Job
from isthmus.job.capture_cache import only_batch

Captures = Callable[[Job, Mapping[str, Column], Callable[[], Captured]], Captured]


def kept(cached_capture: Captures) -> Captures:
    """In place of `isthmus.job.prepared.cached_capture`."""
    found: dict[tuple[bytes, int | None], Captured] = {}

    def captured(job: Job, columns: Mapping[str, Column], capture: Callable[[], Captured]) -> Captured:
        name = job.model.name
        if (":" in name and not name.startswith("tests.")) or name == "hf":
            return capture()  # files or objects, which may be others in the next test
        key = msgspec.json.encode((job.model, dict(columns), job.training.precision))
        for batch in (None, job.micro_batch_size):
            if (key, batch) in found:
                return found[key, batch]
        made = cached_capture(job, columns, capture)
        return found.setdefault((key, only_batch(made)), made)

    return captured
