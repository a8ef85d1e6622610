"""Copies beside what an accelerator computes: buffers used again, states copied while they change, the host's lead."""

from __future__ import annotations

import time

import pytest
import torch

from isthmus.accelerators import HOST, DeviceEvent
from isthmus.accelerators.accelerator import DeviceClock
from isthmus.accelerators.copies import AHEAD, CopyBatch, CopyLabel, CopyStream, HostBuffers, to_device, to_host
from isthmus.graph.operators import ALLOWED
from isthmus.plans import Packing
from isthmus.runtime.device.tasklets import ComputeTurns, Tasklets
from isthmus.trace import Span
from isthmus.training.compression import codec_of
from isthmus.training.finite import finite_flag, is_finite
from isthmus.training.layout import header_of, pack
from isthmus.training.snapshot import snapshot
from isthmus_testing.emulated_accelerator import Checked, DataRace, open_checked


@pytest.fixture
def accelerator() -> Checked:
    return open_checked(3, fresh=True)


class Later(DeviceEvent):
    """Done when the test says so."""

    def __init__(self) -> None:
        self.is_done = False
        self.waited = 0

    def done(self) -> bool:
        return self.is_done

    def synchronize(self) -> None:
        self.waited += 1

    def seconds_to(self, later: DeviceEvent) -> float:
        return 0.0


def test_host_buffers_are_used_again_once_their_copies_are_done() -> None:
    buffers = HostBuffers(HOST)
    first = buffers.take(64)
    buffers.give(first)
    assert buffers.take(64) is first
    reading = [Later() for _ in range(AHEAD + 1)]
    given = [first, *(buffers.take(64) for _ in range(AHEAD - 1))]
    for buffer, event in zip(given, reading, strict=False):
        buffers.give(buffer, event)
    assert buffers.take(64) is first and reading[0].waited == 1, "more than a few are waited for"
    other = buffers.take(64)
    assert other is not first and not any(event.waited for event in reading[1:]), "a few are not"
    reading[1].is_done = True
    assert buffers.take(64) is given[1]
    assert buffers.take(32).numel() == 32


def test_after_the_first_trip_nothing_is_allocated(accelerator: Checked, monkeypatch: pytest.MonkeyPatch) -> None:
    way, values = CopyStream(accelerator), to_device(accelerator, torch.arange(100.0))
    made: list[int] = []
    host_buffer = type(accelerator).host_buffer
    monkeypatch.setattr(Checked, "host_buffer", lambda self, size: (made.append(size), host_buffer(self, size))[1])
    for _ in range(5):
        with way.down(CopyLabel("forward"), accelerator.record()) as trip:
            accelerator.used_here(values)
            (buffer,) = [trip.down(values)]
        trip.done.synchronize()
        assert buffer.view(torch.float32).tolist() == list(range(100))
        trip.release()
    assert made == [400]


def test_a_state_is_copied_as_it_was_when_what_overwrites_it_holds(accelerator: Checked) -> None:
    way = CopyStream(accelerator)
    host = {"w": torch.randn(6, 4), "t": torch.randn(5, 3).t(), "n": torch.tensor(3), "none": torch.empty(0, 2)}
    state = {name: to_device(accelerator, t) for name, t in host.items()} | {"step": torch.tensor(7.0)}
    taken = snapshot(state, way)
    way.hold()
    state["w"].add_(1.0)
    taken.wait()
    assert taken.whole
    expected = snapshot({**host, "step": state["step"]})
    for name, value in taken.tensors().items():
        assert torch.equal(value, expected.tensors()[name]) and value.stride() == expected.tensors()[name].stride()
    taken = snapshot(state, way)
    with pytest.raises(DataRace):
        state["w"].add_(1.0)
    taken.wait()


def test_what_goes_up_piece_by_piece_arrives_whole(accelerator: Checked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isthmus.accelerators.copies.UP_BYTES", 7)
    sent = torch.arange(30.0)
    data, sizes = pack(sent), list[int]()

    def fill(memory: memoryview) -> None:
        at = sum(sizes)
        memory[:] = data[at : at + memory.nbytes]
        sizes.append(memory.nbytes)

    with CopyStream(accelerator).up(CopyLabel("forward")) as trip:
        flat = trip.up(header_of("x", sent).nbytes, fill)
    accelerator.wait(trip.done)
    accelerator.used_here(flat)
    assert torch.equal(to_host(accelerator, {"x": flat.view(torch.float32)})["x"], sent)
    assert sizes == [7] * 17 + [1]


def test_trips_are_told_on_the_hosts_clock(accelerator: Checked) -> None:
    told: list[tuple[CopyBatch, float, float]] = []
    way = CopyStream(
        accelerator, DeviceClock(accelerator), lambda trip, start_s, end_s: told.append((trip, start_s, end_s))
    )
    before_s = time.monotonic()
    with way.up(CopyLabel("columns", 4, 2)) as trip:
        trip.raised(torch.ones(10))
    trip.done.synchronize()
    way.tell()
    ((found, start_s, end_s),) = told
    assert found.cargo == CopyLabel("columns", 4, 2) and found.size_bytes == 40
    assert before_s - 0.05 <= start_s <= end_s <= time.monotonic() + 0.05


def test_the_host_is_one_tasklet_ahead_of_the_accelerator(
    accelerator: Checked, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Later] = []

    def record(self: Checked, *, timed: bool = False) -> DeviceEvent:
        made.append(Later())
        return made[-1]

    monkeypatch.setattr(Checked, "record", record)
    spans: list[Span] = []
    tasklets = Tasklets("d", accelerator, None, spans.append, ComputeTurns().of(0))
    waited: list[list[int]] = []
    for number in range(3):
        with tasklets.tasklet("F", 0, number):
            pass
        waited.append([event.waited for event in made[1::2]])
    assert waited == [[0], [1, 0], [1, 1, 0]]
    assert [span.micro_batch for span in spans] == [0, 1]
    tasklets.finish()
    assert [span.micro_batch for span in spans] == [0, 1, 2]


def test_flags_are_the_same_as_answers() -> None:
    ends = [0.0, 1e38, float("inf"), float("nan"), float("-inf")]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for end in ends:
            values = torch.tensor([1.0, end, 1e38, -3.0]).to(dtype)
            assert bool(finite_flag(values)) == is_finite(values), (dtype, end)
    assert bool(finite_flag(torch.empty(0))) and bool(finite_flag(torch.tensor([1, 2])))


def test_graphs_name_no_operator_of_one_kind_of_hardware() -> None:
    kinds = ("cpu", "cuda", "cudnn", "mkldnn", "mps", "miopen", "xpu")
    assert not [name for name in ALLOWED if set(kinds) & set(name.replace(".", "_").split("_"))]


def test_codecs_pack_alike_on_any_hardware(accelerator: Checked) -> None:
    values = torch.randn(5000)
    dense = [Packing(codec=name) for name in ("bf16", "int8", "int4")]
    for packing in (*dense, Packing(codec="topk", ratio=20.0)):
        codec = codec_of(packing)
        there = codec.encode(to_device(accelerator, values), "x")
        decoded = codec.decode(there, values.shape, values.dtype, "x")
        here = to_host(accelerator, {"payload": there, "decoded": decoded})
        payload = codec.encode(values, "x")
        assert torch.equal(here["payload"], payload)
        assert torch.equal(here["decoded"], codec.decode(payload, values.shape, values.dtype, "x"))
