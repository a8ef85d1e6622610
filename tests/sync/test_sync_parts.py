"""The parts of isthmus.sync by themselves, with one worker."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import isthmus.sync
from isthmus.errors import UserError
from isthmus.plans.sync import SyncPlan
from isthmus.sync import Options, attach
from isthmus.sync.averaging import SAMPLED, Averager, sample
from isthmus.sync.dream import Dream, joined
from isthmus.sync.layers import Layer, flatten, pack, spans
from isthmus.sync.mode import PeriodReport, balanced_steps
from isthmus.sync.profile import MOST_BYTES, SMALLEST_BYTES, LinkModel, fitted, probe
from isthmus.sync.scheduled import layers_of


@given(st.floats(1e-5, 1e-1), st.floats(1e-10, 1e-6))
def test_link_is_recovered_from_exact_probes(latency_s: float, byte_s: float) -> None:
    found = fitted([(size, latency_s + size * byte_s) for size in (1024, 16384, 262144, 4194304)])
    assert found.latency_s == pytest.approx(latency_s, rel=1e-4)
    assert found.byte_s == pytest.approx(byte_s, rel=1e-4)


def test_link_terms_are_never_negative() -> None:
    falling = fitted([(1000, 0.2), (2000, 0.1)])
    assert falling.byte_s == 0 and falling.latency_s > 0
    steep = fitted([(1000, 0.001), (2000, 0.1)])
    assert steep.latency_s == 0 and steep.byte_s > 0


@pytest.mark.usefixtures("alone")
def test_probes_are_of_their_size_whatever_the_default_type(monkeypatch: pytest.MonkeyPatch) -> None:
    assert dist.group.WORLD is not None
    averager = Averager(dist.group.WORLD, 1.0)
    sizes: list[int] = []

    def taken(tensor: Tensor, averager: Averager) -> float:
        sizes.append(tensor.nbytes)
        return tensor.nbytes * 1e-9

    monkeypatch.setattr("isthmus.sync.profile._timed", taken)
    torch.set_default_dtype(torch.float64)
    try:
        found = probe(averager)
    finally:
        torch.set_default_dtype(torch.float32)
    assert min(sizes[1:]) == SMALLEST_BYTES and max(sizes) == MOST_BYTES
    assert found.byte_s == pytest.approx(1e-9)


def test_flat_parameters_keep_values_identity_and_ties() -> None:
    model = nn.Sequential(nn.Embedding(7, 5), nn.LayerNorm(5), nn.Linear(5, 7, bias=False), nn.Linear(7, 3))
    model[2].weight = model[0].weight
    model[3].bias.requires_grad_(False)
    parameters, values = list(model.parameters()), [p.detach().clone() for p in model.parameters()]
    flat = flatten(model, smallest_layer_bytes=0)
    assert [layer.name for layer in flat.layers] == ["0", "1", "3"]
    assert [layer.parameter_names for layer in flat.layers] == [("0.weight",), ("1.weight", "1.bias"), ("3.weight",)]
    assert all(now is then for now, then in zip(model.parameters(), parameters, strict=True))
    assert all(now.equal(then) for now, then in zip(model.parameters(), values, strict=True))
    for layer in flat.layers:
        for tensor in layer.flats:
            tensor.zero_()
    assert sum(float(p.detach().abs().sum()) for p in model.parameters() if p.requires_grad) == 0
    assert parameters[-1].equal(values[-1])
    flat.check_in_place()


def test_small_modules_join_the_one_before() -> None:
    small, large = nn.LayerNorm(4), nn.Linear(4, 100)
    model = nn.Sequential(small, large, nn.LayerNorm(4), nn.Linear(100, 4), nn.LayerNorm(4), nn.LayerNorm(4))
    layers = flatten(model, smallest_layer_bytes=1000).layers
    assert [(layer.name, len(layer.parameters)) for layer in layers] == [("1", 6), ("3", 6)]
    assert layers[0].parameter_names[:2] == ("0.weight", "0.bias")
    assert sum(p.numel() for layer in layers for p in layer.parameters) == sum(p.numel() for p in model.parameters())
    assert [layer.name for layer in flatten(nn.Sequential(nn.LayerNorm(4), nn.LayerNorm(4)), 1000).layers] == ["1"]


def test_small_modules_are_together_large_enough() -> None:
    layers = flatten(nn.Sequential(*(nn.LayerNorm(4) for _ in range(7))), smallest_layer_bytes=64).layers
    firsts = [(layer.name, layer.parameter_names[0]) for layer in layers]
    assert firsts == [("1", "0.weight"), ("3", "3.weight"), ("5", "5.weight")]


def test_neighbours_are_one_piece_of_memory() -> None:
    model = nn.Sequential(*(nn.Linear(3, 5) for _ in range(4)))
    flat = flatten(model, smallest_layer_bytes=0)
    pieces = spans([flat.layers[3], flat.layers[0], flat.layers[1]])
    assert len(pieces) == 2
    for piece in pieces:
        piece.fill_(1)
    full = [bool((p == 1).all()) for p in model.parameters()]
    assert full == [True, True, True, True, False, False, True, True]
    assert len(spans(flat.layers)) == 1


def test_pieces_of_several_kinds_come_in_the_order_of_the_model() -> None:
    """Addresses differ between workers, who must send the same pieces one after the other."""
    one, other = torch.zeros(64, dtype=torch.bfloat16), torch.zeros(64)
    for buffers in ((one, other), (other, one)):
        layers = [Layer(name="layer", parameters=(), parameter_names=(), flats=(b[:10],)) for b in buffers]
        assert [piece.dtype for piece in spans(layers)] == [b.dtype for b in buffers]


def test_short_messages_are_joined() -> None:
    link = LinkModel(latency_s=0.01, byte_s=1e-4)  # 100 bytes take as long as the latency
    sizes = {"a": 150, "b": 40, "c": 50, "d": 20, "e": 300, "f": 10}
    assert joined(list(sizes), sizes, link, 1.0) == [("a",), ("b", "c", "d"), ("e",), ("f",)]
    assert joined(list(sizes), sizes, link, 2.0) == [("a", "b", "c"), ("d", "e"), ("f",)]
    assert joined(list(sizes), sizes, link, 0.0) == [(name,) for name in sizes]


def test_packed_views_follow_their_flats() -> None:
    tensors = [torch.randn(3, 4), torch.ones(2, dtype=torch.float64), torch.randn(5)[::2]]
    packed = pack(tensors)
    assert len(packed.flats) == 2
    assert all(view.equal(tensor) for view, tensor in zip(packed.views, tensors, strict=True))
    for flat in packed.flats:
        flat.fill_(7)
    packed.copy_to(tensors)
    assert all(bool((tensor == 7).all()) for tensor in tensors)


def test_samples_are_the_same_elements_each_time() -> None:
    flat = torch.arange(10 * SAMPLED, dtype=torch.float32)
    assert len(sample(flat)) == SAMPLED
    assert sample(flat).equal(sample(flat))
    # Spread over all of it: the mean is that of the whole, to its own standard error.
    assert float(sample(flat).mean()) == pytest.approx(5 * SAMPLED, rel=0.05)
    assert sample(flat[:10]).equal(flat[:10])


@pytest.mark.usefixtures("alone")
def test_an_empty_parameter_is_not_apart_from_itself() -> None:
    model = nn.Linear(3, 3)
    model.nothing = nn.Parameter(torch.zeros(0, dtype=torch.float64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = attach(model, optimizer, mode="partial", period=1)
    for _ in range(3):
        (model(torch.ones(1, 3)).sum() + model.nothing.sum()).backward()
        sync.step()
    told = sync.statistics().last_period
    assert told is not None and told.divergence == 0


@given(st.integers(1, 50), st.lists(st.floats(0.01, 1.0), min_size=1, max_size=8))
def test_balanced_periods_last_alike(period: int, compute_s: list[float]) -> None:
    steps = balanced_steps(period, compute_s)
    wanted_s = len(compute_s) * period / sum(1 / taken_s for taken_s in compute_s)
    for count, taken_s in zip(steps, compute_s, strict=True):
        assert count == 1 or abs(count * taken_s - wanted_s) <= taken_s / 2 * (1 + 1e-9)


def test_equal_workers_keep_the_period() -> None:
    assert balanced_steps(7, [0.3, 0.3, 0.3]) == (7, 7, 7)
    assert balanced_steps(6, [0.1, 0.2]) == (8, 4)


WIDTH = 160

Made = Callable[[nn.Module, bool | None], torch.optim.Optimizer]
MADE: dict[str, Made] = {
    "momentum": lambda of, foreach: torch.optim.SGD(of.parameters(), 0.1, 0.9, weight_decay=0.1, foreach=foreach),
    "adam": lambda of, foreach: torch.optim.Adam(of.parameters(), weight_decay=0.1, foreach=foreach),
    "adamw": lambda of, foreach: torch.optim.AdamW(of.parameters(), amsgrad=True, foreach=foreach),
    "adagrad": lambda of, foreach: torch.optim.Adagrad(of.parameters(), foreach=foreach),
}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    return nn.Sequential(*layers)


def train(
    model: nn.Module,
    step: Callable[[], object],
    optimizer: torch.optim.Optimizer,
    steps: int,
    dtype: torch.dtype = torch.float32,
) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(3, WIDTH, dtype=dtype)).square().mean().backward()
        step()


def tensor_bytes() -> int:
    """Of all memory that any tensor keeps alive, each counted once."""
    gc.collect()
    found = [t for t in gc.get_objects() if type(t) in (Tensor, nn.Parameter)]
    dense = [t.untyped_storage() for t in found if t.layout == torch.strided]
    return sum({s.data_ptr(): s.nbytes() for s in dense}.values())


@pytest.mark.usefixtures("alone")
def test_attached_anew_in_another_mode() -> None:
    """Training may begin with gradients in every step, and go on with deltas: the optimizer keeps its state."""
    plain, synced = net().double(), net().double()
    optimizer, own = (torch.optim.Adam(model.parameters()) for model in (plain, synced))
    train(plain, optimizer.step, optimizer, 11, torch.float64)
    averaging = Options(outer_rate=1.0, outer_momentum=0.0)
    for mode, steps, options in (("every-step", 5, Options()), ("outer", 6, averaging)):
        sync = attach(synced, own, mode=mode, period=3, options=options)
        train(synced, sync.step, own, steps, torch.float64)
        sync.close()
    for a, b in zip(plain.parameters(), synced.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.usefixtures("alone")
def test_attached_twice() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sync = attach(model, optimizer, mode="local")
    with pytest.raises(UserError, match="this optimizer is attached already"):
        attach(model, optimizer, mode="dream")
    train(model, sync.step, optimizer, 1)
    sync.close()
    attach(model, optimizer, mode="dream")


@pytest.mark.usefixtures("alone")
class TestDream:
    def test_no_second_copy_of_the_model(self) -> None:
        """Between steps, all that it keeps is what plain training keeps."""
        before = tensor_bytes()
        plain = net()
        optimizer = torch.optim.Adam(plain.parameters(), foreach=False)
        train(plain, optimizer.step, optimizer, 12)
        needed = tensor_bytes() - before
        synced = net()
        own = torch.optim.Adam(synced.parameters(), foreach=False)
        sync = attach(synced, own, mode="dream", period=3, options=Options(smallest_layer_bytes=0))
        train(synced, sync.step, own, 12)
        sync.wait()
        assert tensor_bytes() - before - needed <= 1.03 * needed
        assert all(a.equal(b) for a, b in zip(plain.parameters(), synced.parameters(), strict=True))

    def test_averaged_state_is_updated_once_a_step(self) -> None:
        """With one worker all modes are plain training, in and after the warm-up."""
        plain, synced = net(), net()
        optimizer, own = (torch.optim.Adam(model.parameters(), foreach=False) for model in (plain, synced))
        train(plain, optimizer.step, optimizer, 12)
        sync = attach(synced, own, mode="dream", period=3, options=Options(smallest_layer_bytes=0, average_state=True))
        train(synced, sync.step, own, 12)
        assert all(a.equal(b) for a, b in zip(plain.parameters(), synced.parameters(), strict=True))

    @pytest.mark.parametrize("made", list(MADE.values()), ids=list(MADE))
    def test_fused_kernels_where_the_choice_is_left_to_torch(self, made: Made) -> None:
        """No temporaries between gradients. They round otherwise, so what the user chose counts, bit for bit."""
        plain, left, chosen = net(), net(), net()
        optimizer = made(plain, False)
        train(plain, optimizer.step, optimizer, 6)
        for model, foreach in ((left, None), (chosen, False)):
            own = made(model, foreach)
            used: list[object] = []
            own.register_step_pre_hook(lambda o, *_, into=used: into.append(o.param_groups[0]["fused"]))
            train(model, attach(model, own, mode="dream", period=3).step, own, 6)
            assert {*used} == ({True} if foreach is None else {None})
            assert own.param_groups[0]["fused"] is None
        for a, b, c in zip(plain.parameters(), left.parameters(), chosen.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
            assert a.equal(c)

    def test_momentum_that_comes_later(self) -> None:
        """A part that has no gradient at first: fused kernels would refuse momentum of some parameters only."""
        plain, synced = net(), net()
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (plain, synced)]
        for model, optimizer in zip((plain, synced), optimizers, strict=True):
            for parameter in model[0].parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        train(plain, optimizers[0].step, optimizers[0], 6)
        train(synced, attach(synced, optimizers[1], mode="dream", period=3).step, optimizers[1], 6)
        for a, b in zip(plain.parameters(), synced.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)

    def test_state_that_lies_otherwise_in_memory(self) -> None:
        plain, synced = (nn.Sequential(*(nn.Conv2d(3, 3, 3, bias=False) for _ in range(2))) for _ in range(2))
        synced.load_state_dict(plain.state_dict())
        optimizers = [torch.optim.Adam(model.parameters()) for model in (plain, synced)]
        given = torch.randn(2, 3, 8, 8)
        for model, optimizer in zip((plain, synced), optimizers, strict=True):
            model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
            model(given).square().mean().backward()
            optimizer.step()
        sync = attach(synced, optimizers[1], mode="dream", period=3)
        for model, optimizer, step in ((plain, optimizers[0], optimizers[0].step), (synced, optimizers[1], sync.step)):
            for _ in range(4):
                optimizer.zero_grad()
                model(given).square().mean().backward()
                step()
        for a, b in zip(plain.parameters(), synced.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)

    def test_plans_once_and_follows(self) -> None:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        sync = attach(model, optimizer, mode="dream", period=2, options=Options(smallest_layer_bytes=0))
        train(model, sync.step, optimizer, 3)
        assert sync.statistics().plan is None
        train(model, sync.step, optimizer, 5)
        plan = sync.statistics().plan
        assert plan is not None
        # What is one message depends on what was measured.
        assert [layer for name in plan.layers for layer in sorted(layers_of(name))] == ["0", "2", "4"]
        assert sync.statistics().plans == 1

    def test_a_slower_link_makes_a_new_plan(self, caplog: pytest.LogCaptureFixture) -> None:
        """After three periods, not after one that was disturbed."""
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        sync = attach(model, optimizer, mode="dream", period=2, options=Options(smallest_layer_bytes=0))
        train(model, sync.step, optimizer, 4)
        mode = sync._mode  # pyright: ignore[reportPrivateUsage]
        assert isinstance(mode, Dream)

        def told(busy_s: float) -> int:
            report = PeriodReport(steps=100, compute_s=(0.1,), wait_s=(0.0,), divergence=0.0, link_busy_s=busy_s)
            mode.period_ended(report)
            return mode.plans

        assert [told(1.0), told(1.1), told(0.9), told(9.0), told(1.0), told(1.0)] == [1] * 6
        with caplog.at_level(logging.INFO, "isthmus.sync"):
            assert [told(1.3), told(1.3)] == [1, 2]
        assert "averages take 1300 ms of a period, 1000 when the plan was made" in caplog.text

    def test_a_plan_that_does_not_fit(self) -> None:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        fine = Options(smallest_layer_bytes=0)
        sync = attach(model, optimizer, mode="dream", period=2, options=fine)
        train(model, sync.step, optimizer, 4)
        plan = sync.statistics().plan
        assert isinstance(plan, SyncPlan)
        sync.close()
        for period, other in [(3, model), (2, nn.Linear(2, 2))]:
            own = torch.optim.SGD(other.parameters(), lr=0.01)
            for _ in range(2):  # refused, and not attached by half
                with pytest.raises(UserError, match="sync plan: "):
                    attach(other, own, mode="dream", period=period, options=Options(smallest_layer_bytes=0, plan=plan))


def test_public_names() -> None:
    assert sorted(isthmus.sync.__all__) == [
        "Decoupled",
        "DeltaCodec",
        "Options",
        "Sync",
        "SyncStatistics",
        "attach",
        "load_worker",
        "mode_names",
        "save_worker",
    ]
    assert isthmus.sync.mode_names() == [
        "asc-wfbp",
        "decoupled",
        "dream",
        "dreamddp",
        "every-step",
        "local",
        "outer",
        "partial",
        "s-sgd",
        "streaming",
    ]
