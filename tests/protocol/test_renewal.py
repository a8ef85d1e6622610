"""When another plan is asked for, and when it is worth the change."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from isthmus.protocol.adaptation import LEAST_GAIN, REST_COSTS, ReplanGain, ReplanPolicy

seconds = st.floats(0.001, 1e4)


@given(seconds, seconds, st.integers(0, 10_000), seconds)
def test_a_change_that_pays_ends_the_run_sooner(now_s: float, then_s: float, steps: int, cost_s: float) -> None:
    gain = ReplanGain(now_s, then_s, steps, cost_s)
    if gain.worth_it:
        assert then_s * steps + cost_s < now_s * steps
        assert then_s < now_s
    else:
        assert then_s * steps + cost_s >= now_s * steps * (1 - LEAST_GAIN) - 1e-6 * now_s * steps


def test_one_question_at_a_time_and_none_without_news() -> None:
    renewal = ReplanPolicy()
    assert not renewal.ask(0.0)
    renewal.changed()
    assert renewal.ask(0.0) and not renewal.ask(1.0)
    renewal.changed()
    assert not renewal.ask(2.0), "the first is not answered yet"
    renewal.answered()
    assert renewal.ask(3.0)


def test_a_question_that_a_new_epoch_overtook_is_asked_again() -> None:
    renewal = ReplanPolicy()
    renewal.changed()
    assert renewal.ask(0.0)
    renewal.began(1.0, 0.0)
    assert renewal.ask(1.0)


@given(st.lists(st.tuples(st.floats(0.1, 100), st.floats(0.1, 50)), min_size=1, max_size=30))
def test_changes_take_a_small_part_of_the_time(changes: list[tuple[float, float]]) -> None:
    """However often figures change."""
    renewal, now_s, spent_s = ReplanPolicy(), 0.0, 0.0
    for cost_s, until_next_s in changes:
        renewal.changed()
        if renewal.ask(now_s):
            renewal.answered()
            spent_s += cost_s
            renewal.began(now_s, cost_s)
        now_s += until_next_s
    last = max(cost_s for cost_s, _ in changes)
    assert spent_s <= now_s / REST_COSTS + last
