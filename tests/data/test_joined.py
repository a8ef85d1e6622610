"""Whose turn it is, and the joined data of several holders."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isthmus.data import ColumnSpec, DataSpec, JoinedDataset, JoinedOrder, SampleOrder, load_dataset
from isthmus.data.dataset import joined_columns
from isthmus.errors import UserError
from isthmus.plans.schedule import feeder_slot

COUNTS = st.lists(st.integers(0, 40), min_size=1, max_size=5).filter(any).map(tuple)


@given(COUNTS, st.integers(0, 120))
def test_turns_are_those_of_a_walk_from_the_first(counts: tuple[int, ...], number: int) -> None:
    had = [0] * len(counts)
    for _ in range(number):
        due = min((k for k, w in enumerate(counts) if w), key=lambda k: (Fraction(2 * had[k] + 1, counts[k]), k))
        had[due] += 1
    found = feeder_slot(counts, number)
    assert counts[found.holder] and found.number == had[found.holder]


@given(COUNTS)
def test_after_as_many_turns_as_samples_each_holder_has_had_all_of_its_own(counts: tuple[int, ...]) -> None:
    found = Counter(feeder_slot(counts, number).holder for number in range(sum(counts)))
    assert [found[holder] for holder in range(len(counts))] == list(counts)


def test_every_sample_comes_once_an_epoch_by_its_place_in_the_joined_data() -> None:
    order = JoinedOrder((12, 4), seed=3)
    one = np.concatenate([order.indices(number, 2) for number in range(8)])
    assert sorted(one.tolist()) == list(range(16))
    assert JoinedOrder((12,), seed=3).indices(2, 4).tolist() == SampleOrder(12, 3).indices(8, 4).tolist()


def test_joined_samples_are_those_of_the_parts() -> None:
    spec = DataSpec(kind="digits", options={"flat": True})
    parts = [load_dataset(spec, "train"), load_dataset(spec, "heldout")]
    whole = JoinedDataset(parts)
    assert len(whole) == len(parts[0]) + len(parts[1])
    found = whole.batch([len(parts[0]), 0], ["labels"])["labels"]
    expected = [parts[1].batch([0], ["labels"])["labels"], parts[0].batch([0], ["labels"])["labels"]]
    assert torch.equal(found, torch.cat(expected))


def test_columns_may_differ_in_their_limits_alone() -> None:
    small, large = ({"y": ColumnSpec(dtype="int64", limit=limit)} for limit in (3, 7))
    assert joined_columns({"a": small, "b": large})["y"].limit == 7
    with pytest.raises(UserError, match="column 'y': b has"):
        joined_columns({"a": small, "b": {"y": ColumnSpec(dtype="int32", limit=3)}})
    with pytest.raises(UserError, match="b has columns x, a has y"):
        joined_columns({"a": small, "b": {"x": small["y"]}})
