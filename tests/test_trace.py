from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.errors import UserError
from isthmus.trace import (
    Span,
    Trace,
    busy_share,
    hidden_share,
    link_bytes,
    read_jsonl,
    steady_step_s,
    step_bounds,
    step_times,
    write_jsonl,
    write_perfetto,
)
from isthmus_testing.virtual_runs import period_s


def compute(device: str, name: str, start_s: float, end_s: float, step: int, micro_batch: int = -1) -> Span:
    return Span(
        device=device, track="compute", name=name, start_s=start_s, end_s=end_s, step=step, micro_batch=micro_batch
    )


def send(device: str, other: str, start_s: float, size_bytes: int, step: int) -> Span:
    return Span(
        device=device,
        track="send",
        name="forward",
        start_s=start_s,
        end_s=start_s + 0.5,
        step=step,
        micro_batch=0,
        size_bytes=size_bytes,
        other=other,
        wire_bytes=size_bytes + 64,
    )


def two_devices() -> Trace:
    """Three steps of 10, 6 and 5 seconds on two devices, one micro-batch pair each."""
    spans: list[Span] = []
    for step, begin in enumerate((0.0, 10.0, 16.0)):
        spans += [
            compute("a", "F", begin, begin + 1, step, 0),
            send("a", "b", begin + 1, 1000, step),
            compute("b", "F", begin + 1.5, begin + 2, step, 0),
            compute("b", "B", begin + 2, begin + 2.5, step, 0),
            compute("b", "B", begin + 3, begin + 3.5, step, 1),
            send("b", "a", begin + 3.5, 500, step),
            compute("a", "update", begin + 4.5, begin + 5, step),
        ]
    return Trace(source="simulator", run="two", spans=tuple(spans))


def test_a_step_lasts_from_the_update_before_it_to_its_own() -> None:
    assert step_bounds(two_devices()) == {0: (0.0, 5.0), 1: (5.0, 15.0), 2: (15.0, 21.0)}
    assert step_times(two_devices()) == {0: 5.0, 1: 10.0, 2: 6.0}


def test_a_stage_that_runs_ahead_does_not_shorten_steps() -> None:
    """The first stage computes the forwards of all steps at once, as one without incoming edges may."""
    spans = [compute("ahead", "F", step, step + 1, step, 0) for step in range(4)]
    spans += [compute("last", "update", 10.0 * step + 9, 10.0 * step + 10, step) for step in range(4)]
    trace = Trace(source="simulator", run="ahead", spans=tuple(spans))
    assert step_times(trace) == dict.fromkeys(range(4), 10.0)
    assert steady_step_s(trace) == 10.0


def test_a_step_without_an_update_has_no_time_and_one_without_the_step_before_begins_with_its_forward() -> None:
    spans = (compute("a", "F", 0, 1, 0), compute("a", "F", 5, 6, 2), compute("a", "update", 7, 8, 2))
    assert step_times(Trace(source="runtime", run="gap", spans=spans)) == {2: 3.0}


def test_steady_step_leaves_out_the_first_and_the_last() -> None:
    assert steady_step_s(two_devices()) == 10.0
    first_only = Trace(source="runtime", run="one", spans=two_devices().spans[:7])
    assert steady_step_s(first_only) == 5.0


def test_no_step_is_an_error() -> None:
    with pytest.raises(UserError, match="no training step"):
        steady_step_s(Trace(source="runtime", run="none", spans=()))


def test_period_is_the_gap_between_backward_ends() -> None:
    assert period_s(two_devices(), "b") == 1.0
    with pytest.raises(UserError, match="'a'"):
        period_s(two_devices(), "a")


def test_busy_share_of_the_compute_lane() -> None:
    assert busy_share(two_devices()) == pytest.approx({"a": 3 * 1.5 / 21, "b": 3 * 1.5 / 21})
    assert busy_share(Trace(source="runtime", run="none", spans=())) == {}


def test_link_bytes_count_tensors_not_headers() -> None:
    assert link_bytes(two_devices()) == {("a", "b"): 3000, ("b", "a"): 1500}


SPELL = st.tuples(st.integers(0, 19), st.integers(1, 8)).map(lambda one: (one[0], one[0] + one[1]))
SPELLS = st.lists(SPELL, max_size=8)


@given(SPELLS, SPELLS)
def test_what_is_hidden_behind_compute_is_counted_second_by_second(
    work: list[tuple[int, int]], sends: list[tuple[int, int]]
) -> None:
    found = [compute("a", "F", start, end, 0) for start, end in work]
    found += [Span(device="a", track="down", name="forward", start_s=start, end_s=end) for start, end in sends]
    elsewhere = [compute("b", "F", 0, 30, 0), Span(device="a", track="receive", name="forward", start_s=0, end_s=9)]
    share = hidden_share(Trace(source="runtime", run="r", spans=(*found, *elsewhere)))
    seconds = [second for start, end in sends for second in range(start, end)]
    busy = {second for start, end in work for second in range(start, end)}
    assert share == ({"a": pytest.approx(sum(s in busy for s in seconds) / len(seconds))} if seconds else {})


names = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=8)
times = st.floats(0, 1e6, allow_nan=False)
spans = st.builds(
    Span,
    device=names,
    track=st.sampled_from(["compute", "send", "receive", "control"]),
    name=names,
    start_s=times,
    end_s=times,
    step=st.integers(-1, 10**6),
    micro_batch=st.integers(-1, 1000),
    size_bytes=st.integers(0, 2**50),
    other=names,
    wire_bytes=st.integers(0, 2**50),
)


@given(st.builds(Trace, source=st.sampled_from(["simulator", "runtime"]), run=names, spans=st.lists(spans).map(tuple)))
def test_jsonl_round_trip(tmp_path_factory: pytest.TempPathFactory, trace: Trace) -> None:
    path = tmp_path_factory.getbasetemp() / "round.jsonl"
    write_jsonl(trace, path)
    assert read_jsonl(path) == trace
    assert path.read_bytes().count(b"\n") == 1 + len(trace.spans)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not json\n",
        b'{"source": "simulator"}\n',
        b'{"source": "guess", "run": "x"}\n',
        b'{"source": "runtime", "run": "x"}\n{"device": "a"}\n',
        b'{"source": "runtime", "run": "x"}\n'
        b'{"device": "a", "track": "coffee", "name": "F", "start_s": 0, "end_s": 1}\n',
    ],
)
def test_a_file_that_is_no_trace(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError, match="not a trace"):
        read_jsonl(path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not found"):
        read_jsonl(tmp_path / "absent.jsonl")


def test_perfetto_holds_every_span_under_its_device_and_track(tmp_path: Path) -> None:
    simulated = two_devices()
    real = Trace(source="runtime", run="two", spans=simulated.spans)
    write_perfetto([simulated, real], tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_bytes())["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert sorted(processes.values()) == ["runtime a", "runtime b", "simulator a", "simulator b"]
    got = [
        (processes[e["pid"]], threads[e["pid"], e["tid"]], e["name"], e["ts"], e["dur"], e["args"]["bytes"])
        for e in events
        if e["ph"] == "X"
    ]
    wanted = [
        (
            f"{trace.source} {span.device}",
            f"send to {span.other}" if span.track == "send" else span.track,
            span.name if span.micro_batch < 0 else f"{span.name}{span.micro_batch}",
            span.start_s * 1e6,
            pytest.approx((span.end_s - span.start_s) * 1e6),
            span.size_bytes,
        )
        for trace in (simulated, real)
        for span in trace.spans
    ]
    assert sorted(got) == sorted(wanted)


def test_slices_of_a_perfetto_thread_never_overlap(tmp_path: Path) -> None:
    """Two messages to one peer at once, one to another, and an upload of the host beside another."""
    sends = [send("a", "b", 0.0, 10, 0), send("a", "b", 0.25, 10, 0), send("a", "c", 0.25, 10, 0)]
    ups = [Span(device="a", track="up", name="copy", start_s=s, end_s=s + 1) for s in (0.0, 0.5, 1.0)]
    write_perfetto([Trace(source="runtime", run="lanes", spans=(*sends, *ups))], tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_bytes())["traceEvents"]
    threads = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert sorted(threads.values()) == ["send to b", "send to b (2)", "send to c", "up", "up (2)"]
    slices = [e for e in events if e["ph"] == "X"]
    assert len(slices) == 6
    for thread in threads:
        own = sorted((e["ts"], e["ts"] + e["dur"]) for e in slices if e["tid"] == thread)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(own))
