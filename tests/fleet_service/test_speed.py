"""What a probe measures of hardware: with the hardware's own clock, in a job's products, at both precisions."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from isthmus.accelerators import HOST, Event, open_accelerator
from isthmus.fleet import Device, Fleet, Link, Links
from isthmus.fleet.changes import in_half
from isthmus.job import fleet_of, prepare
from isthmus.runtime.messages.probe import Compute, Product
from isthmus.runtime.processes.launcher import Place
from isthmus.runtime.service import speed
from isthmus.runtime.service.probing import compute_speed
from isthmus.runtime.service.products import products_of
from tests.runtime.jobs import DIGITS, TEXT, job_of


class _Moment(Event):
    def __init__(self, at_s: float) -> None:
        self.at_s = at_s

    def done(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def seconds_to(self, later: Event) -> float:
        assert isinstance(later, _Moment)
        return later.at_s - self.at_s


def test_the_fastest_pass_counts_and_the_first_does_not() -> None:
    clock, taken = [0.0], iter([0.1, 5.0, 2.0, 3.0])

    def act() -> None:
        clock[0] += next(taken)

    with mock.patch.object(HOST, "record", lambda timed: _Moment(clock[0])):
        assert speed.seconds(HOST, act, passes=3) == pytest.approx(2.0)


def test_each_product_counts_as_often_as_the_model_has_it() -> None:
    products = (Product(2, 3, 4, 5, count=10), Product(1, 8, 8, 8))
    with mock.patch.object(speed, "seconds", lambda *_: 0.5):
        found = speed.measure_products(HOST, torch.float32, products)
    assert found == pytest.approx((10 * 2 * 2 * 3 * 4 * 5 + 2 * 8**3) / (11 * 0.5))


def test_products_are_those_of_the_jobs_model() -> None:
    model = {"vocab_size": 256, "sequence_length": 16, "width": 32, "layers": 2, "heads": 4}
    job = job_of("gpt", model, TEXT)  # micro-batches of 2
    found = products_of(prepare(job).captured.train, job.micro_batch_size)
    tokens, heads = 2 * 16, 2 * 4
    assert {(p.batch, p.m, p.n, p.k) for p in found} >= {(1, tokens, 256, 32), (1, tokens, 128, 32)}
    assert any(p.batch == heads and p.m == 16 and {p.n, p.k} == {8, 16} for p in found), "attention"
    assert [p.flops for p in found] == sorted((p.flops for p in found), reverse=True)


def test_an_accelerator_is_measured_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISTHMUS_CHECKED_MEMORY", "300MiB")
    products = tuple(Product(1, 8, 8, 8) for _ in range(2))
    place = Place(accelerator="checked:0", hardware="an emulated one (checked:0)", memory_bytes=1 << 40)
    found = compute_speed(Compute(run="p", products=products), 1, place)
    assert not found.failure
    assert found.hardware == place.hardware
    assert 200 << 20 <= found.memory_bytes <= 300 << 20, "what one process can have there"
    assert min(found.flops_per_s, found.half_flops_per_s, found.peak_flops_per_s, found.host_bytes_per_s) > 0


def test_hardware_that_is_gone_is_named() -> None:
    found = compute_speed(Compute(run="p"), 1, Place(accelerator="tpu:0"))
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
    with mock.patch("isthmus.job.loading.resolve_fleet", lambda _: fleet):
        assert fleet_of(half) == in_half(fleet)
        assert fleet_of(job_of("mlp", {}, DIGITS)) == fleet
