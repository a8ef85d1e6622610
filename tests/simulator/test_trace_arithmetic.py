import pytest

from isthmus.errors import UserError
from isthmus.trace import Span, Trace, busy_share, link_bytes, steady_step_s
from isthmus_testing.virtual_runs import period_s


def compute(name: str, start_s: float, end_s: float, step: int = 0, device: str = "a") -> Span:
    return Span(device=device, track="compute", name=name, start_s=start_s, end_s=end_s, step=step)


def sent(source: str, target: str, size_bytes: int) -> Span:
    return Span(device=source, track="send", name="forward", start_s=0, end_s=1, size_bytes=size_bytes, other=target)


def trace(*spans: Span) -> Trace:
    return Trace(source="simulator", run="r", spans=spans)


def steps_ending(*ends: float) -> tuple[Span, ...]:
    """One forward at the beginning of each step, and its update at the end."""
    begins = (0.0, *ends[:-1])
    of = [
        (compute("F", a, a, k), compute("update", b, b, k)) for k, (a, b) in enumerate(zip(begins, ends, strict=True))
    ]
    return tuple(span for pair in of for span in pair)


def test_the_steady_step_neither_fills_nor_drains():
    assert steady_step_s(trace(*steps_ending(10, 11, 14, 20))) == 2  # of 1 and 3, without the 10 and the 6
    assert steady_step_s(trace(*steps_ending(10, 14))) == 4  # without the first alone, if else none is left
    assert steady_step_s(trace(*steps_ending(4))) == 4  # the only one


def test_a_step_that_averages_counts_as_often_as_it_comes():
    ends = (9, 10, 11, 21, 22, 23, 33, 40)  # of three steps one averages, for 10; the first step warms up
    seldom = Trace(source="simulator", run="r", spans=steps_ending(*ends), period=3)
    assert steady_step_s(seldom) == 4
    assert steady_step_s(trace(*steps_ending(*ends))) == 1
    few = Trace(source="simulator", run="r", spans=steps_ending(*ends), period=9)
    assert steady_step_s(few) == pytest.approx(31 / 7), "no whole period: the mean of what there is"


def test_a_period_that_is_the_whole_trace_counts_its_averages():
    sent_late = Span(device="a", track="receive", name="average", start_s=12, end_s=30, step=2, other="b")
    whole = Trace(source="simulator", run="r", spans=(*steps_ending(4, 8, 12), sent_late), period=3)
    assert steady_step_s(whole) == 10


def test_steps_that_take_turns_count_alike():
    """Two steps may take turns without a period of averages: the slope of their ends is neither one's duration."""
    assert steady_step_s(trace(*steps_ending(9, 11, 14, 16, 19, 20))) == 2.5
    overlapping = Trace(source="simulator", run="r", spans=steps_ending(9, 11, 14, 16, 19, 21, 22), period=2)
    assert steady_step_s(overlapping) == 2.5, "periods begin at any step"


def test_what_happens_between_steps_is_no_part_of_them():
    evaluation = compute("E", 12.0, 13.0)
    assert steady_step_s(trace(*steps_ending(9, 11, 14, 16, 19), evaluation)) == 2
    assert steady_step_s(trace(*steps_ending(9, 14), compute("E", 12.0, 13.0))) == 5, "unless no other step is left"
    assert steady_step_s(trace(*steps_ending(9, 11, 13, 55, 57, 59, 61))) == 2, "the fourth is done after a recovery"
    ahead = trace(*steps_ending(9, 10, 11, 40, 41, 42, 71, 80))
    assert steady_step_s(ahead, undisturbed=True) == pytest.approx(62 / 6), "no recovery, so it comes again"


def test_the_period_is_within_steps_and_of_one_device():
    first = [compute("B", end - 1, end) for end in (1, 3, 5)]
    second = [compute("B", end - 1, end, 1) for end in (100, 102)]
    elsewhere = [compute("B", end - 1, end, device="b") for end in (1, 8)]
    both = trace(*second, *first, *elsewhere, compute("F", 5, 50))
    assert (period_s(both, "a"), period_s(both, "b")) == (2, 7)


def test_the_busy_share_counts_the_compute_lane_only():
    lane = [compute("F", 2, 4), compute("B", 5, 6), compute("E", 9, 10, device="b")]
    assert busy_share(trace(*lane, sent("c", "a", 5))) == pytest.approx({"a": 0.3, "b": 0.1, "c": 0.0})


def test_link_bytes_are_by_direction_and_counted_where_they_are_sent():
    received = Span(device="b", track="receive", name="forward", start_s=1, end_s=2, size_bytes=5, other="a")
    total = link_bytes(trace(sent("a", "b", 5), sent("a", "b", 7), sent("b", "a", 1), received))
    assert total == {("a", "b"): 12, ("b", "a"): 1}


def test_arithmetic_on_a_trace_without_steps_is_refused():
    with pytest.raises(UserError, match="no training step"):
        steady_step_s(trace())
    with pytest.raises(UserError, match="device 'a': no step has two backward passes"):
        period_s(trace(compute("B", 0, 1), compute("B", 1, 2, 1)), "a")
    assert (busy_share(trace()), link_bytes(trace())) == ({}, {})
