"""The data that a device reads for its stage, which stay on it: what the samples of each micro-batch are, and what the
stage reads of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from isthmus.accelerators import HOST
from isthmus.accelerators.copies import CopyLabel, CopyStream
from isthmus.data import Dataset, DataSpec, JoinedOrder, SampleOrder, Split, load_dataset
from isthmus.data.dataset import batch_at, evaluation_rows
from isthmus.data.registry import allowed
from isthmus.data.replica_share import ReplicaSamples
from isthmus.errors import InternalError, StepError, UserError
from isthmus.graph import Ref, StageGraph
from isthmus.plans.schedule import feeder_slot, had_before
from isthmus.protocol.run_messages import Item
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
    with allowed(assignment.data, kinds, foreign=foreign) as data:
        if assignment.train.columns:
            found["train"] = known.get("train") or _of_replica(
                _as_described(data, "train", key, assignment), assignment
            )
        if evaluates:
            found["heldout"] = known.get("heldout") or _as_described(data, "heldout", key, assignment)
        for dataset in found.values():
            len(dataset)  # what is read on first use is read here
    _check_holding(assignment, found)
    return found


def _of_replica(data: Dataset, assignment: Assignment) -> Dataset:
    return data if assignment.replica is None else ReplicaSamples(data, assignment.replica)


def _check_holding(assignment: Assignment, found: Mapping[str, Dataset]) -> None:
    """UserError where this device has not as many samples as all reckon with: their order is of that many."""
    feeding = assignment.view.feeding
    if not found:
        return
    expected = {"train": assignment.train_samples}
    if feeding is not None:
        holder = _holder(assignment)
        expected = {"train": feeding.train[holder], "heldout": feeding.heldout[holder]}
    for split, dataset in found.items():
        count, what = len(dataset), "samples"
        if split == "heldout" and feeding is not None:
            count, what = count // feeding.micro_batch_size, "whole micro-batches"
        if count != expected.get(split, count):
            raise UserError(
                f"data ({split}): this device has {count} {what}, the coordinator's plan was made for {expected[split]}"
            )


def _holder(assignment: Assignment) -> int:
    """The number of the holder on whose data this stage's copy is, among those that feed the chain."""
    feeding, stage = assignment.view.feeding, assignment.view.stage
    assert feeding is not None, "several holders feed the chain"
    return next(copies.index(stage) for copies in feeding.copies if stage in copies)


def _as_described(data: DataSpec, split: Split, key: bytes, assignment: Assignment) -> Dataset:
    """Other devices have compared theirs with what this one described: one other sample and the losses mean nothing."""
    found, expected = load_dataset(data, split), assignment.digests.get(split)
    if expected is not None and blinded(found.fingerprint, key) != expected:
        raise UserError(f"data ({split}): got other samples than this device described: its files have changed since")
    return found


MOST_NAMED = 8  # samples that an error names


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
        """Return which samples a micro-batch is of: any stage can tell, whether it reads data or not. Where several
        holders feed the chain, training samples are numbered through, one holder's after those of another."""
        if item.kind != "train":
            return self._held_out(item, micro_batch).tolist()
        if self._joined is not None:
            return self._joined.indices(self._first(item, micro_batch) // self._size, self._size).tolist()
        return self._order.indices(self._first(item, micro_batch), self._size).tolist()

    def _first(self, item: Item, micro_batch: int) -> int:
        return item.first_sample + micro_batch * self._size

    def _place(self, item: Item, micro_batch: int) -> tuple[SampleOrder, int]:
        """The sample order of the device that reads a training micro-batch, and the position of its first sample."""
        first = self._first(item, micro_batch)
        return (self._order, first) if self._joined is None else self._joined.own(first // self._size, self._size)

    @cached_property
    def _evaluated(self) -> NDArray[np.int64]:
        """Held-out samples of an evaluation that this device reads, in their order."""
        count, feeding = self._assignment.eval_micro_batches, self._assignment.view.feeding
        if feeding is not None:
            count = had_before(feeding.heldout, count)[_holder(self._assignment)]
        return evaluation_rows(self._data["heldout"], count * self._size + self._assignment.eval_rest)

    def _held_out(self, item: Item, micro_batch: int) -> NDArray[np.int64]:
        """Its samples, or their places among those of an evaluation where others read them."""
        first, feeding = self._first(item, micro_batch), self._assignment.view.feeding
        if feeding is not None:
            first = feeder_slot(feeding.heldout, first // self._size).number * self._size
        places = np.arange(first, first + self._size)
        if "heldout" not in self._data:
            return places
        return self._evaluated[np.where(places < len(self._evaluated), places, 0)]  # copies of the first fill up

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
            known = "the held-out data" if "heldout" in self._data else "those that it evaluates"
            split = "the training data" if item.kind == "train" else known
            where += f", samples {', '.join(map(str, samples[:MOST_NAMED]))}{more} of {split}"
        return StepError(error.what, f"{error.reason} ({where})", item.step)
