"""The emulated accelerator: the CPU's results, and each mistake that hardware would forgive raises."""

from __future__ import annotations

import contextlib
import copy
import os
import threading
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from isthmus.accelerators import Accelerator, accelerator_names, open_accelerator, resolve_accelerator
from isthmus.errors import UserError, users_code
from isthmus_testing.emulated_accelerator import (
    Checked,
    DataRace,
    FreedTooEarly,
    HostBufferInUse,
    RefusedWait,
    accelerator,
    devices,
    open_checked,
    order,
)
from isthmus_testing.emulated_accelerator.memory import BLOCK, SMALL, SMALL_SEGMENT, Block, CheckedMemory


@pytest.fixture
def here() -> Checked:
    return open_checked(0, fresh=True)


def _buffer(accelerator: Accelerator, values: Tensor) -> Tensor:
    made = accelerator.host_buffer(values.numel() * values.element_size()).view(values.dtype)
    return made.copy_(values.flatten()).view(values.shape)


def test_it_is_found_by_name_only() -> None:
    named = open_accelerator("checked:3")
    assert named.device == torch.device("checked", 3)
    assert torch.zeros(2, device=named.device).device == named.device
    assert not any(name.startswith("checked") for name in accelerator_names())
    assert open_accelerator("auto").device.type != "checked"
    with pytest.raises(UserError, match=r"^runtime\.device: got 'checked:999', expected a number below "):
        resolve_accelerator("checked:999", "runtime.device")


def test_complex_numbers_have_the_cpus_bits(here: Checked) -> None:
    """A conjugated view is a mark that only torch's own kernels know."""

    def computed(x: Tensor, y: Tensor) -> Tensor:
        h = torch.fft.fft(x.mH @ y.conj()) / (x * y).conj() + x.conj().imag
        return torch.view_as_real(torch.cat([h, -h.conj().T])).square().sum()

    torch.manual_seed(0)
    host = [torch.randn(4, 4, dtype=torch.complex64) for _ in range(2)]
    there = [t.to(here.device).requires_grad_() for t in host]
    host = [t.requires_grad_() for t in host]
    expected, got = computed(*host), computed(*there)
    assert torch.equal(got.cpu(), expected)
    for a, b in zip(torch.autograd.grad(got, there), torch.autograd.grad(expected, host), strict=True):
        assert torch.equal(torch.view_as_real(a.cpu()), torch.view_as_real(b.resolve_conj()))


def _everything(x: Tensor, w: Tensor) -> Tensor:
    h = F.layer_norm(F.gelu(x @ w).softmax(-1), [8])
    h = h + F.scaled_dot_product_attention(h[None, None], h[None, None], h[None, None], is_causal=True)[0, 0]
    rows = h[:, ::2].t().contiguous().cumsum(0)
    rows[1].mul_(2.0)
    top, order = rows.topk(2, dim=-1)
    return (h * h).sum() + top.exp().mean() + rows.gather(1, order).std() + F.cross_entropy(h, torch.zeros_like(h))


def test_operators_and_gradients_have_the_cpus_bits(here: Checked) -> None:
    torch.manual_seed(0)
    host = [torch.randn(4, 8), torch.randn(8, 8)]
    there = [t.to(here.device).requires_grad_() for t in host]
    host = [t.requires_grad_() for t in host]
    expected, got = _everything(*host), _everything(*there)
    assert torch.equal(got.cpu(), expected)
    for a, b in zip(torch.autograd.grad(got, there), torch.autograd.grad(expected, host), strict=True):
        assert torch.equal(a.cpu(), b)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    "optimizer_of", [torch.optim.AdamW, partial(torch.optim.SGD, momentum=0.9, nesterov=True, weight_decay=0.1)]
)
def test_a_module_trains_to_the_cpus_bits(
    here: Checked, optimizer_of: Callable[..., torch.optim.Optimizer], fused: bool
) -> None:
    weights: list[list[Tensor]] = []
    for device in (torch.device("cpu"), here.device):
        torch.manual_seed(0)
        images, classes = torch.randn(4, 3, 8, 8).to(device), torch.tensor([0, 1, 2, 3]).to(device)
        net = nn.Sequential(
            nn.Conv2d(3, 4, 3, groups=1, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(4, 4, 3, padding=1),
            nn.GroupNorm(2, 4),
            nn.Upsample(scale_factor=2),
            nn.Flatten(),
            nn.Linear(144, 4),
        ).to(device)
        optimizer = optimizer_of(net.parameters(), fused=fused and device == here.device, foreach=False)
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(net(images), classes).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            optimizer.step()
        weights.append([p.detach().cpu() for p in (*net.parameters(), *net.buffers())])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def _writes_into_views(x: Tensor) -> Tensor:
    x = x + 0
    left, right = x[:, :2], x[:, 2:]
    left.mul_(2)
    right += left.detach()
    x.t()[1].neg_()
    x.diagonal().zero_()
    x[1:, 2:].copy_(x[0, 0])
    rows = torch.zeros_like(x)
    rows[:, ::2] = x.flip(-1)[:, ::2].clamp(-1, 1)
    top, order = torch.stack(rows.unbind(0)[::-1]).sort(dim=1)
    return top.gather(1, order).masked_fill_(x > 1, 0.3) * x


def test_writes_into_views_reach_what_they_are_views_of(here: Checked) -> None:
    torch.manual_seed(0)
    host = torch.randn(4, 4, requires_grad=True)
    there = host.detach().to(here.device).requires_grad_()
    expected, got = _writes_into_views(host), _writes_into_views(there)
    assert torch.equal(got.cpu(), expected)
    expected.sum().backward()
    got.sum().backward()
    assert host.grad is not None and there.grad is not None
    assert torch.equal(there.grad.cpu(), host.grad)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers_compute_there(here: Checked, kind: type[nn.LSTM | nn.GRU]) -> None:
    torch.manual_seed(0)
    layer, x = kind(4, 5, num_layers=2, bidirectional=True), torch.randn(3, 2, 4)
    there = copy.deepcopy(layer).to(here.device)
    expected, got = layer(x)[0], there(x.to(here.device))[0]
    assert torch.allclose(got.cpu(), expected, rtol=1e-5, atol=1e-6)
    expected.sum().backward()
    got.sum().backward()
    for a, b in zip(there.parameters(), layer.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None
        assert torch.allclose(a.grad.cpu(), b.grad, rtol=1e-4, atol=1e-5)


def test_outputs_take_the_shape_that_an_operator_gives_them(here: Checked) -> None:
    out = torch.empty(0, device=here.device)
    ones = torch.ones(3, 4, device=here.device)
    torch.add(ones, ones, out=out)
    assert torch.equal(out.cpu(), torch.full((3, 4), 2.0))
    assert out.resize_(2).shape == (2,)
    assert ones.add_(1) is ones
    assert torch.empty(0, 4, device=here.device).sum().cpu() == 0


def test_backward_in_another_thread_than_forward(here: Checked) -> None:
    x = torch.ones(3, device=here.device, requires_grad=True)
    loss = (x * x).sum()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    assert x.grad is not None
    assert torch.equal(x.grad.cpu(), torch.full((3,), 2.0))


def test_random_operators_draw_what_the_cpu_draws_and_leave_its_generator_alone(here: Checked) -> None:
    torch.manual_seed(5)
    expected = F.dropout(torch.ones(64), 0.5)
    torch.manual_seed(3)
    after = torch.rand(2)
    torch.manual_seed(3)
    with here.seeded(5):
        assert torch.equal(F.dropout(torch.ones(64, device=here.device), 0.5).cpu(), expected)
    first = torch.randn(4, device=here.device)
    assert not torch.equal(first.cpu(), torch.randn(4, device=here.device).cpu())
    assert torch.equal(torch.rand(2), after)
    with pytest.raises(RuntimeError, match="generator"):
        torch.randn(4, device=here.device, generator=torch.Generator())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rate", [0.0, 0.1, 0.15, 0.5, 1.0])
def test_dropout_rounds_as_on_the_cpu_forward_and_backward(rate: float, dtype: torch.dtype, here: Checked) -> None:
    values = torch.randn(512, generator=torch.Generator().manual_seed(1)).to(dtype)
    gradient = torch.randn(512, generator=torch.Generator().manual_seed(2)).to(dtype)
    expected = values.clone().requires_grad_()
    torch.manual_seed(5)
    dropped = F.dropout(expected, rate)
    dropped.backward(gradient)
    with here.seeded(5):
        found = values.to(here.device).requires_grad_()
        there = F.dropout(found, rate)
        there.backward(gradient.to(here.device))
    assert found.grad is not None and expected.grad is not None
    assert torch.equal(there.detach().cpu(), dropped.detach()) and torch.equal(found.grad.cpu(), expected.grad)


def test_tensors_of_two_devices_are_refused(here: Checked) -> None:
    other = open_checked(1, fresh=True)
    mine = torch.ones(3, device=here.device)
    for unknown_peer in (torch.ones(3), torch.ones(3, device=other.device)):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            mine + unknown_peer
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            mine.add_(unknown_peer)
    assert torch.equal((mine + torch.tensor(2.0)).cpu(), torch.full((3,), 3.0))


def test_the_host_reads_nothing_by_itself(here: Checked) -> None:
    tensor = torch.ones(3, device=here.device)
    with pytest.raises(TypeError, match="numpy"):
        tensor.numpy()
    here.reset_counts()
    assert tensor.tolist() == [1, 1, 1]
    assert here.counts().implicit_copies == 1


WAITS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda t: t.sum().item(),
    "float": lambda t: float(t[0]),
    "if": lambda t: bool(t[0] > 0),
    "nonzero": lambda t: t.nonzero(),
    "mask": lambda t: t[t > 0],
    "masked write": lambda t: t.__setitem__(t > 0, 0.0),
    "masked_select": lambda t: t.masked_select(t > 0),
    "unique": lambda t: t.unique(),
    "equal": lambda t: torch.equal(t, t),
    "cpu": lambda t: t.cpu(),
    "from the host": lambda t: t.copy_(torch.zeros(3)),
    "late": lambda t: torch.empty(3).copy_(t, non_blocking=True),
}


@pytest.mark.parametrize("name", WAITS)
def test_each_wait_of_the_host_is_counted_with_its_place_or_refused(here: Checked, name: str) -> None:
    tensor = torch.ones(3, device=here.device)
    here.reset_counts()
    WAITS[name](tensor)
    counts = here.counts(threading.get_ident())
    assert counts.host_synchronizations == 1
    assert any("test_checked.py" in place for place in counts.places)
    with here.refusing("host synchronization", "implicit copy"), pytest.raises(RefusedWait, match=r"test_checked\.py"):
        WAITS[name](tensor)


def test_what_does_not_wait_is_not_counted(here: Checked) -> None:
    tensor = torch.ones(4, device=here.device)
    up, down = _buffer(here, torch.ones(4)), here.host_buffer(16).view(torch.float32)
    here.reset_counts()
    tensor[tensor.argsort()] = tensor.where(tensor > 0, 0.0)
    tensor.copy_(up, non_blocking=True)
    down.copy_(tensor * 2, non_blocking=True)
    here.record().synchronize()
    counts = here.counts()
    assert (counts.host_synchronizations, counts.implicit_copies, counts.event_waits) == (0, 0, 1)
    assert (counts.copies, counts.copied_bytes) == (2, 32)
    assert down.tolist() == [2] * 4
    assert here.counts(threading.get_ident() + 1).kernels == 0


def test_streams_need_events_between_them(here: Checked) -> None:
    side = here.new_stream()
    tensor = torch.ones(4, device=here.device)
    with pytest.raises(DataRace, match="reads what"), here.on(side):
        tensor + 1
    ready = here.record()
    with here.on(side):
        here.wait(ready)
        assert (tensor + 1).shape == (4,)  # two readers need no order
        read = here.record()
    tensor + 1
    with pytest.raises(DataRace, match="writes what"):
        tensor.add_(1)
    here.wait(read)
    tensor.add_(1)
    with pytest.raises(DataRace), here.on(side):
        here.wait(ready)
        tensor.add_(1)


def test_what_the_host_has_waited_for_is_before_all_that_comes(here: Checked) -> None:
    tensor = torch.ones(4, device=here.device)
    here.record().synchronize()
    with here.on(here.new_stream()):
        tensor.add_(1)
    here.synchronize()
    tensor.add_(1)


def test_a_host_buffer_holds_nan_until_the_copy_is_waited_for(here: Checked) -> None:
    down = here.host_buffer(16).view(torch.float32)
    down.copy_(torch.ones(4, device=here.device), non_blocking=True)
    copied = here.record()
    assert down.isnan().all()
    assert not copied.done()  # it says so at least once
    assert down.isnan().all()
    assert copied.done()
    assert down.tolist() == [1] * 4


def test_a_host_buffer_that_is_written_too_early_is_found(here: Checked) -> None:
    target = torch.empty(4, device=here.device)
    up = _buffer(here, torch.ones(4))
    target.copy_(up, non_blocking=True)
    up.zero_()
    with pytest.raises(HostBufferInUse, match="reads"):
        target + 1
    up = _buffer(here, torch.ones(4))
    target.copy_(up, non_blocking=True)
    target + 1  # the bytes are there, but the host does not know it
    memoryview(up.numpy())[0] = 7.0
    with pytest.raises(HostBufferInUse, match="reads"):
        here.synchronize()
    target.copy_(up, non_blocking=True)
    here.synchronize()
    up.zero_()
    assert target.tolist() == [7, 1, 1, 1]

    down = here.host_buffer(16).view(torch.float32)
    down.copy_(target, non_blocking=True)
    down[1] = 2.0
    with pytest.raises(HostBufferInUse, match="writes"):
        here.record().synchronize()
    assert [type(m) for m in here.misuses] == [HostBufferInUse] * 3


def test_one_buffer_may_go_up_after_it_came_down(here: Checked) -> None:
    buffer = here.host_buffer(16).view(torch.float32)
    first, second = torch.ones(4, device=here.device), torch.empty(4, device=here.device)
    buffer.copy_(first, non_blocking=True)
    second.copy_(buffer, non_blocking=True)
    buffer.copy_(second * 3, non_blocking=True)
    here.record().synchronize()
    assert second.tolist() == [1] * 4
    assert buffer.tolist() == [3] * 4
    with pytest.raises(DataRace), here.on(here.new_stream()):
        second.copy_(buffer, non_blocking=True)
        with here.on(here.new_stream()):
            buffer.copy_(second, non_blocking=True)


@pytest.mark.parametrize("said", [False, True])
def test_memory_that_another_stream_works_with_may_not_be_dropped(here: Checked, said: bool) -> None:
    tensor = torch.ones(4, device=here.device)
    ready = here.record()
    with here.on(here.new_stream()):
        here.wait(ready)
        tensor + 1
        if said:
            here.used_here(tensor)
        read = here.record()
    del tensor
    if said:
        torch.ones(1, device=here.device)
        return
    with pytest.raises(FreedTooEarly, match="used_here"):
        torch.ones(1, device=here.device)
    here.wait(read)
    torch.ones(1, device=here.device)


def test_memory_is_counted_as_a_caching_allocator_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISTHMUS_CHECKED_MEMORY", "1GiB, 16MiB@2")
    assert open_checked(1, fresh=True).memory().total == 2**30
    small = open_checked(2, fresh=True)
    assert small.memory().free == small.memory().total == 16 * 2**20
    one = torch.empty(100, device=small.device)
    view = one[10:].view(2, 45)
    use = small.memory()
    assert (use.allocated, use.reserved, use.free) == (512, 2**21, 14 * 2**20)
    del one
    assert small.memory().allocated == 512
    del view
    assert (small.memory().allocated, small.memory().reserved) == (0, 2**21)
    use = small.memory()
    assert (use.peak_allocated, use.peak_reserved) == (512, 2**21)
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 20 MiB.*capacity of 16 MiB"):
        torch.empty(2 * 2**20, dtype=torch.uint8, device=small.device)  # from a segment for several such
    big = torch.empty(10 * 2**20 + 1, dtype=torch.uint8, device=small.device)
    assert small.memory().reserved == 12 * 2**20, "a segment of its own, and the one that held nothing went back"
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 14 MiB.*12 MiB is reserved"):
        torch.empty(14 * 2**20, dtype=torch.uint8, device=small.device)
    del big
    small.reset_peak()
    assert (small.memory().peak_allocated, small.memory().peak_reserved) == (0, 12 * 2**20)
    small.release_cached()
    assert small.memory().free == small.memory().total


@given(st.data())
def test_blocks_of_memory_never_overlap_and_join_again(data: st.DataObject) -> None:
    memory, held = CheckedMemory("device", 2**27), list[Block]()
    for _ in range(data.draw(st.integers(1, 60))):
        if held and data.draw(st.booleans()):
            memory.give(held.pop(data.draw(st.integers(0, len(held) - 1))))
        else:
            size = data.draw(st.integers(1, 2**10) | st.integers(1, 3 * 2**20) | st.integers(9 * 2**20, 12 * 2**20))
            with contextlib.suppress(torch.OutOfMemoryError):
                held.append(memory.take(size, data.draw(st.integers(0, 1))))
                assert size <= held[-1].size <= size + BLOCK + (0 if size <= SMALL else SMALL + SMALL_SEGMENT)
        ends = sorted((b.segment, b.start, b.start + b.size) for b in held)
        assert all(one[0] != two[0] or one[2] <= two[1] for one, two in pairwise(ends))
        assert memory.allocated == sum(b.size for b in held) <= memory.reserved <= memory.total
    for block in held:
        memory.give(block)
    memory.give_back_unused()
    assert (memory.allocated, memory.reserved) == (0, 0)


def test_hardware_that_fails_stays_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISTHMUS_CHECKED_FAULT", "after:3@1")
    healthy, failing = open_checked(0, fresh=True), open_checked(1, fresh=True)
    torch.ones(4, device=healthy.device).add_(1).add_(1).add_(1)
    tensor = torch.ones(4, device=failing.device).add_(1)
    event = failing.record()
    for again in (lambda: tensor.add_(1), lambda: tensor.cpu(), event.synchronize, failing.synchronize):
        with pytest.raises(torch.AcceleratorError, match="operator 3"):
            again()


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("FAULT", "soon"),
        ("FAULT", "after:0"),
        ("FAULT", "after:1@x"),
        ("MEMORY", "lots"),
        ("MEMORY", "-1GiB"),
        ("REFUSE", "x"),
    ],
)
def test_settings_that_say_nothing_are_refused(monkeypatch: pytest.MonkeyPatch, variable: str, text: str) -> None:
    monkeypatch.setenv(f"ISTHMUS_CHECKED_{variable}", text)
    for noticed in (lambda: open_checked(5, fresh=True), lambda: resolve_accelerator("checked:5")):
        with pytest.raises(UserError, match=f"ISTHMUS_CHECKED_{variable}"):
            noticed()
    monkeypatch.undo()
    open_checked(5, fresh=True)


def test_an_error_of_an_operator_names_the_line_of_the_model(here: Checked) -> None:
    x = torch.ones(2, 3, device=here.device)
    with pytest.raises(UserError, match=r"mat1 and mat2 .*test_checked\.py, line \d+, in test"), users_code("x"):
        _ = x @ x


@pytest.mark.forks
@pytest.mark.skipif(bool(accelerator_names()), reason="torch's threads for hardware do not survive a fork")
def test_a_forked_process_computes_too(here: Checked) -> None:
    x = torch.ones(3, device=here.device, requires_grad=True)
    (x * 2).sum().backward()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            y = torch.ones(3, device=open_checked(1, fresh=True).device, requires_grad=True)
            (y * x.to(y.device) * 3).sum().backward()
            code = 0 if y.grad is not None and y.grad.tolist() == [3, 3, 3] else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_events_tell_the_time_between_them(here: Checked) -> None:
    first, second = here.record(timed=True), here.record(timed=True)
    here.synchronize()
    assert first.seconds_to(second) >= 0


def test_threads_that_share_a_stream_take_turns(here: Checked) -> None:
    total = torch.zeros(2**15, device=here.device)

    def add() -> None:
        for _ in range(50):
            total.add_(1)

    threads = [threading.Thread(target=add) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(total.cpu(), torch.full((2**15,), 150.0))


def test_clocks_are_joined_under_the_lock(here: Checked, monkeypatch: pytest.MonkeyPatch) -> None:
    """`synchronize` read the clock of a stream that waited for an event in another thread: "dictionary changed size
    during iteration"."""
    joined = list[bool]()

    def join(clock: dict[int, int], other: dict[int, int]) -> None:
        joined.append(order.LOCK._is_owned())
        whole(clock, other)

    whole = order.join
    for module in (order, devices, accelerator):
        monkeypatch.setattr(module, "join", join)
    main, stream = here.new_stream(), here.new_stream()
    with here.on(stream):
        torch.ones(2, device=here.device)
        event = here.record()
    with here.on(main):
        here.wait(event)
        (torch.ones(2, device=here.device) + 1).cpu()
    here.synchronize()
    assert len(joined) > 5 and all(joined)
