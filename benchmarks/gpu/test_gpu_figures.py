"""Shares of copies and sends beside other work, on traces whose shares are plain to see."""

from __future__ import annotations

import random

import pytest
from overlapping import common, copies_beside_work, overlap, union

from isthmus.trace import Span, Trace


def trace(*spans: tuple[str, str, float, float]) -> Trace:
    made = (Span(device=d, track=t, name="x", start_s=a, end_s=b, step=1) for d, t, a, b in spans)  # type: ignore[arg-type]
    return Trace(source="runtime", run="test", spans=tuple(made))


def test_unions_and_what_they_have_in_common_by_brute_force() -> None:
    draw = random.Random(0)
    for _ in range(50):
        a, b = ([(s, s + draw.randint(0, 4)) for s in draw.choices(range(20), k=4)] for _ in range(2))
        cells = [{t for start, end in given for t in range(start, end)} for given in (a, b)]
        assert common(union(a), union(b)) == len(cells[0] & cells[1])


@pytest.mark.parametrize(
    ("spans", "share"),
    [
        ([("a", "compute", 0, 4), ("a", "send", 1, 3)], 1.0),
        ([("a", "compute", 0, 2), ("a", "send", 2, 4)], 0.0),
        ([("a", "compute", 0, 2), ("a", "send", 1, 9)], 0.5),
        ([("a", "compute", 0, 2), ("b", "send", 0, 2), ("b", "compute", 2, 4)], 0.0),
        ([("a", "compute", 0, 2), ("a", "send", 0, 2), ("b", "compute", 0, 2), ("b", "send", 2, 4)], 0.5),
        ([("a", "compute", 0, 2)], None),
    ],
)
def test_sends(spans: list[tuple[str, str, float, float]], share: float | None) -> None:
    assert overlap(trace(*spans)) == share
    assert copies_beside_work(trace(*spans)) is None


def test_copies_beside_computing_or_a_link() -> None:
    assert copies_beside_work(trace(("a", "down", 0, 4), ("a", "compute", 0, 1), ("a", "send", 3, 6))) == 0.5


def test_the_first_step_does_not_count() -> None:
    first = Span(device="a", track="send", name="x", start_s=0, end_s=9, step=0)
    assert overlap(Trace(source="runtime", run="test", spans=(first,))) is None
