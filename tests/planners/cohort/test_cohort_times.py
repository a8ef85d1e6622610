"""The fitted lines T = N t_k + b_k."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.errors import UserError
from isthmus.planners.cohort import TimeHistory, equal_times, fit_times, parrot, uniform

T = np.array([0.01, 0.03, 0.02])
B = np.array([0.5, 0.2, 0.9])


def recorded(seed: int, rounds: int, noise: float, drift: float = 0.0) -> TimeHistory:
    """Eight clients of each of three executors a round; drift: how much slower they get per round, as a share."""
    random = np.random.default_rng(seed)
    count = rounds * 24
    number, executors = np.repeat(np.arange(rounds), 24), np.tile(np.arange(3), rounds * 8)
    sizes = random.integers(20, 400, count).astype(np.float64)
    seconds = (sizes * T[executors] + B[executors]) * (1 + drift * number) * random.uniform(1 - noise, 1 + noise, count)
    order = random.permutation(count)
    return TimeHistory(rounds=number[order], executors=executors[order], sizes=sizes[order], seconds=seconds[order])


@given(st.integers(0, 1000), st.integers(1, 6), st.one_of(st.none(), st.integers(1, 8)))
def test_lines_equal_numpys_on_noisy_rounds_and_windows(seed: int, rounds: int, window: int | None) -> None:
    history = recorded(seed, rounds, noise=0.1)
    fitted = fit_times(history, 3, window_rounds=window)
    for executor in range(3):
        used = history.executors == executor
        if window is not None:
            used &= history.rounds >= rounds - window
        slope, fixed = np.polyfit(history.sizes[used], history.seconds[used], 1)
        if fixed >= 0:
            assert fitted.seconds_per_sample[executor] == pytest.approx(slope)
            assert fitted.fixed_s[executor] == pytest.approx(fixed, abs=1e-9)
        else:
            assert fitted.fixed_s[executor] == 0


def test_exact_times_give_exact_lines() -> None:
    fitted = fit_times(recorded(0, 3, noise=0.0), 3)
    assert fitted.seconds_per_sample == pytest.approx(T)
    assert fitted.fixed_s == pytest.approx(B)
    assert fitted.problem(np.array([100.0])).client_s()[0] == pytest.approx(100 * T + B)


def test_a_window_follows_executors_that_slow_down() -> None:
    history = recorded(2, 10, noise=0.02, drift=0.5)
    now = T * (1 + 0.5 * 9)
    recent = fit_times(history, 3, window_rounds=1).seconds_per_sample
    assert recent == pytest.approx(now, rel=0.1)
    assert (fit_times(history, 3).seconds_per_sample < 0.8 * now).all()


def test_an_executor_outside_the_window_keeps_its_last_line() -> None:
    history = TimeHistory(
        rounds=np.array([0, 0, 5, 5]),
        executors=np.array([1, 1, 0, 0]),
        sizes=np.array([1.0, 2.0, 1.0, 2.0]),
        seconds=np.array([3.0, 5.0, 1.0, 1.5]),
    )
    fitted = fit_times(history, 2, window_rounds=2)
    assert fitted.seconds_per_sample == pytest.approx([0.5, 2.0])
    assert fitted.fixed_s == pytest.approx([0.5, 1.0])


@given(st.lists(st.tuples(st.integers(0, 6), st.floats(0.0, 9.0)), min_size=1, max_size=8))
def test_no_line_with_coefficients_from_0_on_is_nearer(points: list[tuple[int, float]]) -> None:
    sizes, seconds = np.array([float(x) for x, _ in points]), np.array([y for _, y in points])
    zeros = np.zeros(len(points), dtype=np.int64)
    fitted = fit_times(TimeHistory(rounds=zeros, executors=zeros, sizes=sizes, seconds=seconds), 1)
    t, b = float(fitted.seconds_per_sample[0]), float(fitted.fixed_s[0])
    assert t >= 0 and b >= 0

    def squares(t: float, b: float) -> float:
        return float(((sizes * t + b - seconds) ** 2).sum())

    around = [(t + dt, b + db) for dt in (-1e-3, 0.0, 1e-3) for db in (-1e-3, 0.0, 1e-3)]
    assert all(squares(t, b) <= squares(*near) + 1e-9 for near in around if min(near) >= 0)


def test_one_size_gives_a_line_through_the_origin() -> None:
    zeros = np.zeros(2, dtype=np.int64)
    history = TimeHistory(rounds=zeros, executors=zeros, sizes=np.array([4.0, 4.0]), seconds=np.array([1.0, 3.0]))
    fitted = fit_times(history, 1)
    assert (fitted.seconds_per_sample[0], fitted.fixed_s[0]) == (0.5, 0.0)


def test_rounds_before_and_after_the_first_record() -> None:
    sizes = np.array([9.0, 5.0, 4.0])
    assert uniform(equal_times(2).problem(sizes)).executor_of.tolist() == [0, 1, 0]
    fitted = fit_times(recorded(1, 2, noise=0.01), 3)
    assert parrot(fitted.problem(sizes)).load_s.sum() > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sizes": np.ones(3)}, r"sizes: got shape \(3,\), expected \(2,\)"),
        ({"seconds": np.array([1.0, -1.0])}, "seconds: got -1.0, expected finite numbers from 0 on"),
        ({"rounds": np.array([0, -1])}, "rounds: got -1"),
    ],
)
def test_bad_history_is_named(changes: dict[str, Any], message: str) -> None:
    numbers, ones = np.array([0, 1]), np.ones(2)
    good: dict[str, Any] = {"rounds": numbers, "executors": numbers, "sizes": ones, "seconds": ones}
    with pytest.raises(UserError, match=message):
        TimeHistory(**{**good, **changes})


def test_what_cannot_be_fitted_is_refused() -> None:
    history = recorded(0, 1, noise=0.0)
    with pytest.raises(UserError, match="got no record of executor 3"):
        fit_times(history, 4)
    with pytest.raises(UserError, match="got a record of executor 2, expected numbers below 2"):
        fit_times(history, 2)
    with pytest.raises(UserError, match="window_rounds: got 0"):
        fit_times(history, 3, window_rounds=0)
    with pytest.raises(UserError, match="executors: got 0"):
        equal_times(0)
