"""What a coordinator is notified of data, and what it takes for a description."""

from __future__ import annotations

import re

import msgspec
import pytest

from isthmus.data import ColumnSpec, DataSpec, load_dataset
from isthmus.data.description import DataDescription, check_description, describe, difference
from isthmus.errors import UserError

DIGITS = DataSpec(kind="digits", options={"flat": True})
GOOD = DataDescription(columns={"x": ColumnSpec(dtype="float32", shape=(4,))}, train=10, digests={"train": "a" * 64})


def changed(**changes: object) -> DataDescription:
    return msgspec.structs.replace(GOOD, **changes)


def with_column(**changes: object) -> DataDescription:
    return changed(columns={"x": msgspec.structs.replace(GOOD.columns["x"], **changes)})


def test_it_says_what_the_sets_are_like_and_no_more() -> None:
    found = describe(DIGITS, heldout=True, conceal=lambda fingerprint: "ab" * 32)
    train, heldout = load_dataset(DIGITS, "train"), load_dataset(DIGITS, "heldout")
    assert found.columns == dict(train.columns)
    assert (found.train, found.heldout) == (len(train), len(heldout))
    assert found.digests == {"train": "ab" * 32, "heldout": "ab" * 32}
    check_description(found, heldout=True)
    alone = describe(DIGITS, heldout=False)
    assert (alone.heldout, alone.digests) == (0, {})


@pytest.mark.parametrize(
    ("hostile", "words"),
    [
        (changed(columns={}), "columns: got 0"),
        (changed(columns={f"c{n}": GOOD.columns["x"] for n in range(257)}), "columns: got 257"),
        (changed(columns={"x" * 201: GOOD.columns["x"]}), "a name of 201 characters"),
        (changed(columns={"a\x1b[2J": GOOD.columns["x"]}), "that can be printed"),
        (with_column(dtype="complex128"), "columns.x: unknown dtype 'complex128'"),
        (with_column(shape=(0,)), "columns.x: got shape [0]"),
        (with_column(shape=(-1, 2)), "columns.x: got shape [-1, 2]"),
        (with_column(shape=(1,) * 17), "expected up to 16 dims"),
        (with_column(shape=(1 << 20, 1 << 20)), "bytes per sample"),
        (with_column(shape=(1 << 40,)), "columns.x: got shape"),
        (with_column(limit=0), "columns.x: got limit 0"),
        (changed(train=0), "train: got 0 samples"),
        (changed(train=1 << 40), "train: got 1099511627776 samples"),
        (changed(heldout=-1), "heldout: got -1 samples"),
        (changed(digests={"train": "zz"}), "digests.train: got 2 characters"),
    ],
)
def test_what_no_data_are_like_is_refused(hostile: DataDescription, words: str) -> None:
    with pytest.raises(UserError, match=re.escape(words)):
        check_description(hostile, heldout=False)


def test_held_out_samples_that_a_job_needs_must_be_there() -> None:
    check_description(GOOD, heldout=False)
    with pytest.raises(UserError, match="heldout: got 0 samples, expected 1"):
        check_description(GOOD, heldout=True)


def test_what_differs_between_two_holders_is_named() -> None:
    assert difference(GOOD, GOOD, counts=True) is None
    assert difference(GOOD, with_column(dtype="float64"), counts=True) == "column 'x': float32 [4] and float64 [4]"
    assert difference(GOOD, changed(train=12), counts=True) == "10 and 12 training samples"
    assert difference(GOOD, changed(train=12), counts=False) is None
    lacking = changed(columns={"y": ColumnSpec(dtype="int64", limit=10)})
    assert difference(GOOD, lacking, counts=True) == "column 'x': float32 [4] and none"
