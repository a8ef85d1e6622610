"""What `attach` and its options are given wrongly is named."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

from isthmus.errors import UserError
from isthmus.plans import Certificate
from isthmus.plans.sync import SyncPlan
from isthmus.sync import Decoupled, Options, attach, mode_names

from .small import Bytes, loss_of, net, sgd

SET: dict[str, object] = {
    "balance": True,
    "average_state": True,
    "bucket_bytes": 64,
    "overlap": True,
    "forward_overlap": True,
    "spare": 0.5,
    "warm_up_steps": 3,
    "drift": 0.1,
    "planner": "dream-brute",
    "at_once": 3,
    "outer_rate": 0.5,
    "outer_momentum": 0.1,
    "error_decay": 0.9,
    "fragments": 2,
    "delay": 2,
    "mixing": 0.1,
    "decoupled": Decoupled(quorum=1),
    "steps": 5,
    "timeout_s": 9.0,
    "record": "record",
}
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
    "decoupled": {"decoupled", "steps", "timeout_s", "record"},
}
"""By themselves: others want a companion."""
PLAN = SyncPlan(
    planner="dream",
    layers=(),
    forward_overlap=True,
    iterations=(),
    period_s=1.0,
    workers=(),
    slowest="",
    certificate=Certificate(lower_bound=1.0, gap=0.0, question=""),
)


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
        with pytest.raises(
            UserError, match=r"'0\.weight' and parameter '1\.weight' share their memory: tie them as one"
        ):
            attach(model, sgd(model))
        model[1].weight = model[0].weight
        model.register_buffer("last", model[0].bias.detach()[1:])
        with pytest.raises(UserError, match=r"parameter '0\.bias' and buffer 'last' share their memory"):
            attach(model, sgd(model))
        model.last = model.last.clone()
        attach(model, sgd(model))

    def test_ddp(self) -> None:
        model = net()
        with pytest.raises(UserError, match="DistributedDataParallel"):
            attach(nn.parallel.DistributedDataParallel(model), sgd(model))

    def test_lbfgs_in_dream(self) -> None:
        model = net()
        with pytest.raises(UserError, match=r"optimizer: got LBFGS .* or mode 'every-step'"):
            attach(model, torch.optim.LBFGS(model.parameters()))

    @pytest.mark.parametrize("mode", mode_names())
    def test_options_that_the_mode_does_not_read(self, mode: str) -> None:
        for field, value in SET.items():
            model = net()
            options = Options(**{field: value})  # pyright: ignore[reportArgumentType]
            if field in READ[mode] and mode == "decoupled":
                options.check_read(mode, codec=False)  # to attach starts a process
                continue
            if field in READ[mode]:
                attach(model, sgd(model), mode=mode, options=options).close()
                continue
            with pytest.raises(UserError, match=rf"^sync option '{field}': got .* expected "):
                attach(model, sgd(model), mode=mode, options=options)

    @pytest.mark.parametrize(
        ("mode", "options", "told"),
        [
            ("partial", Options(forward_overlap=True), "'forward_overlap': got True, expected overlap=True with it"),
            (
                "dream",
                Options(forward_overlap=True, average_state=True),
                "'forward_overlap': got True, expected average_state=False with it",
            ),
            ("outer", Options(error_decay=0.9), "'error_decay': got 0.9, expected a codec with it"),
            (
                "partial",
                Options(plan=PLAN),
                "'plan': got a plan with mode 'partial', which .* for mode 'dream' or 'dreamddp'",
            ),
            ("dreamddp", Options(plan=PLAN, spare=0.5), "'spare': got 0.5, expected no plan with it"),
        ],
    )
    def test_options_that_change_nothing_without_others(self, mode: str, options: Options, told: str) -> None:
        model = net()
        with pytest.raises(UserError, match=told):
            attach(model, sgd(model), mode=mode, options=options)

    @pytest.mark.parametrize("mode", ["dream", "every-step", "partial", "local"])
    def test_codec_where_there_are_no_deltas(self, mode: str) -> None:
        model = net()
        with pytest.raises(
            UserError, match=f"codec: got Bytes with mode '{mode}', .* expected mode 'outer' or 'streaming'"
        ):
            attach(model, sgd(model), mode=mode, codec=Bytes())
        with pytest.raises(UserError, match=r"codec: got Bytes with mode 'decoupled', .* Decoupled\(codec"):
            attach(model, sgd(model), mode="decoupled", codec=Bytes())

    def test_streaming_delay_of_a_period(self) -> None:
        model = net()
        with pytest.raises(UserError, match="'delay': got 3, expected less than the period of 3"):
            attach(model, sgd(model), mode="streaming", period=3, options=Options(delay=3))


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"weight": 0.0}, "weight"),
        ({"mixing": 1.0}, "mixing"),
        ({"warm_up_steps": 1}, "warm_up_steps"),
        ({"delay": -1}, "delay"),
        ({"spare": 1.1}, "spare"),
        ({"outer_momentum": float("nan")}, "outer_momentum"),
        ({"error_decay": 1.5}, "error_decay"),
    ],
)
def test_options_out_of_range(options: dict[str, float], field: str) -> None:
    with pytest.raises(UserError, match=f"sync option '{field}'"):
        Options(**options)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("field", "value"),
    [("fragments", 2.5), ("delay", 1.5), ("balance", "yes"), ("weight", "a"), ("outer_rate", float("inf"))],
)
def test_options_of_another_kind(field: str, value: object) -> None:
    with pytest.raises(UserError, match=f"sync option '{field}': got"):
        Options(**{field: value})  # pyright: ignore[reportArgumentType]
