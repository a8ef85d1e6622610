"""The data that a device reads for its stage, which stay on it."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from isthmus.data import Dataset, Split, load_dataset
from isthmus.data.allowed import allowed
from isthmus.errors import UserError
from isthmus.runtime.identity.blinded_digests import blinded
from isthmus.runtime.messages.assignment import Assignment


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
