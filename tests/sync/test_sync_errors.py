"""What is used wrongly is named."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from isthmus.errors import UserError
from isthmus.plan import Certificate
from isthmus.plan.sync import SyncPlan
from isthmus.sync import Options, Sync, attach, load_worker, mode_names, save_worker

FREE = sorted(set(mode_names()) - {"dream", "dreamddp"})
"""Modes that do not update inside backward."""

SET: dict[str, object] = {
    "balance": True, "average_state": True, "bucket_bytes": 64, "overlap": True, "forward_overlap": True, "spare": 0.5,
    "warm_up_steps": 3, "drift": 0.1, "planner": "dream-brute", "at_once": 3, "outer_rate": 0.5, "outer_momentum": 0.1,
    "error_decay": 0.9, "fragments": 2, "delay": 2, "mixing": 0.1,
}  # fmt: skip
"""Every option that not all modes read, but for a plan: other than its default."""
_PLANNED = {"average_state", "forward_overlap", "spare", "warm_up_steps", "drift", "planner"}
READ = {
    "s-sgd": set[str](),
    "every-step": {"bucket_bytes"},
    "asc-wfbp": {"bucket_bytes", "warm_up_steps", "at_once"},
    "local": {"balance", "average_state"},
    "outer": {"balance", "average_state", "outer_rate", "outer_momentum"},
    "streaming": {"outer_rate", "outer_momentum", "fragments", "delay", "mixing"},
    "partial": {"average_state", "overlap"},
    "dream": _PLANNED,
    "dreamddp": _PLANNED,
}
"""By themselves: others want a companion."""
PLAN = SyncPlan(
    planner="dream", layers=(), forward_overlap=True, iterations=(), period_s=1.0, workers=(), slowest="",
    certificate=Certificate(lower_bound=1.0, gap=0.0, question=""),
)  # fmt: skip


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


class Bytes:
    def encode(self, tensor: Tensor, name: str = "tensor") -> Tensor:
        return tensor.view(torch.uint8)

    def decode(self, payload: Tensor, shape: Sequence[int], dtype: torch.dtype, name: str = "tensor") -> Tensor:
        return payload.view(dtype).view(tuple(shape))


def loss_of(model: nn.Module) -> Tensor:
    return model(torch.ones(3, 4)).square().mean()


def attached(mode: str, period: int = 2) -> tuple[nn.Sequential, torch.optim.Optimizer, Sync]:
    model = net()
    optimizer = sgd(model)
    return model, optimizer, attach(model, optimizer, mode=mode, period=period)


@pytest.mark.parametrize("backend", [None, "cpu:gloo"])
def test_a_backend_for_each_kind_of_device(backend: str | None) -> None:
    """`init_process_group()` names none."""
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = net()
        sync = attach(model, sgd(model), mode="dream", period=1)
        for _ in range(6):
            loss_of(model).backward()
            sync.step()
            sync.optimizer.zero_grad()
        sync.close()
    finally:
        dist.destroy_process_group()


def test_others_are_waited_for_as_long_as_the_user_said() -> None:
    said = timedelta(seconds=77)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=said)
    try:
        model = net()
        sync = attach(model, sgd(model))
        group = sync._setting.averager.group  # pyright: ignore[reportPrivateUsage]
        assert group._get_backend(torch.device("cpu")).options._timeout == said  # pyright: ignore
        sync.close()
    finally:
        dist.destroy_process_group()


def test_without_a_process_group() -> None:
    model = net()
    with pytest.raises(UserError, match=r"no process group.*init_process_group.*torchrun"):
        attach(model, sgd(model))


@pytest.mark.usefixtures("alone")
class TestAttach:
    def test_unknown_mode(self) -> None:
        model = net()
        with pytest.raises(UserError, match="unknown sync mode 'drem': did you mean 'dream'"):
            attach(model, sgd(model), mode="drem")

    @pytest.mark.parametrize("mode", [None, 3, ["dream"]])
    def test_mode_of_another_kind(self, mode: object) -> None:
        model = net()
        with pytest.raises(UserError, match="unknown sync mode"):
            attach(model, sgd(model), mode=mode)  # pyright: ignore[reportArgumentType]

    def test_other_things_than_model_optimizer_and_options(self) -> None:
        model = net()
        optimizer = sgd(model)
        with pytest.raises(UserError, match=r"model: got list, expected torch\.nn\.\S*Module"):
            attach([model], optimizer)  # pyright: ignore[reportArgumentType]
        with pytest.raises(UserError, match=r"optimizer: got StepLR, expected torch\.optim\.\S*Optimizer"):
            attach(model, torch.optim.lr_scheduler.StepLR(optimizer, 1))  # pyright: ignore[reportArgumentType]
        with pytest.raises(UserError, match=r"options: got dict, expected isthmus\.sync\.\S*Options"):
            attach(model, optimizer, options={"delay": 1})  # pyright: ignore[reportArgumentType]

    @pytest.mark.parametrize("period", [0, -1])
    def test_period_below_1(self, period: int) -> None:
        model = net()
        with pytest.raises(UserError, match=f"period: got {period}, expected at least 1"):
            attach(model, sgd(model), period=period)

    @pytest.mark.parametrize("period", [2.5, True, float("nan"), "5", None, 1 << 40])
    def test_period_of_another_kind(self, period: object) -> None:
        model = net()
        with pytest.raises(UserError, match=r"period: got .*expected at least 1 step, in whole numbers"):
            attach(model, sgd(model), period=period)  # pyright: ignore[reportArgumentType]

    def test_planner_that_is_not_known(self) -> None:
        model = net()
        with pytest.raises(UserError, match="unknown sync option 'planner' 'dreem'"):
            attach(model, sgd(model), options=Options(planner="dreem"))

    @pytest.mark.parametrize("codec", ["int8", Bytes], ids=str)
    def test_codec_by_name(self, codec: object) -> None:
        model = net()
        with pytest.raises(UserError, match=r"codec: got .*(int8|Bytes).*, expected a codec"):
            attach(model, sgd(model), mode="outer", codec=codec)  # pyright: ignore[reportArgumentType]

    def test_a_model_that_cannot_be_written_in_place(self) -> None:
        for layer, name in ((nn.LazyLinear(8), "has no shape yet"), (nn.Linear(4, 8), "'0.mask' was expanded")):
            model = nn.Sequential(layer, nn.Linear(8, 2))
            layer.register_buffer("mask", torch.zeros(1).expand(3))
            with pytest.raises(UserError, match=name):
                attach(model, torch.optim.SGD(model[1].parameters(), lr=0.1), mode="local")

    def test_buffers_of_any_type(self) -> None:
        model = net()
        kinds = (torch.int16, torch.bool, torch.float8_e4m3fn, torch.complex64, torch.uint16, torch.float16)
        for number, kind in enumerate(kinds):
            model.register_buffer(f"buffer{number}", torch.ones(3, 2).t().to(kind))
        model.register_buffer("scalar", torch.tensor(5, dtype=torch.int16))
        model.register_buffer("empty", torch.zeros(0))
        values = {name: buffer.clone() for name, buffer in model.named_buffers()}
        sync = attach(model, sgd(model), mode="local", period=1)
        loss_of(model).backward()
        sync.step()
        for name, buffer in model.named_buffers():
            assert torch.equal(buffer.to(torch.complex64), values[name].to(torch.complex64)), name

    def test_a_group_of_others(self) -> None:
        """What torch.distributed.new_group gives to those who are not in it."""
        model = net()
        with pytest.raises(UserError, match="group: got -100, expected a process group that this process is in"):
            attach(model, sgd(model), group=dist.GroupMember.NON_GROUP_MEMBER)  # pyright: ignore[reportArgumentType]

    def test_a_device_without_a_backend(self) -> None:
        model = nn.Linear(4, 2, device="meta")
        with pytest.raises(UserError, match="the model is on 'meta', for which the process group has no backend"):
            attach(model, sgd(model))

    def test_no_trainable_parameters(self) -> None:
        model = net()
        optimizer = sgd(model)
        model.requires_grad_(False)
        with pytest.raises(UserError, match="no trainable parameters"):
            attach(model, optimizer)

    def test_parameter_without_an_optimizer(self) -> None:
        model = net()
        with pytest.raises(UserError, match=r"'2\.weight' is trainable but not in the optimizer"):
            attach(model, sgd(model[0]))

    def test_an_optimizer_of_more_than_the_model(self) -> None:
        model, other = net(), nn.Linear(3, 5)
        optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
        with pytest.raises(UserError, match=r"a trainable parameter of shape \(5, 3\) that is not averaged"):
            attach(model, optimizer)
        other.requires_grad_(False)
        attach(model, optimizer)

    def test_parameters_tied_by_their_memory(self) -> None:
        """They would learn apart from then on."""
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[1].weight.data = model[0].weight.data
        with pytest.raises(UserError, match=r"'0\.weight' and '1\.weight' share their memory: tie them as one"):
            attach(model, sgd(model))
        model[1].weight = model[0].weight
        attach(model, sgd(model))

    def test_ddp(self) -> None:
        model = net()
        with pytest.raises(UserError, match="DistributedDataParallel"):
            attach(nn.parallel.DistributedDataParallel(model), sgd(model))

    def test_lbfgs_in_dream(self) -> None:
        model = net()
        with pytest.raises(UserError, match=r"optimizer LBFGS.*any optimizer works in 'every-step'"):
            attach(model, torch.optim.LBFGS(model.parameters()))

    @pytest.mark.parametrize("mode", mode_names())
    def test_options_that_the_mode_does_not_read(self, mode: str) -> None:
        for field, value in SET.items():
            model = net()
            options = Options(**{field: value})  # pyright: ignore[reportArgumentType]
            if field in READ[mode]:
                attach(model, sgd(model), mode=mode, options=options).close()
                continue
            with pytest.raises(UserError, match=rf"^sync option '{field}': got .* expected "):
                attach(model, sgd(model), mode=mode, options=options)

    @pytest.mark.parametrize(
        ("mode", "options", "told"),
        [("partial", Options(forward_overlap=True), "'forward_overlap': got True, expected overlap=True with it"),
         ("dream", Options(forward_overlap=True, average_state=True),
          "'forward_overlap': got True, expected average_state=False with it"),
         ("outer", Options(error_decay=0.9), "'error_decay': got 0.9, expected a codec with it"),
         ("partial", Options(plan=PLAN), "'plan': got one with mode 'partial', which does not read it: expected mode "
          "'dream' or 'dreamddp'"),
         ("dreamddp", Options(plan=PLAN, spare=0.5), "'spare': got 0.5, expected no plan with it")],
    )  # fmt: skip
    def test_options_that_change_nothing_without_others(self, mode: str, options: Options, told: str) -> None:
        model = net()
        with pytest.raises(UserError, match=told):
            attach(model, sgd(model), mode=mode, options=options)

    @pytest.mark.parametrize("mode", ["dream", "every-step", "partial", "local"])
    def test_codec_where_there_are_no_deltas(self, mode: str) -> None:
        model = net()
        with pytest.raises(UserError, match=f"codec: got one with mode '{mode}', expected 'outer' or 'streaming'"):
            attach(model, sgd(model), mode=mode, codec=Bytes())

    def test_streaming_delay_of_a_period(self) -> None:
        model = net()
        with pytest.raises(UserError, match="'delay': got 3, expected less than the period of 3"):
            attach(model, sgd(model), mode="streaming", period=3, options=Options(delay=3))


@pytest.mark.parametrize(
    ("options", "field"),
    [({"weight": 0.0}, "weight"), ({"mixing": 1.0}, "mixing"), ({"warm_up_steps": 1}, "warm_up_steps"),
     ({"delay": -1}, "delay"), ({"spare": 1.1}, "spare"), ({"outer_momentum": float("nan")}, "outer_momentum"),
     ({"error_decay": 1.5}, "error_decay")],
)  # fmt: skip
def test_options_out_of_range(options: dict[str, float], field: str) -> None:
    with pytest.raises(UserError, match=f"sync option '{field}'"):
        Options(**options)  # pyright: ignore[reportArgumentType]


@pytest.mark.usefixtures("alone")
class TestSteps:
    @pytest.mark.parametrize("mode", mode_names())
    def test_the_optimizers_own_step(self, mode: str) -> None:
        model, optimizer, _ = attached(mode)
        loss_of(model).backward()
        with pytest.raises(UserError, match=r"optimizer\.step\(\) was called directly"):
            optimizer.step()

    @pytest.mark.parametrize("mode", ["dream", "every-step"])
    def test_unused_parameter(self, mode: str) -> None:
        model, _, _ = attached(mode)
        with pytest.raises(UserError, match=r"parameter '2\.weight' and 1 more got no gradient"):
            model[0](torch.ones(3, 4)).sum().backward()

    @pytest.mark.parametrize("mode", ["local", "outer", "partial", "streaming"])
    def test_a_layer_without_gradient_stays_as_it_is_elsewhere(self, mode: str) -> None:
        model, _, sync = attached(mode, period=1)
        before = [p.detach().clone() for p in model.parameters()]
        model[0](torch.ones(3, 4)).sum().backward()
        sync.step()
        changed = [not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)]
        assert changed == [True, True, False, False]

    @pytest.mark.parametrize("mode", mode_names())
    def test_a_frozen_layer_is_no_layer(self, mode: str) -> None:
        model = net()
        model[0].requires_grad_(False)
        frozen, moving = model[0].weight.detach().clone(), model[2].weight.detach().clone()
        sync = attach(model, sgd(model), mode=mode, period=1)
        loss_of(model).backward()
        sync.step()
        sync.wait()
        assert torch.equal(model[0].weight, frozen) and not torch.equal(model[2].weight, moving)

    @pytest.mark.parametrize("mode", ["dream", "every-step"])
    def test_step_without_backward(self, mode: str) -> None:
        _, _, sync = attached(mode)
        with pytest.raises(UserError, match=r"expected loss\.backward\(\)"):
            sync.step()

    @pytest.mark.parametrize("mode", mode_names())
    def test_step_after_close(self, mode: str) -> None:
        """With several workers it would wait for ever: nobody sums any more."""
        model, optimizer, sync = attached(mode)
        sync.close()
        sync.close()
        loss_of(model).backward()
        with pytest.raises(UserError, match=r"sync\.step\(\): this Sync is closed"):
            sync.step()
        optimizer.step()

    @pytest.mark.parametrize("mode", ["local", "outer", "partial"])
    def test_what_averaged_state_has_no_place_for(self, mode: str) -> None:
        """Workers would go apart without a word, or send each other messages of different length."""

        def made(model: nn.Module) -> Sync:
            options = Options(average_state=True, smallest_layer_bytes=0)
            return attach(model, torch.optim.SGD(model.parameters(), lr=0.1), mode=mode, period=3, options=options)

        model = net()
        sync = made(model)
        loss_of(model).backward()
        with pytest.raises(UserError, match="'average_state': got a closure, whose gradients come after"):
            sync.step(lambda: loss_of(model))
        with pytest.raises(UserError, match="'average_state': got a GradScaler, whose scale comes off after"):
            sync.step(scaler=torch.amp.GradScaler("cpu"))
        sync.step()
        model[2].weight.grad = None
        with pytest.raises(UserError, match=r"'average_state': parameter '2\.weight' has no gradient"):
            sync.step()
        model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2))
        sync = made(model)
        model(torch.tensor([1, 2])).sum().backward()
        with pytest.raises(UserError, match=r"'average_state': parameter '0\.weight' has a sparse gradient"):
            sync.step()

    @pytest.mark.parametrize("mode", mode_names())
    def test_what_becomes_trainable_later(self, mode: str) -> None:
        """Layers thawed one after the other: they would go apart without a word, and in `dream` not learn."""
        model = net()
        model[0].requires_grad_(False)
        optimizer = sgd(model)
        sync = attach(model, optimizer, mode=mode, period=2)
        model[0].requires_grad_(True)
        loss_of(model).backward()
        with pytest.raises(UserError, match=r"shape \(8, 4\) that is not averaged: .*or not trainable\. Attach"):
            sync.step()
        sync.close()
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
        with pytest.raises(UserError, match=r"shape \(2,\) that is not averaged"):
            attach(model, optimizer, mode=mode, period=2)

    @pytest.mark.parametrize("mode", FREE)
    def test_a_closure_may_give_a_float(self, mode: str) -> None:
        model, optimizer, sync = attached(mode)

        def closure() -> float:
            optimizer.zero_grad()
            loss = loss_of(model)
            loss.backward()
            return loss.item()

        assert sync.step(closure) == pytest.approx(loss_of(net()).item())  # pyright: ignore[reportArgumentType]

    def test_second_backward_in_dream(self) -> None:
        model, _, _ = attached("dream")
        loss_of(model).backward()
        with pytest.raises(UserError, match=r"second backward pass before sync\.step.*no_sync"):
            loss_of(model).backward()

    def test_clipping_in_dream(self) -> None:
        model, _, sync = attached("dream")
        loss_of(model).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with pytest.raises(UserError, match=r"'0\.weight' was changed after backward, as global-norm clipping"):
            sync.step()

    def test_gradients_put_in_place_of_others_in_dream(self) -> None:
        model, _, sync = attached("dream")
        loss_of(model).backward()
        model[2].bias.grad = model[2].bias.grad / 2
        with pytest.raises(UserError, match=r"'2\.bias' was changed after backward"):
            sync.step()

    def test_grad_scaler_in_dream(self) -> None:
        model, _, sync = attached("dream")
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(loss_of(model)).backward()
        with pytest.raises(UserError, match="GradScaler: this mode updates inside backward"):
            sync.step(scaler=scaler)

    def test_closure_in_dream(self) -> None:
        model, _, sync = attached("dream")
        loss_of(model).backward()
        with pytest.raises(UserError, match="expected no closure"):
            sync.step(lambda: loss_of(model))

    @pytest.mark.parametrize("mode", ["dream", "local"])
    def test_model_moved_afterwards(self, mode: str) -> None:
        model, _, sync = attached(mode)
        model.double()
        with pytest.raises(UserError, match=r"'0\.weight' was given other memory"):
            sync.step()

    def test_sparse_gradients(self) -> None:
        model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2))
        attach(model, sgd(model), mode="every-step", options=Options(smallest_layer_bytes=0))
        with pytest.raises(UserError, match="layer '0' has sparse gradients"):
            model(torch.tensor([1, 2])).sum().backward()

    @pytest.mark.parametrize("mode", FREE)
    def test_what_dream_refuses_works_elsewhere(self, mode: str) -> None:
        model, _, sync = attached(mode)
        scaler = torch.amp.GradScaler("cpu")
        before = [p.detach().clone() for p in model.parameters()]
        scaler.scale(loss_of(model)).backward()
        scaler.unscale_(sync.optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        sync.step(scaler=scaler)
        scaler.update()
        pairs = zip(model.parameters(), before, strict=True)
        moved = float(torch.cat([(now.detach() - then).flatten() for now, then in pairs]).norm())
        # One step of 0.1 along a gradient of norm 0.1; `streaming` and `outer` exchange later.
        assert moved == pytest.approx(0.01, rel=1e-3)

    def test_state_of_another_mode(self) -> None:
        _, _, local = attached("local")
        _, _, outer = attached("outer")
        with pytest.raises(UserError, match=r"saved sync state: mode: was made with local, expected outer"):
            outer.load_state_dict(local.state_dict())

    def test_state_of_another_period(self) -> None:
        _, _, local = attached("local", period=5)
        _, _, other = attached("local", period=3)
        with pytest.raises(UserError, match=r"saved sync state: period: was made with 5, expected 3"):
            other.load_state_dict(local.state_dict())

    def test_state_of_another_codec(self) -> None:
        model = net()
        packed = attach(model, sgd(model), mode="outer", period=2, codec=Bytes())
        _, _, outer = attached("outer")
        with pytest.raises(UserError, match=r"saved sync state: codec: was made with Bytes, expected None"):
            outer.load_state_dict(packed.state_dict())

    def test_state_of_another_model(self) -> None:
        _, _, outer = attached("outer")
        model = nn.Linear(3, 3)
        other = attach(model, sgd(model), mode="outer", period=2)
        with pytest.raises(UserError, match=r"'outer\.0': got shape .*same model"):
            outer.load_state_dict(other.state_dict())

    def test_file_of_a_model_of_other_shapes(self, tmp_path: Path) -> None:
        """One element would be copied to all, and torch's own words name neither file nor parameter."""
        small, large = nn.Linear(1, 1), nn.Linear(3, 3)
        for model in (small, large):
            optimizer = sgd(model)
            sync = attach(model, optimizer, mode="local")
            if model is small:
                save_worker(tmp_path / "one", model, optimizer, sync)
            else:
                with pytest.raises(UserError, match=r"one: 'weight': got shape \(1, 1\), expected \(3, 3\)"):
                    load_worker(tmp_path / "one", model, optimizer, sync)

    @pytest.mark.parametrize("mode", mode_names())
    def test_taken_back_to_the_start(self, mode: str, tmp_path: Path) -> None:
        """What came after the file was written is forgotten, momentum of the outer step too."""
        model, optimizer, sync = attached(mode)
        save_worker(tmp_path / "one", model, optimizer, sync)
        ends: list[list[Tensor]] = []
        for _ in range(2):
            load_worker(tmp_path / "one", model, optimizer, sync)
            for _ in range(5):
                optimizer.zero_grad()
                loss_of(model).backward()
                sync.step()
            ends.append([p.detach().clone() for p in model.parameters()])
        assert all(one.equal(other) for one, other in zip(*ends, strict=True))

    def test_numbers_of_an_optimizer_are_kept(self, tmp_path: Path) -> None:
        model, optimizer, sync = attached("local")
        optimizer.state[model[0].weight].update(count=3, rate=0.25, warm=True)
        save_worker(str(tmp_path / "one"), model, optimizer, sync)
        again, other, later = attached("local")
        load_worker(tmp_path / "one", again, other, later)
        kept = other.state[again[0].weight]
        assert {key: (kept[key], type(kept[key])) for key in ("count", "rate", "warm")} == {
            "count": (3, int), "rate": (0.25, float), "warm": (True, bool)
        }  # fmt: skip

    def test_what_an_optimizer_keeps_in_lists_is_refused(self, tmp_path: Path) -> None:
        model = net()
        optimizer = torch.optim.LBFGS(model.parameters())
        sync = attach(model, optimizer, mode="local")

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model)
            loss.backward()
            return loss

        sync.step(closure)
        with pytest.raises(UserError, match=r"optimizer LBFGS: its state '\w+' is a list: expected tensors"):
            save_worker(tmp_path / "one", model, optimizer, sync)
        assert not list(tmp_path.iterdir())

    def test_no_sync_within_no_sync(self) -> None:
        model = net()
        sync = attach(model, torch.optim.SGD(model.parameters(), lr=0.1), mode="dream", period=1)
        before = [p.detach().clone() for p in model.parameters()]
        with sync.no_sync():
            with sync.no_sync():
                loss_of(model).backward()
            loss_of(model).backward()
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize(
    ("field", "value"),
    [("fragments", 2.5), ("delay", 1.5), ("balance", "yes"), ("weight", "a"), ("outer_rate", float("inf"))],
)
def test_options_of_another_kind(field: str, value: object) -> None:
    with pytest.raises(UserError, match=f"sync option '{field}': got"):
        Options(**{field: value})  # pyright: ignore[reportArgumentType]
