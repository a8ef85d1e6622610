"""The data that a device reads for its stage, which stay on it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import cast

from isthmus.data import Dataset, DataSpec, Split, load_dataset
from isthmus.errors import UserError
from isthmus.runtime.messages.assignment import Assignment


def stage_data(
    assignment: Assignment, *, foreign: bool, known: Mapping[str, Dataset] = {}
) -> dict[str, Dataset]:  # fmt: skip
    """The sets that a stage with columns needs; no other stage opens any. With `foreign`, somebody else's coordinator
    asks: it may only name what lies in this device's own data folder. `known` are sets that were opened before.

    UserError for data that are not here, that it may not ask for, or that differ from the coordinator's.
    """
    if foreign:
        refuse_paths(assignment.data)
    found: dict[str, Dataset] = {}
    if assignment.train.columns:
        found["train"] = known.get("train") or _same(assignment, "train")
    if assignment.evaluates and assignment.evaluation.columns:
        found["heldout"] = known.get("heldout") or _same(assignment, "heldout")
    return found


def _same(assignment: Assignment, split: Split) -> Dataset:
    """Devices read their own copies: one other sample and the losses mean nothing."""
    found, expected = load_dataset(assignment.data, split), assignment.fingerprints.get(split)
    if expected is not None and found.fingerprint != expected:
        raise UserError(
            f"data ({split}): this device has {found.fingerprint[:12]}, the coordinator {expected[:12]}: other files, "
            "or for `stdlib` another version of Python"
        )
    return found


def refuse_paths(data: DataSpec) -> None:
    """UserError for options that name something outside of the folder where this process runs."""
    for name, text in _texts("data", data.options):
        if text.startswith("~") or PurePath(text).is_absolute() or ".." in PurePath(text).parts:
            raise UserError(
                f"{name}: got {text!r}, expected a relative path: devices of a fleet read from the folder that their "
                "owner named (`isthmus join --data`)"
            )


def _texts(name: str, value: object) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield name, value
    elif isinstance(value, Mapping):
        for key, inner in cast("Mapping[object, object]", value).items():
            yield from _texts(f"{name}.{key}", inner)
    elif isinstance(value, Sequence):
        for inner in cast("Sequence[object]", value):
            yield from _texts(name, inner)
