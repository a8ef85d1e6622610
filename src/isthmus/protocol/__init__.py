"""The pure state machines: events in, instructions out, no I/O. See `worker` and `coordinator`."""

from isthmus.protocol.coordinator import Coordinator
from isthmus.protocol.recovery import Holding, Layout, Lineage
from isthmus.protocol.work import Item, RunSpec, items
from isthmus.protocol.worker import StageView, Worker

__all__ = ["Coordinator", "Holding", "Item", "Layout", "Lineage", "RunSpec", "StageView", "Worker", "items"]
