"""Which of several data holders feeds a micro-batch."""

from __future__ import annotations

import msgspec

from isthmus.plans.schedule import feeder_slot
from isthmus.protocol.run_messages import Item
from isthmus.wire_types import Count, Many, Place


class Feeding(msgspec.Struct, frozen=True, kw_only=True):
    """Pure: all devices tell the same from the same counts."""

    train: Many[Count]  # samples of each holder
    heldout: Many[Count]  # whole micro-batches of each holder's held-out samples
    micro_batch_size: Count
    copies: Many[Many[Place]]
    """Workers that run copies of one stage, in the order of the holders; for each stage that has copies."""

    def does(self, worker: int, item: Item, micro_batch: int) -> bool:
        """Return whether a worker has to do with a micro-batch of an item: who runs no copy has to do with all."""
        own = next((copies for copies in self.copies if worker in copies), None)
        return own is None or own[self.holder(item, micro_batch)] == worker

    def holder(self, item: Item, micro_batch: int) -> int:
        """Return whose micro-batch of an item it is: the number of the holder."""
        number = item.first_sample // self.micro_batch_size + micro_batch
        return feeder_slot(self.train if item.kind == "train" else self.heldout, number).holder

    def present(self, workers: tuple[int, ...], item: Item, micro_batch: int) -> tuple[int, ...]:
        """Those of some workers that have to do with a micro-batch."""
        return tuple(worker for worker in workers if self.does(worker, item, micro_batch))
