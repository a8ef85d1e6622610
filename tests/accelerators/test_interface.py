"""The rules of `Accelerator`, on every kind that is here."""

from __future__ import annotations

import threading

import pytest
import torch

from isthmus.accelerators import HOST, Accelerator, accelerator_names, open_accelerator
from isthmus_testing.emulated_accelerator import open_checked


@pytest.fixture(params=["cpu", "checked", *accelerator_names()[:1]])
def accelerator(request: pytest.FixtureRequest) -> Accelerator:
    return open_checked(0, fresh=True) if request.param == "checked" else open_accelerator(request.param)


def test_it_says_what_it_is(accelerator: Accelerator) -> None:
    assert accelerator.name
    assert accelerator.asynchronous == (accelerator is not HOST)
    assert torch.zeros(2, device=accelerator.device).device == accelerator.device


def test_what_goes_there_by_streams_and_events_comes_back(accelerator: Accelerator) -> None:
    sent, received = accelerator.host_buffer(4096), accelerator.host_buffer(4096)
    assert (sent.dtype, sent.shape, sent.device.type) == (torch.uint8, (4096,), "cpu")
    memoryview(sent.numpy())[:] = bytes(range(256)) * 16
    up, down = accelerator.new_stream(), accelerator.new_stream()
    with accelerator.on(up):
        there = torch.empty(4096, dtype=torch.uint8, device=accelerator.device)
        there.copy_(sent, non_blocking=True)
        arrived = accelerator.record()
    accelerator.wait(arrived)
    accelerator.used_here(there)
    result = there + 1
    computed = accelerator.record()
    with accelerator.on(down):
        accelerator.wait(computed)
        accelerator.used_here(result)
        received.copy_(result, non_blocking=True)
        copied = accelerator.record()
    del there, result
    copied.synchronize()
    assert copied.done() and computed.done() and arrived.done()
    assert bytes(received.numpy()) == bytes((i + 1) % 256 for i in range(256)) * 16


def test_synchronize_waits_for_every_stream(accelerator: Accelerator) -> None:
    events = [accelerator.record()]
    for _ in range(3):
        with accelerator.on(accelerator.new_stream()):
            torch.ones(8, device=accelerator.device).add_(1)
            events.append(accelerator.record())
    accelerator.synchronize()
    assert all(event.done() for event in events)


def test_a_thread_and_a_block_have_streams_of_their_own(accelerator: Accelerator) -> None:
    outer, inner = accelerator.new_stream(), accelerator.new_stream()
    found: list[float] = []

    def elsewhere() -> None:
        mine = torch.ones(8, device=accelerator.device).add_(1)
        accelerator.record().synchronize()
        found.append(float(mine.sum()))

    with accelerator.on(outer):
        value = torch.ones(8, device=accelerator.device)
        with accelerator.on(inner):
            torch.zeros(8, device=accelerator.device).add_(1)
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
        value.add_(1)  # in order with its own stream, and no other
        made = accelerator.record()
    made.synchronize()
    assert found == [16.0]
    assert float(value.sum()) == 16.0


def test_the_time_between_events_is_positive(accelerator: Accelerator) -> None:
    first = accelerator.record(timed=True)
    torch.ones(64, 64, device=accelerator.device).exp()
    second = accelerator.record(timed=True)
    accelerator.synchronize()
    assert first.seconds_to(second) >= 0


def test_draws_of_a_seed_repeat_and_others_go_on(accelerator: Accelerator) -> None:
    def draw() -> list[float]:
        return torch.rand(4, device=accelerator.device).tolist()

    with accelerator.seeded(1):
        draw()
        apart = draw()
    with accelerator.seeded(1):
        first = draw()
        after = torch.random.get_rng_state()
    with accelerator.seeded(1):
        assert draw() == first
        assert draw() == apart
    with accelerator.seeded(2):
        assert draw() != first
    assert draw() != first
    assert accelerator is HOST or torch.equal(after, torch.random.get_rng_state())


def test_memory_in_use_is_told(accelerator: Accelerator) -> None:
    accelerator.reset_peak()
    before = accelerator.memory()
    assert 0 < before.free <= before.total
    tensor = torch.ones(2**22, device=accelerator.device)
    during = accelerator.memory()
    assert during.allocated >= before.allocated + (tensor.numel() * 4 if accelerator.asynchronous else 0)
    assert during.allocated <= during.reserved <= during.peak_reserved <= during.total
    del tensor
    if accelerator.asynchronous:
        assert accelerator.memory().allocated == before.allocated
        assert accelerator.memory().peak_reserved >= during.reserved
