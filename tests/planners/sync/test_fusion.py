"""Messages of gradients, against every way to cut the layers into messages."""

from __future__ import annotations

from itertools import accumulate, combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.errors import UserError
from isthmus.planners.sync import fused
from isthmus.planners.sync.fusion import sent

seconds = st.floats(0.0, 1.0)


def through_s(
    cuts: tuple[int, ...], ready_s: list[float], wire_s: list[float], latency_s: float, at_once: int
) -> float:
    ended_s: tuple[float, ...] = ()
    for start, end in pairwise((0, *cuts, len(ready_s))):
        ended_s = (*ended_s, sent(ended_s, ready_s[end - 1], sum(wire_s[start:end]), latency_s, at_once))
    return ended_s[-1]


@given(st.lists(st.tuples(seconds, seconds), min_size=1, max_size=7), st.floats(0, 0.5), st.integers(1, 3))
def test_the_plan_takes_what_it_says_and_one_at_a_time_is_exact(
    layers: list[tuple[float, float]], latency_s: float, at_once: int
) -> None:
    ready_s = list(accumulate(backward for backward, _ in layers))
    wire_s = [wire for _, wire in layers]
    cuts = [cut for size in range(len(layers)) for cut in combinations(range(1, len(layers)), size)]
    best_s = min(through_s(cut, ready_s, wire_s, latency_s, 1) for cut in cuts)
    assert fused(ready_s, wire_s, latency_s, 1).through_s == pytest.approx(best_s)
    found = fused(ready_s, wire_s, latency_s, at_once)
    assert [number for message in found.messages for number in message] == list(range(len(layers)))
    assert found.through_s <= best_s * (1 + 1e-9)
    taken = [
        through_s(tuple(m.start for m in found.messages[1:]), ready_s, wire_s, latency_s, n + 1) for n in range(at_once)
    ]
    assert found.through_s == pytest.approx(min(taken))


def test_several_at_once_hide_latency() -> None:
    ready_s, wire_s = [0.1, 0.2, 0.3, 0.4], [1.0, 1.0, 1.0, 1.0]
    assert fused(ready_s, wire_s, 0.5, 1).through_s == pytest.approx(0.4 + 0.5 + 4)  # all in one
    assert fused(ready_s, wire_s, 0.5, 2).through_s == pytest.approx(0.1 + 0.5 + 4)


@pytest.mark.parametrize(("ready_s", "at_once", "told"), [([], 1, "layers: got 0"), ([1.0], 0, "at_once: got 0")])
def test_bad_use(ready_s: list[float], at_once: int, told: str) -> None:
    with pytest.raises(UserError, match=told):
        fused(ready_s, ready_s, 0.0, at_once)
