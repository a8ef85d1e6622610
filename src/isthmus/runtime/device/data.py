"""The data that a device reads for its stage, which stay on it."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import cast

from isthmus.data import Dataset, DataSpec, Split, load_dataset
from isthmus.data.within import check_pattern_within, confined_to
from isthmus.errors import UserError
from isthmus.runtime.messages.assignment import Assignment


def stage_data(
    assignment: Assignment, *, foreign: bool, kinds: Collection[str] | None = None, known: Mapping[str, Dataset] = {}
) -> dict[str, Dataset]:  # fmt: skip
    """The sets that a stage with columns needs; no other stage opens any. With `foreign`, somebody else's coordinator
    asks: it may only name what lies in this device's own data folder. `kinds` are those that the device's owner allows,
    None for all; `known` are sets that were opened before.

    UserError for data that are not here, that it may not ask for, or that differ from the coordinator's.
    """
    found: dict[str, Dataset] = {}
    evaluates = assignment.evaluates and assignment.evaluation.columns
    if assignment.train.columns or evaluates:
        check_kind(assignment.data, kinds)
    with _own_folder(assignment.data) if foreign else contextlib.nullcontext():
        if assignment.train.columns:
            found["train"] = known.get("train") or _same(assignment, "train")
        if evaluates:
            found["heldout"] = known.get("heldout") or _same(assignment, "heldout")
        for dataset in found.values():
            len(dataset)  # what is read on first use is read here
    return found


@contextlib.contextmanager
def _own_folder(data: DataSpec) -> Generator[None]:
    """UserError where the options lead out of the folder where this process runs, by themselves or by a link in it."""
    refuse_paths(data)
    with confined_to(Path.cwd()):
        for _, text in _texts("data", data.options):
            check_pattern_within(text)
        yield


def _same(assignment: Assignment, split: Split) -> Dataset:
    """Devices read their own copies: one other sample and the losses mean nothing."""
    found, expected = load_dataset(assignment.data, split), assignment.fingerprints.get(split)
    if expected is not None and found.fingerprint != expected:
        raise UserError(
            f"data ({split}): this device has {found.fingerprint[:12]}, the coordinator {expected[:12]}: other files, "
            "or for `stdlib` another version of Python"
        )
    return found


def check_kind(data: DataSpec, allowed: Collection[str] | None) -> None:
    """UserError for a kind that this device's owner does not allow. Nothing of it has been imported."""
    if allowed is not None and data.kind not in allowed:
        raise UserError(
            f"data.kind: got {data.kind!r}, expected one of: {', '.join(sorted(allowed))}: the owner of this device "
            "allows no others (`isthmus join --data-kinds`)"
        )


def refuse_paths(data: DataSpec) -> None:
    """UserError for options that name something outside of the folder where this process runs."""
    for name, text in _texts("data", data.options):
        if "\0" in text or text.startswith("~") or PurePath(text).is_absolute() or ".." in PurePath(text).parts:
            raise UserError(
                f"{name}: got {text!r}, expected a relative path: devices of a fleet read from the folder that their "
                "owner named (`isthmus join --data`)"
            )


def _texts(name: str, value: object) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield name, value
    elif isinstance(value, Mapping):
        for key, inner in cast("Mapping[object, object]", value).items():
            yield from _texts(name, key)
            yield from _texts(f"{name}.{key}", inner)
    elif isinstance(value, Sequence):
        for inner in cast("Sequence[object]", value):
            yield from _texts(name, inner)
