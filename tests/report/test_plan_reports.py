"""A plan compared, explained and drawn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
from matplotlib.image import imread
from rich.console import Console, RenderableType

from isthmus.cost import PlanLayout, Problem, build_plan, build_replicas
from isthmus.errors import UserError
from isthmus.fleet import Device, Fleet, Link, Links, Region
from isthmus.graph import Affine, Flow, Op, OpGraph, Ref, TensorSpec
from isthmus.plans import Certificate, Constraints, Plan, question_in_words
from isthmus.report import (
    ComparedPlan,
    Comparison,
    compared_table,
    draw_plan,
    explain,
    explanation_text,
    improvements,
    least_headroom,
    linked_devices,
    plan_table,
    ranked,
    verdict_table,
)
from isthmus.report.explanation import with_device
from isthmus.report.fleet_picture import slots_of
from isthmus.verification import BoundCheck, Difference, Verdict

UNITS = 12


def spec(*shape: int, batched: bool = True) -> TensorSpec:
    full = (Affine(1), *shape) if batched else shape
    return TensorSpec("float32", full, tuple(1 for _ in full))


def graph(units: int = UNITS) -> OpGraph:
    """A chain; each operator has a weight, 100 FLOPs forward and 200 backward, and sends 40 bytes."""
    ops = [Op(name="x", kind="placeholder", target="x", outputs=(spec(1),), requires_grad=(False,))]
    for k in range(units):
        ops.append(
            Op(name=f"w{k}", kind="parameter", target=f"w{k}", outputs=(spec(5, batched=False),), requires_grad=(True,))
        )
        ops.append(
            Op(
                name=f"op{k}",
                kind="operator",
                target="aten.test.default",
                requires_grad=(True,),
                args=(Ref(f"op{k - 1}" if k else "x"), Ref(f"w{k}")),
                outputs=(spec(10),),
                saved_bytes=Affine(8),
                flops_forward=Affine(100),
                flops_backward=Affine(200),
            )
        )
    return OpGraph(name="chain", mode="train", ops=tuple(ops), loss=Ref(f"op{units - 1}"))


def fleet(speeds: Sequence[float], bandwidth: float = 1000.0, *, memory: int = 1 << 20) -> Fleet:
    devices = tuple(
        Device(name=f"d{k}", region="east" if k < len(speeds) / 2 else "west", flops_per_s=s, memory_bytes=memory)
        for k, s in enumerate(speeds)
    )
    links = Links(intra=Link(0.001, 4 * bandwidth), default=Link(0.1, bandwidth))
    return Fleet(name="hand", devices=devices, links=links)


def problem(on: Fleet, micro_batches: int = 8, units: int = UNITS, *, recompute: bool = True) -> Problem:
    return Problem(
        flow=Flow(graph(units)), fleet=on, micro_batch_size=1, micro_batches=micro_batches, recompute=recompute
    )


def told(what: RenderableType) -> str:
    console = Console(width=200, no_color=True)
    with console.capture() as text:
        console.print(what)
    return text.get()


def test_each_change_is_the_step_of_a_fleet_that_was_changed() -> None:
    asked = problem(fleet([100.0, 300.0, 200.0], bandwidth=20.0))
    plan = build_plan(asked, ["d0", "d1", "d2"], [4, 8], planner="hand")
    found = {change.what: change for change in improvements(asked, plan)}

    def step_s(on: Fleet) -> float:
        return build_plan(problem(on), ["d0", "d1", "d2"], [4, 8], planner="hand").predicted.step_s

    assert found["d0 twice as fast"].step_s == pytest.approx(step_s(fleet([200.0, 300.0, 200.0], bandwidth=20.0)))
    assert found["d2 twice as fast"].step_s == pytest.approx(step_s(fleet([100.0, 300.0, 400.0], bandwidth=20.0)))
    best = max(found.values(), key=lambda change: change.saved)
    assert best.saved == pytest.approx(1 - best.step_s / plan.predicted.step_s)
    assert [c.step_s for c in improvements(asked, plan)] == sorted(c.step_s for c in found.values())
    # d0 and d1 share a site: 80 bytes/s between them; d1 and d2 do not.
    wider = msgspec.structs.replace(asked.fleet.links, default=Link(0.1, 40.0))
    across = msgspec.structs.replace(asked.fleet, links=wider)
    assert found["twice the bandwidth between d1 and d2"].step_s == pytest.approx(step_s(across))


def test_what_helps_is_judged_by_the_simulated_step_where_there_is_one() -> None:
    asked = problem(fleet([100.0, 300.0, 200.0, 150.0], bandwidth=20.0))
    plan = build_plan(asked, ["d0", "d1", "d2"], [4, 8], planner="hand")

    def steady_s(tried: Plan, on: Fleet) -> float:
        """Another order than the formula's."""
        return 100.0 / on.device("d1").sustained_flops_per_s + 10.0 * ("d3" in tried.devices)

    found = improvements(asked, plan, steady_s)
    assert (found[0].what, found[0].saved) == ("d1 twice as fast", 0.5)
    assert improvements(asked, plan)[0].what != found[0].what
    change = with_device(asked, plan, "d3", steady_s)
    assert change is not None and change.step_s == 10 + 1 / 3


def test_devices_that_are_equally_slow_are_sped_up_together() -> None:
    asked = problem(fleet([100.0, 100.0, 1000.0]), micro_batches=32)
    plan = build_plan(asked, ["d0", "d1", "d2"], [4, 8], planner="hand")
    found = {change.what: change.saved for change in improvements(asked, plan)}
    assert found["d0 and d1 twice as fast, together"] > 0.4 > 0.1 > found["d0 twice as fast"]


def test_a_link_that_a_plan_uses_in_both_directions_is_one() -> None:
    asked = problem(fleet([100.0, 300.0]))
    plan = build_plan(asked, ["d0", "d1", "d0"], [4, 8], planner="hand")
    assert linked_devices(plan) == [("d0", "d1")]


def test_an_uplink_and_memory_that_hold_a_plan_up_are_named() -> None:
    slow = msgspec.structs.replace(
        fleet([1e4, 1e4], 1e4), region_info=(Region(region="east", uplink_bytes_per_s=10.0),)
    )
    asked = problem(slow)
    plan = build_plan(asked, ["d0", "d1"], [6], planner="hand")
    assert improvements(asked, plan)[0].what == "twice the uplink of east"
    tight = problem(fleet([1e3, 1e3], 1e3, memory=330), recompute=False)
    plan = build_plan(tight, ["d0", "d1"], [6], planner="hand")
    assert plan.predicted.bottleneck.startswith("memory of device")
    assert "twice the memory" in improvements(tight, plan)[0].what
    assert "at once" in explain(tight, plan).bottleneck[0]


def test_a_stage_that_recomputes_is_told() -> None:
    tight = problem(fleet([1e3, 1e3], 1e3, memory=330))
    plan = build_plan(tight, ["d0", "d1"], [6], planner="hand")
    assert [stage.recompute for stage in plan.stages] == [True, False]
    # 6 operators of 100 FLOPs and 8 saved bytes; 120 bytes of weights, 120 of gradients
    (line,) = [line for line in explain(tight, plan).stages if "again" in line]
    assert line == (
        "d0 computes its forward again in each backward, 600 ms: it keeps 4 B per micro-batch in flight and 48 B once, "
        "and would keep 48 B each otherwise, which leaves room for 1"
    )
    assert explain(tight, plan).stages[0].startswith("d0: operators 0..5, 50.0% of the FLOPs, computes 100% ")
    assert "F twice" in told(plan_table(plan, tight.fleet))
    assert [slot.label for slot in slots_of(plan, tight.fleet)[0]] == ["0*", "1"]


def test_an_explanation_says_what_holds_the_plan_up_and_by_how_much() -> None:
    asked = problem(fleet([100.0, 300.0, 240.0, 1.0]))
    plan = build_plan(asked, ["d0", "d1", "d2"], [4, 8], planner="hand")
    found = explain(asked, plan)
    # 4 operators of 300 FLOPs: 12 s on d0, 4 s on d1, 5 s on d2.
    assert found.bottleneck[:2] == (
        "device d0, computing: 12 s per micro-batch.",
        "Next is device d2, computing: 5 s, 58.3% less.",
    )
    assert found.helps[0].what == "d0 twice as fast"
    (left_out,) = found.left_out
    assert left_out.startswith("d3: the best place found for it is") and left_out.endswith("longer")
    assert [line.partition(":")[0] for line in found.stages] == ["d0", "d1", "d2"]
    assert "east to west" in found.links[1] and "40 B there in 140 ms" in found.links[1]
    text = told(explanation_text(found))
    for title in ("The step", "What sets the pace", "Who does what", "What crosses links", "Who is left out"):
        assert title in text
    assert "d0 twice as fast: a step of" in text


def test_a_device_that_should_not_have_been_left_out_is_told() -> None:
    asked = problem(fleet([100.0, 100.0, 800.0]))
    plan = build_plan(asked, ["d0", "d1"], [6], planner="hand")
    change = with_device(asked, plan, "d2")
    assert change is not None and change.saved > 0.09
    assert "which planner hand missed" in explain(asked, plan).left_out[0]
    small = msgspec.structs.replace(
        asked.fleet, devices=(*asked.fleet.devices[:2], msgspec.structs.replace(asked.fleet.devices[2], memory_bytes=9))
    )
    assert explain(problem(small), plan).left_out == ("d2: no stage fits it, in place of another device or beside it",)


def test_replicas_are_explained_one_by_one() -> None:
    asked = problem(fleet([100.0] * 4))
    plan = build_replicas(asked, [PlanLayout(("d0", "d1"), (6,), 3), PlanLayout(("d2", "d3"), (6,), 5)], planner="hand")
    found = explain(asked, plan)
    assert [line for line in found.stages if line.startswith("Replica")] == [
        "Replica 0 takes 3 of 8 micro-batches, 1.2 min:",
        "Replica 1 takes 5 of 8 micro-batches, 1.8 min:",
    ]
    assert any("of gradients" in line for line in found.links)
    assert any("averaging their gradients" in line for line in found.step)


def row(planner: str, simulated_s: float | None, plan_s: float = 0.1) -> ComparedPlan:
    if simulated_s is None:
        return ComparedPlan(planner=planner, plan_s=plan_s, refused="stage 0 does not fit: 7 B short")
    return ComparedPlan(
        planner=planner,
        plan_s=plan_s,
        step_s=simulated_s * 0.9,
        simulated_step_s=simulated_s,
        price_per_1000_steps=0.25,
        lower_bound_s=simulated_s / 2,
        gap=0.8,
        devices=4,
        replicas=2,
    )


def test_comparison_ranks_by_the_simulated_step_and_says_who_refused() -> None:
    rows = ranked([row("none", None), row("slow", 2.0), row("late", 1.0, 9.0), row("soon", 1.0)])
    assert [r.planner for r in rows] == ["soon", "late", "slow", "none"]
    text = told(compared_table(Comparison(model="m", fleet="f", batch=2, rows=rows)))
    assert "none made no plan: stage 0 does not fit: 7 B short" in text
    line = next(line for line in text.splitlines() if line.startswith("soon"))
    assert " ".join(line.split()) == "soon 900 ms 1 s 0.25 500 ms 80.00% 100 ms - - 4 in 2"


def test_a_comparison_says_once_that_a_plan_reaches_the_bound() -> None:
    asked = question_in_words(Constraints(), [4], priced=False, period=1, recompute=True)
    rows = [msgspec.structs.replace(row(name, s), question=asked) for name, s in (("best", 1.0), ("far", 2.0))]
    words = "A plan reaches it."
    assert words not in told(compared_table(Comparison(model="m", fleet="f", batch=2, rows=ranked(rows))))
    rows[0] = msgspec.structs.replace(rows[0], exact=True)
    text = told(compared_table(Comparison(model="m", fleet="f", batch=2, rows=ranked(rows))))
    assert " ".join(text.split()).count(words) == 1


def test_headroom_is_that_of_the_fullest_device() -> None:
    asked = problem(fleet([100.0, 100.0], memory=2000))
    plan = build_plan(asked, ["d0", "d1"], [9], planner="hand")
    found = least_headroom(plan, asked.fleet)
    used = {stage.device: stage.memory.total for stage in plan.stages}
    fullest = max(used, key=used.__getitem__)
    assert (found.device, found.free_bytes, found.share) == (fullest, 2000 - used[fullest], 1 - used[fullest] / 2000)


def test_a_verdict_names_fields_and_says_what_was_done() -> None:
    asked = problem(fleet([100.0]))
    plan = build_plan(asked, ["d0"], [], planner="hand")
    bound = BoundCheck(status="none stated", text="nobody looked")
    assert "all 7 figures hold" in told(verdict_table(Verdict(checked=7, differences=(), bound=bound), plan, "p.json"))
    wrong = Difference(field="predicted.step_s", got=2.0, expected=1.5, by="+0.5")
    text = told(verdict_table(Verdict(checked=7, differences=(wrong,), bound=bound), plan, "p.json"))
    assert "1 of 7 figures do not hold" in text and "nobody looked" in text
    assert next(x for x in text.splitlines() if "step_s" in x).split() == ["predicted.step_s", "2", "1.5", "+0.5"]


def test_a_bound_of_a_document_is_no_claim_before_it_is_proven() -> None:
    plan = build_plan(problem(fleet([100.0])), ["d0"], [], planner="hand")
    forged = Certificate(lower_bound=1.0, gap=0.0, question="the time of a step of any plan: any")
    plan = msgspec.structs.replace(plan, certificate=forged)
    wrong = Difference(field="predicted.step_s", got=2.0, expected=1.5)
    claim = "No plan with one stage per device is faster: this is proven"
    proven, unchecked = BoundCheck(status="proven", text="so"), BoundCheck(status="unchecked", text="so")
    for bound, differences in ((proven, ()), (unchecked, ()), (unchecked, (wrong,))):
        text = told(verdict_table(Verdict(checked=7, differences=differences, bound=bound), plan, "p.json"))
        assert claim in text
        assert (f"stated, not proven here: {claim}" in text) == (bound is unchecked)


def pixels(path: Path) -> np.ndarray:
    return np.round(imread(path)[..., :3] * 255).astype(np.uint8)


def share(image: np.ndarray, colour: str) -> float:
    rgb = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)])
    return float((image == rgb).all(axis=-1).mean())


@pytest.mark.parametrize("count", [1, 4, 64])
def test_a_picture_holds_stages_idle_devices_and_the_slowest_links(count: int, tmp_path: Path) -> None:
    on = fleet([100.0] * (count + 1))
    stages = min(count, 7)
    asked = problem(on, units=12)
    plan = build_plan(asked, on.names[:stages], list(range(1, stages)), planner="hand")
    draw_plan(plan, on, tmp_path / "plan.png")
    image = pixels(tmp_path / "plan.png")
    assert share(image, "#56B4E9") > 0.0001, "the first stage"
    assert share(image, "#D9D9D9") > 0.0001, "the device that is left out"
    assert (share(image, "#D55E00") > 0.0002) == (stages > 1), "frames of the slowest links"
    assert image.shape[0] < 2600 and image.shape[1] < 2600


def test_a_picture_of_more_devices_than_fit_draws_those_in_use(tmp_path: Path) -> None:
    on = fleet([100.0] * 300)
    plan = build_plan(problem(on), ["d299", "d150"], [6], planner="hand")
    draw_plan(plan, on, tmp_path / "plan.png")
    image = pixels(tmp_path / "plan.png")
    assert share(image, "#56B4E9") > 0.00001 and share(image, "#E69F00") > 0.00001


def test_a_picture_of_a_device_that_is_not_there(tmp_path: Path) -> None:
    plan = build_plan(problem(fleet([100.0, 100.0])), ["d0", "d1"], [6], planner="hand")
    with pytest.raises(UserError, match="unknown device 'd1'"):
        draw_plan(plan, fleet([100.0]), tmp_path / "plan.png")
