from functools import partial

from isthmus.simulator.clock import Jitter, VirtualClock


def order(seed: int, asked: list[tuple[float, str, str]]) -> str:
    """The labels of what ran, in order; `asked` are (time, lane, label)."""
    clock, ran = VirtualClock(seed), list[str]()
    for time_s, lane, label in asked:
        clock.at(time_s, lane, partial(ran.append, label))
    clock.run()
    return "".join(ran)


def test_time_comes_first():
    assert order(0, [(3, "x", "c"), (1, "y", "a"), (2, "x", "b")]) == "abc"


def test_a_lane_keeps_its_order_and_the_seed_decides_between_lanes():
    asked = [(1, "x", "a"), (1, "y", "p"), (1, "x", "b"), (1, "y", "q")]
    assert {order(seed, asked) for seed in range(20)} == {"abpq", "pqab"}
    assert order(5, asked) == order(5, asked)


def test_what_an_action_asks_for_runs_in_the_same_run():
    clock, times = VirtualClock(), list[float]()

    def again() -> None:
        times.append(clock.now_s)
        if clock.now_s < 2:
            clock.at(clock.now_s + 0.5, "x", again)

    clock.at(1, "x", again)
    clock.run()
    assert times == [1, 1.5, 2]


def test_jitter_has_mean_one_and_is_replayable():
    first, again = Jitter(0.5, seed=3), Jitter(0.5, seed=3)
    factors = [first() for _ in range(4000)]
    assert factors == [again() for _ in range(4000)]
    assert abs(sum(factors) / 4000 - 1) < 0.05
    assert min(factors) > 0
    assert len(set(factors)) == 4000
    assert Jitter(0, seed=3)() == 1.0
