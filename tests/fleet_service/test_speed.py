"""What a probe measures of hardware: with the hardware's own clock, in what a job's model computes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from isthmus.accelerators import HOST, DeviceEvent, open_accelerator
from isthmus.engines import ENGINES, EngineName
from isthmus.fleet import Device, Fleet, Link, Links
from isthmus.fleet.fleet import in_half
from isthmus.job import fleet_of, prepare
from isthmus.runtime.messages.probe import (
    AttentionShape,
    LayerTrial,
    MatrixProduct,
    MeasuredSpeed,
    MeasureSpeed,
    SpeedSample,
)
from isthmus.runtime.processes.device_processes import ProcessPlace
from isthmus.runtime.service import agent as agents
from isthmus.runtime.service import speed
from isthmus.runtime.service.agent import Agent, Membership
from isthmus.runtime.service.fleet_probe import (
    combined_speed,
    compute_speed,
    measured_device,
    planned_speed,
    speed_question,
)
from isthmus.runtime.service.speed import measure_layers, share_of
from isthmus.training.engine import TorchEngine
from isthmus_testing.emulated_accelerator import open_checked
from tests.runtime.jobs import DIGITS, TEXT, job_of


class _Moment(DeviceEvent):
    def __init__(self, at_s: float) -> None:
        self.at_s = at_s

    def done(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def seconds_to(self, later: DeviceEvent) -> float:
        assert isinstance(later, _Moment)
        return later.at_s - self.at_s


def test_the_fastest_pass_counts_and_the_first_does_not() -> None:
    clock, taken = [0.0], iter([0.1, 5.0, 2.0, 3.0])

    def act() -> None:
        clock[0] += next(taken)

    with mock.patch.object(HOST, "record", lambda timed: _Moment(clock[0])):
        assert speed.seconds(HOST, act) == pytest.approx(2.0)


def test_a_cpu_has_the_memory_that_is_free_and_the_speed_of_two_large_matrices() -> None:
    """Whatever else is faster: plans go by `compute` times `scale`, and `scale` may be above 1."""
    times = {"mm": iter([0.01, 0.2]), "bmm": iter([1e-9])}
    asked = MeasureSpeed(run="", operators=(MatrixProduct(1, 8, 8, 8),))

    def timed(_: object, act: Callable[[], object]) -> float:
        with _Called() as called:
            act()
        return next(times[next(name for name in times if name in called.names)])

    sides = mock.patch.object(speed, "MATRIX_SIDES", (4, 8, 16))
    free = mock.patch.object(speed, "available_bytes", lambda: 12345)
    with sides, free, mock.patch.object(speed, "seconds", timed):
        found = speed.measure(HOST, asked)
    assert found.memory_bytes == 12345
    assert found.peak_flops_per_s == 2 * 8**3 / 0.2 < found.figures[0].flops_per_s
    answer = MeasuredSpeed(run="", figures=found.figures, peak_flops_per_s=found.peak_flops_per_s, memory_bytes=12345)
    device = measured_device("a", "r", answer, asked, lambda _: None)
    assert (device.flops_per_s, device.memory_bytes) == (pytest.approx(5120, rel=1e-3), 12345)
    assert device.sustained_flops_per_s == pytest.approx(found.figures[0].flops_per_s, rel=1e-2)


class _Called(TorchDispatchMode):
    """Names of the operators that torch computes."""

    def __init__(self) -> None:
        super().__init__()
        self.names = set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_device_is_measured_by_its_engine(engine: EngineName) -> None:
    """Products are torch's on a device of torch, and none of torch's on one of JAX."""
    if engine == "jax":
        pytest.importorskip("jax", reason="the extra jax")
    asked = speed_question(prepare(job_of("mlp", {}, DIGITS)))

    def timed(_: object, act: Callable[[], object]) -> float:
        act()
        return 0.5

    sides = mock.patch.object(speed, "MATRIX_SIDES", (8,))
    with _Called() as called, mock.patch.object(speed, "seconds", timed), sides:
        found = speed.measure(HOST, asked, engine=engine)
    assert {figure.what for figure in found.figures} == {"layers", "products"}
    assert called.names.isdisjoint({"mm", "bmm", "addmm"}) == (engine == "jax")


def test_each_operator_counts_as_often_as_the_model_has_it() -> None:
    attention = AttentionShape(
        batch=2, heads=4, key_heads=2, queries=8, keys=6, size=4, value_size=5, masked=True, count=3
    )
    asked = MeasureSpeed(run="", operators=(MatrixProduct(2, 3, 4, 5, count=10), attention, MatrixProduct(1, 8, 8, 8)))

    def timed(_: object, act: Callable[[], object]) -> float:
        act()
        return 0.5

    with mock.patch.object(speed, "seconds", timed):
        found = {f.what: f for f in speed.measure_operators(HOST, asked, "fp32")}
    assert (found["products"].flops, found["products"].seconds) == (10 * 2 * 2 * 3 * 4 * 5 + 2 * 8**3, 11 * 0.5)
    assert (found["attention"].flops, found["attention"].seconds) == (3 * 2 * 2 * 4 * 8 * 6 * (4 + 5), 3 * 0.5)


@pytest.fixture(scope="module")
def gpt() -> MeasureSpeed:
    model: dict[str, object] = {"vocab_size": 256, "sequence_length": 16, "width": 32, "layers": 2, "heads": 4}
    return speed_question(prepare(job_of("gpt", model, TEXT)))  # micro-batches of 2


def _trial(asked: MeasureSpeed) -> LayerTrial:
    assert asked.trial is not None
    return asked.trial


def test_operators_are_those_of_the_jobs_model(gpt: MeasureSpeed) -> None:
    tokens = 2 * 16
    products = [o for o in gpt.operators if isinstance(o, MatrixProduct)]
    assert {(p.batch, p.m, p.n, p.k) for p in products} >= {(1, tokens, 256, 32), (1, tokens, 128, 32)}
    assert AttentionShape(2, 4, 4, 16, 16, 8, 8, causal=True, count=2) in gpt.operators
    assert [o.flops for o in gpt.operators] == sorted((o.flops for o in gpt.operators), reverse=True)


def test_stages_grow_to_the_whole_model(gpt: MeasureSpeed) -> None:
    trial = _trial(gpt)
    sizes = [layers.operators for layers in trial.layers]
    assert sizes == sorted(set(sizes)) and sizes[-1] == trial.operators and len(sizes) > 4
    assert trial.layers[-1].stage.loss is not None and trial.layers[0].stage.loss is None
    flops = [layers.flops.at(2) for layers in trial.layers]
    assert all(after >= before > 0 for before, after in itertools.pairwise(flops))
    assert set(trial.columns) == {"input_ids", "labels"} and trial.columns["labels"].limit == 256


class _Timer:
    """Runs what it is given twice, as a pass that is not counted and one that is."""

    def __init__(self, taken_s: float) -> None:
        self.taken_s = taken_s
        self.timed = 0

    def __call__(self, act: Callable[[], object]) -> float:
        act()
        act()
        self.timed += 1
        return self.taken_s


@pytest.mark.parametrize("where", ["cpu", "checked:7"])
def test_layers_are_computed_forward_and_backward(gpt: MeasureSpeed, where: str) -> None:
    trial, timer = msgspec.structs.replace(_trial(gpt), layers=_trial(gpt).layers[::3]), _Timer(0.25)
    accelerator = open_accelerator(where)
    with mock.patch.object(TorchEngine, "backward", autospec=True, side_effect=TorchEngine.backward) as backward:
        found, shorter = measure_layers(accelerator, trial, timer)
    assert found is not None and not shorter
    assert (found.what, found.precision, found.operators) == ("layers", "fp32", trial.layers[-1].operators)
    assert found.flops_per_s == trial.layers[-1].flops.at(2) / 0.25
    assert timer.timed == 2 == len(trial.layers) and backward.call_count == 2 * timer.timed


def test_a_long_pass_is_the_last(gpt: MeasureSpeed) -> None:
    found, shorter = measure_layers(HOST, _trial(gpt), timer := _Timer(0.5))
    assert timer.timed == 1 and not shorter
    assert found is not None and found.operators == _trial(gpt).layers[0].operators


def test_layers_that_do_not_fit_are_named(gpt: MeasureSpeed) -> None:
    trial = _trial(gpt)
    room = max(layers.memory_bytes for layers in trial.layers[:2])
    found, shorter = measure_layers(HOST, trial, _Timer(0.1), room)
    longer = next(layers for layers in trial.layers if layers.memory_bytes > room)
    assert found is not None and found.operators < longer.operators
    assert shorter.startswith(f"the first {longer.operators} of {trial.operators} operators take ")
    assert measure_layers(HOST, trial, _Timer(0.1), 0)[0] is None


def test_what_the_allocator_has_not_counts_as_what_does_not_fit(
    gpt: MeasureSpeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ISTHMUS_CHECKED_MEMORY", "40MiB")
    first, *_, last = (msgspec.structs.replace(layers, memory_bytes=0) for layers in _trial(gpt).layers)
    many = msgspec.structs.replace(_trial(gpt).engine, micro_batch_size=256)
    hasty = msgspec.structs.replace(_trial(gpt), layers=(first, last), engine=many)
    found, shorter = measure_layers(open_checked(8, fresh=True), hasty, _Timer(0.1))
    assert shorter == f"all {last.operators} operators: out of memory"
    assert found is not None and found.operators == first.operators


def test_an_operator_that_may_not_travel_is_not_computed(gpt: MeasureSpeed) -> None:
    before, *_, last = _trial(gpt).layers
    ops = tuple(
        msgspec.structs.replace(op, target="aten.set_.source_Storage") if op.target == "aten.linear.default" else op
        for op in last.stage.ops
    )
    hostile = msgspec.structs.replace(last, stage=msgspec.structs.replace(last.stage, ops=ops))
    trial = msgspec.structs.replace(_trial(gpt), layers=(before, hostile))
    found, shorter = measure_layers(HOST, trial, _Timer(0.1))
    assert "set_" in shorter and found is not None and found.operators == before.operators


def test_a_site_computes_no_stage_of_a_coordinators(gpt: MeasureSpeed, tmp_path: Path) -> None:
    asked: list[MeasureSpeed] = []

    def computed(message: MeasureSpeed, _: ProcessPlace) -> MeasuredSpeed:
        asked.append(message)
        return MeasuredSpeed(run=message.run)

    membership = Membership("a", (("127.0.0.1", 1),))
    for run_starter in (None, mock.Mock()):
        agent = Agent(tmp_path, membership, ProcessPlace(), timeout_s=1.0, log=lambda _: None, run_starter=run_starter)
        with (
            mock.patch.object(agents, "compute_speed", computed),
            mock.patch.object(agent, "_beside", lambda act: act()),
        ):
            agent._follow(gpt, mock.Mock())  # pyright: ignore[reportPrivateUsage]
    device, site = asked
    assert device == gpt and site.trial is None and site.operators == gpt.operators


def test_a_rank_computes_its_share(gpt: MeasureSpeed) -> None:
    trial = _trial(gpt)
    assert share_of(trial, 2).engine.micro_batch_size == 1
    assert share_of(trial, 3) == trial
    fixed = msgspec.structs.replace(trial, any_batch=False)
    assert share_of(fixed, 2) == fixed


def test_plans_go_by_the_models_own_layers_where_they_were_measured() -> None:
    products = SpeedSample(what="products", precision="fp32", flops=8.0, seconds=1.0)
    attention = SpeedSample(what="attention", precision="fp32", flops=1.0, seconds=2.0)
    layers = SpeedSample(what="layers", precision="fp32", flops=5.0, seconds=2.0, operators=3)
    half = msgspec.structs.replace(layers, precision="fp16", flops=6.0)
    assert planned_speed([products, attention], "full") == 3.0
    assert planned_speed([products, layers, attention, half], "full") == 2.5
    assert planned_speed([products, half], "half") == 3.0
    assert planned_speed([products], "half") == 0.0
    ranks = combined_speed([[products, layers], [msgspec.structs.replace(layers, operators=2)]], machines=2.0)
    assert [(f.what, f.operators, f.flops_per_s) for f in ranks] == [("layers", 2, 10.0)]


@pytest.mark.long
def test_an_accelerator_is_measured_in_a_process_of_its_own(gpt: MeasureSpeed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISTHMUS_CHECKED_MEMORY", "300MiB")
    trial = msgspec.structs.replace(_trial(gpt), layers=_trial(gpt).layers[-1:])
    asked = msgspec.structs.replace(gpt, run="p", operators=(MatrixProduct(1, 8, 8, 8),), trial=trial)
    place = ProcessPlace(accelerator="checked:0", hardware="an emulated one (checked:0)", memory_bytes=1 << 40)
    found = compute_speed(asked, place)
    assert not found.failure and not found.shorter
    assert found.hardware == place.hardware
    assert 200 << 20 <= found.memory_bytes <= 300 << 20, "what one process can have there"
    assert {(f.what, f.precision) for f in found.figures} >= {("layers", "fp32"), ("products", "bf16")}
    assert min(found.peak_flops_per_s, found.host_bytes_per_s) > 0
    device = measured_device("a", "r", found, asked, lambda _: None)
    assert device.sustained_flops_per_s == pytest.approx(planned_speed(found.figures, "full"), rel=1e-3)
    assert device.measured[0].what == f"all {_trial(gpt).operators} operators in fp32"


def test_hardware_that_is_gone_is_named() -> None:
    found = compute_speed(MeasureSpeed(run="p"), ProcessPlace(accelerator="tpu:0"))
    assert found.failure.startswith("tpu:0: ") and "expected one of" in found.failure


def test_copies_are_timed_the_slower_way() -> None:
    times = iter([2.0, 4.0])
    with mock.patch.object(speed, "seconds", lambda *_: next(times)):
        assert speed.measure_copies(open_accelerator("cpu")) == speed.COPIED_BYTES / 4.0


def test_a_job_in_half_precision_plans_with_the_speed_in_it() -> None:
    known = Device(name="a", region="r", flops_per_s=8e9, scale=0.5, memory_bytes=1, half_flops_per_s=12e9)
    other = Device(name="b", region="s", flops_per_s=8e9, scale=0.5, memory_bytes=1)
    fleet = Fleet(name="f", devices=(known, other), links=Links(default=Link(1e-3, 1e6)))
    assert [d.sustained_flops_per_s for d in fleet.devices] == [4e9, 4e9]
    assert [d.sustained_flops_per_s for d in in_half(fleet).devices] == [12e9, 4e9]
    assert in_half(in_half(fleet)) == in_half(fleet)
    half = job_of("mlp", {}, DIGITS, precision="bf16")
    with mock.patch("isthmus.job.settings.resolve_fleet", lambda _: fleet):
        assert fleet_of(half) == in_half(fleet)
        assert fleet_of(job_of("mlp", {}, DIGITS)) == fleet
