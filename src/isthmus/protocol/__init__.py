"""The pure state machines: events in, instructions out, no I/O. See `worker` and `coordinator`."""

from isthmus.protocol.coordinator import Coordinator
from isthmus.protocol.recovery import Lineage, StateHolding, StateLayout
from isthmus.protocol.work import Item, RunSpec, items
from isthmus.protocol.worker import StageView, Worker

__all__ = ["Coordinator", "Item", "Lineage", "RunSpec", "StageView", "StateHolding", "StateLayout", "Worker", "items"]
