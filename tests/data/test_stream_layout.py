"""The order of samples in blocks: each once an epoch, few blocks at once, any position without those before it."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.data import SampleOrder
from isthmus.data.layout import Layout, check_layout, layout_of
from isthmus.errors import UserError

SIZES = [7, 7, 3, 12, 1, 7, 7, 30, 2]
GOLDEN = [1, 3, 4, 0, 2, 7, 6, 5, 8, 9]


def order_of(sizes: list[int], window: int, seed: int = 3, holder: int = 0) -> SampleOrder:
    return SampleOrder(sum(sizes), seed, layout=layout_of(sizes, window), holder=holder)


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    window=st.integers(1, 14),
    seed=st.integers(0, 5),
    start=st.integers(0, 200),
    count=st.integers(0, 60),
)
def test_any_range_is_a_piece_of_the_whole(sizes: list[int], window: int, seed: int, start: int, count: int) -> None:
    order = order_of(sizes, window, seed)
    whole = order.indices(0, start + count)
    assert np.array_equal(order_of(sizes, window, seed).indices(start, count), whole[start:])
    epoch = order.indices(0, sum(sizes))
    assert sorted(epoch.tolist()) == list(range(sum(sizes)))


def test_a_window_mixes_its_blocks_alone() -> None:
    order, block_of = order_of(SIZES, 3), np.repeat(np.arange(len(SIZES)), SIZES)
    seen = block_of[order.indices(0, sum(SIZES))]
    blocks = list(dict.fromkeys(seen.tolist()))
    first = seen[: sum(SIZES[b] for b in set(blocks[:3]))]
    assert len(set(first.tolist())) == 3 and not set(first.tolist()) & set(seen[len(first) :].tolist())
    assert np.any(np.diff(first) != 0) and list(first) != sorted(first)


def test_epochs_seeds_and_holders_have_orders_of_their_own() -> None:
    size = sum(SIZES)
    order = order_of(SIZES, 3)
    others = [order.indices(size, size)]
    others += [order_of(SIZES, 3, seed, holder).indices(0, size) for seed, holder in ((4, 0), (3, 1))]
    assert not any(np.array_equal(order.indices(0, size), other) for other in others)


def test_the_order_never_changes() -> None:
    assert order_of([5, 5], 1, seed=7).indices(0, 10).tolist() == GOLDEN


def test_unshuffled_it_is_the_natural_order() -> None:
    order = SampleOrder(6, 0, shuffle=False, layout=layout_of([4, 2], 1))
    assert order.indices(4, 4).tolist() == [4, 5, 0, 1]


def test_a_layout_travels_as_runs_of_equal_blocks() -> None:
    layout = layout_of([5] * 1000 + [2], 8)
    assert layout.runs == ((1000, 5), (1, 2)) and layout.samples == 5002
    assert msgspec.json.decode(msgspec.json.encode(layout), type=Layout) == layout


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (Layout(runs=(), window=1), "got 0 runs"),
        (Layout(runs=((1, 4),), window=0), "window 0"),
        (Layout(runs=((1, 0), (1, 4)), window=1), "a run without samples"),
        (Layout(runs=((1 << 40, 1),), window=1), "blocks, expected at most"),
        (Layout(runs=((2, 3),), window=1), "blocks of 6 samples in all, expected 4"),
    ],
)
def test_what_no_data_have_is_refused(layout: Layout, words: str) -> None:
    with pytest.raises(UserError, match=words):
        check_layout(layout, 4)


def test_an_order_of_another_size_is_refused() -> None:
    with pytest.raises(UserError, match="got size 5, expected the layout's 4"):
        SampleOrder(5, 0, layout=layout_of([4], 1))
