"""What a plan said that its stages take of their devices' memory, beside what they took."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from rich.console import RenderableType
from rich.text import Text

from isthmus.plans import Plan
from isthmus.protocol.shortage import MemoryPeak
from isthmus.report.summary import StageMemoryUse
from isthmus.report.tables import new_table, titled
from isthmus.units import format_size


def memory_use(plan: Plan, peaks: Mapping[str, MemoryPeak]) -> tuple[StageMemoryUse, ...]:
    """Of those stages of the plan whose devices told their peaks; of a device with several stages, all together."""
    planned: Counter[str] = Counter()
    for replica in plan.replicas:
        for stage in replica.workers:
            planned[stage.device] += stage.memory.total
    return tuple(
        StageMemoryUse(
            device=stage.device, replica=number, stage=index, predicted_bytes=planned[stage.device],
            peak_bytes=peaks[stage.device].size_bytes, resident=peaks[stage.device].resident,
        )
        for number, replica in enumerate(plan.replicas)
        for index, stage in enumerate(replica.workers) if stage.device in peaks
    )  # fmt: skip


def memory_table(uses: Sequence[StageMemoryUse]) -> RenderableType:
    several = any(use.replica for use in uses)
    numbers = ("predicted", "peak", "more or less")
    table = new_table(("stage", "device", *numbers), numbers)
    for use in uses:
        table.add_row(
            Text(f"{use.replica}.{use.stage}" if several else str(use.stage)), Text(use.device),
            Text(format_size(use.predicted_bytes)), Text(format_size(use.peak_bytes) + "*" * use.resident),
            Text(f"{use.excess:+.0%}"),
        )  # fmt: skip
    caption = "peak: what torch's allocator took of the accelerator"
    if any(use.resident for use in uses):
        caption = "* on the CPU, by how much the process's resident set grew: libraries, buffers and fragments with it"
    return titled("Memory of the stages", table, caption)
