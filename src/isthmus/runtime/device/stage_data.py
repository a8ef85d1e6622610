"""The data that a device reads for its stage, which stay on it: what the samples of each micro-batch are, and what the
stage reads of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from isthmus.accelerators import HOST
from isthmus.accelerators.copies import CopyLabel, CopyStream
from isthmus.data import Dataset, JoinedOrder, SampleOrder, Split, load_dataset
from isthmus.data.allowed import allowed
from isthmus.data.dataset import batch_at
from isthmus.errors import InternalError, StepError, UserError
from isthmus.graph import Ref, StageGraph
from isthmus.plans.schedule import feeder_slot
from isthmus.protocol.work import Item
from isthmus.runtime.device.copy_streams import CopyStreams
from isthmus.runtime.identity.blinded_digests import blinded
from isthmus.runtime.messages.assignment import Assignment
from isthmus.training.faults import raise_if_jobs


def stage_data(
    assignment: Assignment,
    key: bytes,
    *,
    foreign: bool,
    kinds: Collection[str] | None = None,
    known: Mapping[str, Dataset] = {},
) -> dict[str, Dataset]:
    """The data sets of a stage that reads columns; other stages open none. `key` blinds this device's digests of
    samples. With `foreign`, the coordinator belongs to another owner, and may only name files in this device's data
    folder. `kinds` are those that the device's owner allows, None for all. `known` holds sets that are already open.

    UserError for data that are not here, that it may not ask for, or that are not those which the device described.
    """
    found: dict[str, Dataset] = {}
    evaluates = assignment.evaluates and assignment.evaluation.columns
    if not assignment.train.columns and not evaluates:
        return found
    with allowed(assignment.data, kinds, foreign=foreign):
        if assignment.train.columns:
            found["train"] = known.get("train") or _as_described(assignment, "train", key)
        if evaluates:
            found["heldout"] = known.get("heldout") or _as_described(assignment, "heldout", key)
        for dataset in found.values():
            len(dataset)  # what is read on first use is read here
    _check_holding(assignment, found)
    return found


def _check_holding(assignment: Assignment, found: Mapping[str, Dataset]) -> None:
    """UserError where a holder that feeds the chain with its own data has not as many samples as all reckon with."""
    feeding, view = assignment.view.feeding, assignment.view
    if feeding is None or not found:
        return
    holder = next(copies.index(view.stage) for copies in feeding.copies if view.stage in copies)
    expected = {"train": feeding.train[holder], "heldout": feeding.heldout[holder]}
    got = {
        split: len(dataset) if split == "train" else len(dataset) // feeding.micro_batch_size
        for split, dataset in found.items()
    }
    for split, count in got.items():
        if count != expected[split]:
            what = "samples" if split == "train" else "whole micro-batches"
            raise UserError(f"data ({split}): this device has {count} {what}, the plan was made for {expected[split]}")


def _as_described(assignment: Assignment, split: Split, key: bytes) -> Dataset:
    """Other devices have compared theirs with what this one described: one other sample and the losses mean nothing."""
    found, expected = load_dataset(assignment.data, split), assignment.digests.get(split)
    if expected is not None and blinded(found.fingerprint, key) != expected:
        raise UserError(f"data ({split}): got other samples than this device described: its files have changed since")
    return found


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
        self._order = SampleOrder(assignment.train_samples, seed, shuffle, layout=assignment.layout)
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
