"""Exact sums: any order and grouping gives the same bits, close to the real mean."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isthmus.errors import DivergedUpdate, PeerError, UserError
from isthmus.federated import ClientUpdate
from isthmus.federated import partial as exact_sums
from isthmus.federated.partial import (
    AggregationWeights,
    DeviceSum,
    FixedSum,
    PartialSum,
    parallel_chunks,
    scale_exponent,
)

NUMBERS = st.lists(st.floats(-1e4, 1e4, width=32), min_size=3, max_size=3)


@given(summands=st.lists(st.tuples(NUMBERS, st.integers(1, 500)), min_size=1, max_size=12), data=st.data())
def test_any_grouping_gives_the_same_bits(summands: list[tuple[list[float], int]], data: st.DataObject) -> None:
    exponent = scale_exponent(sum(w for _, w in summands))
    whole = FixedSum(3, exponent)
    for values, weight in summands:
        whole.add(torch.tensor(values), weight)
    order = data.draw(st.permutations(range(len(summands))))
    cut = data.draw(st.integers(0, len(summands)))
    parts = [FixedSum(3, exponent), FixedSum(3, exponent)]
    for place, number in enumerate(order):
        values, weight = summands[number]
        parts[place < cut].add(torch.tensor(values), weight)
    parts[0].merge(parts[1].total)
    assert torch.equal(parts[0].total, whole.total)
    mean = np.average(np.array([v for v, _ in summands]), axis=0, weights=[w for _, w in summands])
    found = whole.over(sum(w for _, w in summands), torch.float64).numpy()
    assert np.abs(found - mean).max() <= 2.0**-34 * len(summands)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e9])
@pytest.mark.parametrize("at", [0, 150_000])
def test_a_bad_number_is_refused_and_leaves_nothing(bad: float, at: int) -> None:
    term = torch.linspace(-1, 1, 200_000)
    total = FixedSum(200_000, 0)
    total.add(term)
    before = total.total.clone()
    wrong = term.clone()
    wrong[at] = bad
    with pytest.raises(PeerError, match="expected numbers within"):
        total.add(wrong)
    assert torch.equal(total.total, before)


@given(summands=st.lists(NUMBERS, min_size=1, max_size=9), weight=st.integers(1, 500))
def test_rows_at_once_are_the_same_bits_as_one_by_one(summands: list[list[float]], weight: int) -> None:
    exponent = scale_exponent(weight * len(summands))
    alone, at_once = FixedSum(3, exponent), FixedSum(3, exponent)
    for term in summands:
        alone.add(torch.tensor(term), weight)
    at_once.add_rows(torch.tensor(summands), weight)
    assert torch.equal(alone.total, at_once.total)


@pytest.mark.parametrize("bad", [math.nan, -math.inf, 1e9])
@pytest.mark.parametrize("at", [0, 150_000])
def test_rows_of_which_one_is_bad_leave_nothing(bad: float, at: int) -> None:
    rows = torch.linspace(-1, 1, 200_000).expand(5, -1).clone()
    rows[3, at] = bad
    total = FixedSum(200_000, 0)
    with pytest.raises(PeerError, match="among 5 summands"):
        total.add_rows(rows)
    assert not total.total.any()


def test_rows_too_large_for_doubles_are_the_same_bits_too() -> None:
    rows = torch.tensor([[2.0**14 + 2.0**-30, -3.0], [2.0**14, 5.0]], dtype=torch.float64).repeat(40, 1)
    alone, at_once = FixedSum(2, 0), FixedSum(2, 0)
    for row in rows:
        alone.add(row)
    at_once.add_rows(rows)
    assert torch.equal(alone.total, at_once.total)
    assert at_once.bound >= 2.0**53


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("others", [0, 1, 3])
@pytest.mark.parametrize("settled", [0, 1])
def test_merged_sums_are_read_where_they_lie(own: bool, others: int, settled: int) -> None:
    size = 150_000
    whole, parts = FixedSum(size, 0), [FixedSum(size, 0) for _ in range(others)]
    expected = torch.zeros(size, dtype=torch.int64)
    for total in [*([whole] if own else []), *parts]:
        total.add(torch.randn(size))
        expected += total.total
    for number, part in enumerate(parts):
        whole.merge(part.total)
        if number < settled:
            whole.settle()
            part.total.fill_(7)  # it is read
    assert torch.equal(whole.over(0.5, torch.float64), expected.double() * 2.0**-35)
    assert not whole.total.any()


def test_a_bound_that_is_none_is_refused() -> None:
    for bound in (-1.0, math.nan, math.inf):
        with pytest.raises(PeerError, match="expected a bound"):
            FixedSum(1, 0).check(torch.zeros(1, dtype=torch.int64), bound)


@given(size=st.integers(0, 100), align=st.integers(1, 9), least=st.integers(1, 20))
def test_work_is_spread_over_all_numbers(size: int, align: int, least: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact_sums, "LEAST", least)
        patch.setattr("os.sched_getaffinity", lambda _: range(3))
        seen: list[tuple[int, int]] = []
        parallel_chunks(lambda start, stop: seen.append((start, stop)), size, align)
        places = [place for start, stop in sorted(seen) for place in range(start, stop)]
        assert places == list(range(size))
        assert len(seen) <= 3
        assert all(start % align == 0 for start, _ in seen)

        def fails(start: int, stop: int) -> None:
            if stop == size:
                raise ValueError("the last")

        if size:
            with pytest.raises(ValueError, match="the last"):
                parallel_chunks(fails, size, align)


def test_a_sum_without_room_is_refused() -> None:
    total = FixedSum(1, 0)
    with pytest.raises(PeerError, match="no room"):
        for _ in range(10_000):
            total.add(torch.tensor([3e4]))


def test_a_refused_update_leaves_nothing_of_its_other_values() -> None:
    partial = PartialSum({"a": "sum", "b": "mean"})
    partial.begin(10, 2)
    partial.fold(0, ClientUpdate(values={"a": torch.ones(4), "b": torch.ones(4)}), 3)
    before = {name: t.clone() for name, t in partial.tensors().items()}
    with pytest.raises(PeerError, match="client 1: value 'b'"):
        partial.fold(1, ClientUpdate(values={"a": torch.ones(4), "b": torch.tensor([1, 2, math.nan, 4])}), 3)
    assert all(torch.equal(t, before[name]) for name, t in partial.tensors().items())
    assert partial.clients == 1


@pytest.mark.parametrize(
    ("update", "message"),
    [
        (ClientUpdate(values={"a": torch.ones(1), "c": torch.ones(1)}), "'c' has no declared operation, declared: a"),
        (ClientUpdate(values={}), "'a' is declared, but a client did not return it"),
    ],
)
def test_names_that_do_not_match_the_declaration(update: ClientUpdate, message: str) -> None:
    with pytest.raises(UserError, match=message):
        PartialSum({"a": "sum"}).fold(0, update, 1)


@pytest.mark.parametrize("weight", [-1.0, math.nan, 11.0])
def test_a_weight_out_of_range_is_refused(weight: float) -> None:
    partial = PartialSum({"a": "weighted_mean"})
    partial.begin(10, 2)
    with pytest.raises(PeerError, match="expected 0 to 10"):
        partial.fold(0, ClientUpdate(values={"a": torch.ones(1)}, weight=weight), 5)


def test_a_mean_by_small_weights_is_one() -> None:
    partial = PartialSum({"delta": "weighted_mean"})
    partial.begin(1, 2)
    for client, weight in enumerate((1.3e-4, 2.7e-4)):
        partial.fold(client, ClientUpdate(values={"delta": torch.ones(3)}, weight=weight), 1)
    assert (partial.combined(torch.float64)["delta"] - 1).abs().max() < 1e-6


def test_collected_values_come_in_the_order_of_clients() -> None:
    ours, theirs = PartialSum({"a": "collect", "n": "sum"}), PartialSum({"a": "collect", "n": "sum"})
    for partial in (ours, theirs):
        partial.begin(14, 3)
    for partial, client in ((ours, 7), (theirs, 2), (ours, 5)):
        partial.fold(client, ClientUpdate(values={"a": torch.full((2,), float(client)), "n": torch.ones(1)}), client)
    ours.check(theirs.tensors(), {2}, theirs.weights())
    ours.merge(theirs.tensors(), theirs.weights())
    combined = ours.combined(torch.float32)
    assert combined["a"].tolist() == [[2, 2], [5, 5], [7, 7]]
    assert combined["n"].tolist() == [3]
    assert ours.cohort(10).weights == (2, 5, 7)


ONE = 1 << 20
GOOD = {"n": torch.ones(1, dtype=torch.int64), "3/a": torch.ones(2)}


@pytest.mark.parametrize(
    ("tensors", "part", "message"),
    [
        (
            {"n": GOOD["n"]},
            AggregationWeights(clients=1, total=ONE, each={3: ONE}),
            "sent the values 'n', expected '3/a', 'n'",
        ),
        (GOOD | {"x": torch.ones(1)}, AggregationWeights(clients=1, total=ONE, each={3: ONE}), "sent the values .*'x'"),
        (GOOD | {"n": torch.ones(1)}, AggregationWeights(clients=1, total=ONE, each={3: ONE}), "got torch.float32"),
        (
            GOOD | {"n": torch.ones(2, dtype=torch.int64)},
            AggregationWeights(clients=1, total=ONE, each={3: ONE}),
            "got 2 numbers",
        ),
        (GOOD | {"n": torch.tensor([1 << 62])}, AggregationWeights(clients=1, total=ONE, each={3: ONE}), "no room"),
        (
            GOOD | {"3/a": torch.tensor([1.0, math.nan])},
            AggregationWeights(clients=1, total=ONE, each={3: ONE}),
            "finite",
        ),
        (GOOD, AggregationWeights(clients=2, total=ONE, each={3: ONE}), "sums of 2 clients, expected 1"),
        (GOOD, AggregationWeights(clients=1, total=-1, each={3: -1}), "weight of -"),
        (GOOD, AggregationWeights(clients=1, total=11 * ONE, each={3: 11 * ONE}), "weight of 11, expected 0 to 10"),
        (GOOD, AggregationWeights(clients=1, total=ONE, each={4: ONE}), "expected those of its clients"),
    ],
)
def test_sums_that_do_not_fit_are_refused_and_leave_nothing(
    tensors: dict[str, torch.Tensor], part: AggregationWeights, message: str
) -> None:
    partial = PartialSum({"a": "collect", "n": "sum"}, {"n": 1, "a": 2})
    partial.begin(10, 2)
    partial.fold(1, ClientUpdate(values={"a": torch.ones(2), "n": torch.ones(1)}), 1)
    before = {name: value.clone() for name, value in partial.tensors().items()}
    with pytest.raises(PeerError, match=message):
        partial.check(tensors, {3}, part)
    after = partial.tensors()
    assert before.keys() == after.keys() and all(torch.equal(after[name], before[name]) for name in before)
    partial.check(GOOD, {3}, AggregationWeights(clients=1, total=ONE, each={3: ONE}))


LARGE = st.floats(-6e7, 6e7) | st.floats(-1e-3, 1e-3)


@given(summands=st.lists(st.lists(LARGE, min_size=3, max_size=3), min_size=1, max_size=9), weight=st.integers(1, 500))
def test_large_numbers_are_added_to_the_same_bits_in_any_way(summands: list[list[float]], weight: int) -> None:
    """Above 2^15 a double has no room for the magic number; a number's bits do not depend on its neighbours."""
    exponent = scale_exponent(weight * len(summands))
    scale = weight * 2.0 ** (36 - exponent)
    expected = [sum(round(row[column] * scale) for row in summands) for column in range(3)]
    ways = [FixedSum(3, exponent) for _ in range(3)]
    for row in summands:
        ways[0].add(torch.tensor(row, dtype=torch.float64), weight)
    ways[1].add_rows(torch.tensor(summands, dtype=torch.float64), weight)
    device = DeviceSum(3, exponent, torch.device("cpu"), lambda value: value)
    device.add_rows(torch.tensor(summands, dtype=torch.float64), weight)
    for column in range(3):
        part = FixedSum(1, exponent)
        for row in summands:
            part.add(torch.tensor(row[column : column + 1], dtype=torch.float64), weight)
        assert part.total.tolist() == expected[column : column + 1]
    assert ways[0].total.tolist() == ways[1].total.tolist() == device.total.tolist() == expected
    ways[0].add(torch.tensor(summands[0], dtype=torch.float64), -weight)
    ways[2].add(torch.zeros(3))
    for row in summands[1:]:
        ways[2].add(torch.tensor(row, dtype=torch.float64), weight)
    assert torch.equal(ways[0].total, ways[2].total)


def test_what_has_no_room_is_refused_with_the_range() -> None:
    total = FixedSum(2, 3)
    total.add(torch.tensor([1.0, 1.0]))
    with pytest.raises(PeerError, match=r"a sum of 5.4e\+08 has no room in 64 bits"):
        for _ in range(2):
            total.add(torch.tensor([2.7e8, 5.0], dtype=torch.float64))
    assert total.total.tolist() == [270_000_001 * 2**33, 6 * 2**33], "the second is taken back"
    with pytest.raises(
        DivergedUpdate, match=r"got 1e\+09, expected numbers within 2.68e\+08, the range of the exact sum"
    ):
        total.add(torch.tensor([0.0, 1e9]), 2.0)
