"""Models that are captured once in a worker of the suite: hundreds of tests plan or train the same few.

A capture is a frozen value, and follows from the model's code and options and the columns; `tests/graph` captures anew.
Commands in processes of their own, and the other worker, find those of built-in models in the session's cache folder.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from isthmus.graph.captured import Captured, Column
from isthmus.job import Job
from isthmus.job.prepared import only_batch

Captures = Callable[[Job, Mapping[str, Column], Callable[[], Captured]], Captured]


def kept(cached_capture: Captures) -> Captures:
    """In place of `isthmus.job.prepared.cached_capture`."""
    found: dict[tuple[bytes, bytes, int | None], Captured] = {}

    def captured(job: Job, columns: Mapping[str, Column], capture: Callable[[], Captured]) -> Captured:
        name = job.model.name
        if name == "hf" or name.startswith("given:"):
            return capture()  # files or objects, which may be others in the next test
        key, code = msgspec.json.encode((job.model, dict(columns), job.training.precision)), _source(name)
        for batch in (None, job.micro_batch_size):
            if (key, code, batch) in found:
                return found[key, code, batch]
        made = cached_capture(job, columns, capture)
        return found.setdefault((key, _source(name), only_batch(made)), made)

    return captured


def _source(name: str) -> bytes:
    """Of a module that a test wrote, which has been imported; b"" for one that is always the same."""
    module = sys.modules.get(name.partition(":")[0])
    return Path(module.__file__).read_bytes() if ":" in name and module is not None and module.__file__ else b""
