"""What a plan said that its devices' stages take of their memory, beside what they took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import RenderableType
from rich.text import Text

from isthmus.plans import Plan, Stage
from isthmus.protocol.memory_shortage import MemoryPeak
from isthmus.report.summary import DeviceMemoryUse
from isthmus.report.tables import new_table, titled
from isthmus.units import format_size


def memory_use(plan: Plan, peaks: Mapping[str, MemoryPeak]) -> tuple[DeviceMemoryUse, ...]:
    """Predicted and measured memory of each device of the plan that reported its peak."""
    found: dict[str, list[tuple[str, Stage]]] = {}
    for number, replica in enumerate(plan.replicas):
        for index, stage in enumerate(replica.workers):
            name = str(index) if len(plan.replicas) == 1 else f"{number}.{index}"
            found.setdefault(stage.device, []).append((name, stage))
    return tuple(
        DeviceMemoryUse(
            device=device,
            stages=tuple(name for name, _ in held),
            predicted_bytes=sum(stage.memory.total for _, stage in held),
            peak_bytes=peaks[device].size_bytes,
            reserved_bytes=peaks[device].reserved_bytes,
            resident=peaks[device].resident,
        )
        for device, held in found.items()
        if device in peaks
    )


def memory_table(uses: Sequence[DeviceMemoryUse]) -> RenderableType:
    """A row for each device: memory as predicted, and as its allocator counted it."""
    numbers = ("predicted", "peak", "more or less", "reserved")
    table = new_table(("device", "stages", *numbers), numbers)
    for use in uses:
        measured = (f"{use.excess:+.1%}", format_size(use.reserved_bytes))
        table.add_row(
            Text(use.device),
            Text(", ".join(use.stages)),
            Text(format_size(use.predicted_bytes)),
            Text(format_size(use.peak_bytes) + "*" * use.resident),
            *([""] * 2 if use.resident else measured),
        )
    captions = ["peak: in tensors; reserved: taken of the accelerator by torch's allocator"]
    if any(use.resident for use in uses):
        captions = captions * any(not use.resident for use in uses) + [
            "* on the CPU, by how much the process's resident set grew: libraries, buffers and fragments with it"
        ]
    return titled("Memory of the devices", table, "\n".join(captions))
