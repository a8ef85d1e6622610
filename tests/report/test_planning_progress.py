"""Planning elsewhere than on a terminal: a plain line now and then, none for a short search."""

from __future__ import annotations

import io

from rich.console import Console

from isthmus.report import PlanningProgress


def lines(seconds: float, each_s: float = 0.5) -> list[str]:
    out, now = io.StringIO(), [0.0]
    with PlanningProgress(Console(file=out, width=40), lambda: now[0]) as progress:
        progress.planning("auto, 4 micro-batches")
        progress.part("one pipeline")
        while now[0] < seconds:
            now[0] += each_s
            progress.looked_at(500)
            progress.show()
            if now[0] == 6.0:
                progress.found(0.25)
        assert not progress.stopped()
        progress.end()
        assert progress.stopped()
    assert all(c.isprintable() or c == "\n" for c in out.getvalue())
    return out.getvalue().splitlines()


def test_a_short_search_says_nothing() -> None:
    assert lines(4.0) == []


def test_a_long_one_says_a_line_now_and_then() -> None:
    assert lines(16.0) == [
        "planning: 5,000 plans tried, no plan yet, 5 s (auto, 4 micro-batches, one pipeline)",
        "planning: 15,000 plans tried, best step so far 250 ms, 15 s (auto, 4 micro-batches, one pipeline)",
    ]


def test_who_never_looks_up_cannot_be_ended_gently() -> None:
    with PlanningProgress(Console(file=io.StringIO())) as progress:
        progress.planning("deaf, 4 micro-batches")
        assert not progress.end()
