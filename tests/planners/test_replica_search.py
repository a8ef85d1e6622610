"""The search of several replicas, on problems that a rule of it once got wrong."""

from __future__ import annotations

import msgspec
import pytest
from plan_cases import operator, parameter, placeholder, problem_of, tensor
from test_verify import question_of

from isthmus.fleet import Device, Fleet, Link, Links
from isthmus.graph import OpGraph, Ref
from isthmus.plans import Constraints
from isthmus.verification import Prover
from isthmus.verification.closed_form import ClosedForm, Setup
from isthmus.verification.reading import GraphReading

WORK = 2e8


def chain(flops: list[int], parameters: list[int], saved: int = 0) -> OpGraph:
    last, ops = "tokens", [placeholder("tokens", 4), placeholder("labels", 1)]
    for number, (work, size) in enumerate(zip(flops, parameters, strict=True)):
        ops.append(parameter(f"w{number}", size))
        ops.append(operator(f"op{number}", Ref(last), Ref(f"w{number}"), flops=work, width=1, saved=saved))
        last = f"op{number}"
    ops.append(operator("loss", Ref(last), "labels", flops=1, outputs=(tensor(batched=False),)))
    return OpGraph(name="chain", mode="train", ops=tuple(ops), loss=Ref("loss"))


def fleet_of(speeds: list[float], regions: str, links: Links, memory: int = 1 << 40) -> Fleet:
    devices = tuple(
        Device(name=f"d{k}", region=region, flops_per_s=speed, memory_bytes=1 << 40 if k else memory)
        for k, (speed, region) in enumerate(zip(speeds, regions, strict=True))
    )
    return Fleet(name="few", devices=devices, links=links)


def test_what_is_proven_of_one_region_is_not_proven_of_another() -> None:
    """The largest block may be summed in either of two regions: each is searched."""
    fleet = fleet_of([10.0, 10.0, 12.0, 12.0], "aabb", Links(intra=Link(0.0, 400.0), default=Link(0.1, 20.0)))
    problem = problem_of(chain([10, 10, 10, 40], [5, 5, 5, 400]), fleet, micro_batches=8, recompute=False)
    question = question_of(problem)
    reading = GraphReading(question)
    across = [Setup((a, b), (0, reading.places[2]), 4) for a, b in (("d0", "d2"), ("d1", "d3"))]
    step_s = ClosedForm(reading, priced=False, least=True).judged(across)
    assert Prover(question, 1.1 * step_s).run(lambda work: work > WORK) <= step_s * (1 + 1e-9)


@pytest.mark.parametrize("memory", [4200, 5000, 6600, 7200, 8400])
def test_a_stage_that_holds_few_micro_batches_may_recompute(memory: int) -> None:
    """Seven of eight micro-batches fit on the faster device if it computes its forward twice, five if not."""
    fleet = fleet_of([20.0, 3.0], "aa", Links(default=Link(0.0, 4000.0)), memory)
    question = question_of(problem_of(chain([10, 10], [2, 2], saved=300), fleet, micro_batches=8, schedule="gpipe"))
    again = [Setup(("d0",), (0,), 7, (True,)), Setup(("d1",), (0,), 1, (False,))]
    step_s = ClosedForm(GraphReading(question), priced=False, least=True).judged(again)
    prover = Prover(question, 1.3 * step_s)
    assert prover.run(lambda work: work > WORK) <= step_s * (1 + 1e-9)
    assert sorted(setup.micro_batches for setup in prover.found) == [1, 7]


@pytest.mark.parametrize("prices", [(1.0, 100.0), (100.0, 1.0)])
def test_of_devices_that_are_alike_the_cheap_one_may_keep_to_the_price(prices: tuple[float, float]) -> None:
    fleet = fleet_of([10.0, 10.0], "aa", Links(default=Link(50.0, 1.0)))
    devices = tuple(
        msgspec.structs.replace(d, price_per_hour=price) for d, price in zip(fleet.devices, prices, strict=True)
    )
    fleet = msgspec.structs.replace(fleet, devices=devices)
    graph = chain([10, 10, 10, 25], [5, 5, 5, 5])
    cheap = Setup((min(fleet.devices, key=lambda d: d.price_per_hour).name,), (0,), 2)
    question = question_of(problem_of(graph, fleet, micro_batches=2, recompute=False))
    price = ClosedForm(GraphReading(question), priced=True, least=True).judged([cheap])
    limited = Constraints(max_price=2000 * price)
    question = question_of(problem_of(graph, fleet, micro_batches=2, recompute=False, constraints=limited))
    step_s = ClosedForm(GraphReading(question), priced=False, least=True).judged([cheap])
    assert Prover(question, 1.3 * step_s).run(lambda work: work > WORK) <= step_s * (1 + 1e-9)
