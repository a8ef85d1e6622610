"""The samples of a stage's micro-batches: which they are, and what the stage reads of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from isthmus.accelerators import HOST
from isthmus.accelerators.copies import CopyLabel, CopyStream
from isthmus.data import Dataset, JoinedOrder, SampleOrder
from isthmus.data.dataset import batch_at
from isthmus.errors import InternalError, StepError
from isthmus.graph import Ref, StageGraph
from isthmus.plans.schedule import feeder_slot
from isthmus.protocol.work import Item
from isthmus.runtime.device.copy_streams import CopyStreams
from isthmus.runtime.messages.assignment import Assignment
from isthmus.training.faults import raise_if_jobs

MOST_NAMED = 8
"""Samples that an error names."""


class Batches:
    def __init__(self, assignment: Assignment, data: Mapping[str, Dataset], ways: CopyStreams | None = None) -> None:
        """`data` holds the `train` and `heldout` sets when this stage reads columns; with `ways` these go up to an
        accelerator."""
        self._assignment = assignment
        self._data = data
        self._accelerator = HOST if ways is None else ways.accelerator
        self._up = None if ways is None else ways.way("up")
        self._size = assignment.engine.micro_batch_size
        seed, shuffle = assignment.engine.seed, assignment.shuffle
        self._order = SampleOrder(assignment.train_samples, seed, shuffle)
        feeding = assignment.view.feeding
        self._joined = JoinedOrder(feeding.train, seed, shuffle) if feeding is not None else None

    def samples(self, item: Item, micro_batch: int) -> list[int]:
        """Which samples a micro-batch is of: any stage can tell, whether it reads data or not. Where several holders
        feed the chain, training samples are numbered through, one holder's after those of another."""
        if item.kind != "train":
            return list(self._held_out(item, micro_batch))
        if self._joined is not None:
            return self._joined.indices(self._first(item, micro_batch) // self._size, self._size).tolist()
        return self._order.indices(self._first(item, micro_batch), self._size).tolist()

    def _first(self, item: Item, micro_batch: int) -> int:
        return item.first_sample + micro_batch * self._size

    def _place(self, item: Item, micro_batch: int) -> tuple[SampleOrder, int]:
        """The sample order of the device that reads a training micro-batch, and the position of its first sample."""
        first = self._first(item, micro_batch)
        return (self._order, first) if self._joined is None else self._joined.own(first // self._size, self._size)

    def _held_out(self, item: Item, micro_batch: int) -> range:
        """Positions in the held-out data of the device that reads them."""
        first, feeding = self._first(item, micro_batch), self._assignment.view.feeding
        if feeding is not None:
            first = feeder_slot(feeding.heldout, first // self._size).number * self._size
        return range(first, first + self._size)

    def columns(self, stage: StageGraph, item: Item, micro_batch: int) -> dict[Ref, Tensor]:
        """This stage's own columns of one micro-batch: raw data never leaves the device that reads it."""
        if not stage.columns:
            return {}
        split = "train" if item.kind == "train" else "heldout"
        if split not in self._data:
            raise InternalError(f"stage {stage.index} reads columns {stage.columns} and has no data")
        data = self._data[split]
        try:
            if split == "train":
                found = batch_at(data, *self._place(item, micro_batch), self._size, stage.columns)
            else:
                found = data.batch(self._held_out(item, micro_batch), stage.columns)
        except Exception as e:
            raise_if_jobs(f"data {self._assignment.data.kind!r}", e)
            raise
        dtypes, placeholders = self._assignment.column_dtypes, self._assignment.placeholders
        columns = {Ref(placeholders[name]): found[name].to(getattr(torch, dtypes[name])) for name in stage.columns}
        return columns if self._up is None else self._raised(columns, self._up, item, micro_batch)

    def _raised(self, columns: Mapping[Ref, Tensor], up: CopyStream, item: Item, micro_batch: int) -> dict[Ref, Tensor]:
        with up.up(CopyLabel("columns", item.index, micro_batch)) as trip:
            found = {ref: trip.raised(column) for ref, column in columns.items()}
        self._accelerator.wait(trip.done)
        for column in found.values():
            self._accelerator.used_here(column)
        return found

    def placed(self, error: StepError, item: Item, micro_batch: int) -> StepError:
        """With the step and the samples in whose work it was raised; the micro-batch is -1 where all had part."""
        where = f"step {item.step + 1}" if item.kind == "train" else f"the evaluation after step {item.step}"
        if micro_batch >= 0:
            samples = self.samples(item, micro_batch)
            more = ", ..." if len(samples) > MOST_NAMED else ""
            split = "training" if item.kind == "train" else "held-out"
            where += f", samples {', '.join(map(str, samples[:MOST_NAMED]))}{more} of the {split} data"
        return StepError(error.what, f"{error.reason} ({where})", item.step)
