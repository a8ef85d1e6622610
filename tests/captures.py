"""Models that are captured once in a worker of the suite: hundreds of tests plan or train the same few.

A capture is a frozen value, and follows from the model's options and the columns alone; `tests/graph` captures anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from isthmus.graph.captured import Captured, Column
from isthmus.job import Job

Captures = Callable[[Job, Mapping[str, Column]], Captured]


def kept(capture: Captures) -> Captures:
    """In place of `isthmus.job.prepared._captured`."""
    found: dict[bytes, Captured] = {}

    def captured(job: Job, columns: Mapping[str, Column]) -> Captured:
        name = job.model.name
        if (":" in name and not name.startswith("tests.")) or name == "hf":
            return capture(job, columns)  # files or objects, which may be others in the next test
        key = msgspec.json.encode((job.model, dict(columns), job.micro_batch_size, job.training.precision))
        if key not in found:
            found[key] = capture(job, columns)
        return found[key]

    return captured
