"""A link that was slow, and is avoided since, is tried again, at set times."""

from __future__ import annotations

import itertools

from isthmus.protocol.adaptation import MOST_S, LinkReprobe

LINK = ("a", "b")


def test_a_link_that_stays_slow_is_tried_ever_less_often() -> None:
    retries, tried = LinkReprobe(60.0), list[float]()
    for second in range(12_000):
        if retries.due([LINK], float(second)) is not None:
            tried.append(second)
            retries.tried(LINK, float(second))
    assert tried[:4] == [60, 180, 420, 900]
    assert max(b - a for a, b in itertools.pairwise(tried)) == MOST_S


def test_one_at_a_time_and_the_longest_due_first() -> None:
    retries = LinkReprobe(10.0)
    assert retries.due([("x", "y")], 0.0) is None
    assert retries.due([("x", "y"), LINK], 5.0) is None
    assert retries.due([("x", "y"), LINK], 20.0) == ("x", "y")
    assert retries.due([("x", "y"), LINK], 21.0) is None, "a try is under way"
    retries.tried(("x", "y"), 22.0)
    assert retries.due([("x", "y"), LINK], 23.0) == LINK


def test_a_link_that_is_used_again_begins_anew() -> None:
    retries = LinkReprobe(10.0)
    retries.due([LINK], 0.0)
    assert retries.due([], 9.0) is None
    assert retries.due([LINK], 11.0) is None
    assert retries.due([LINK], 21.0) == LINK
