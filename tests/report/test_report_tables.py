from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console, RenderableType
from synthetic_pipeline import make_plan

from isthmus.fleet import Fleet
from isthmus.graph.opgraph import Op, OpGraph, Ref
from isthmus.plans import Certificate, Constraints, Plan, question_in_words
from isthmus.report import (
    comparison_summary,
    comparison_table,
    fleets_table,
    plan_table,
    planners_table,
)
from isthmus.report.tables import certificate_text, proof_text
from isthmus.trace import Trace


def render(renderable: RenderableType, width: int = 120) -> str:
    console = Console(record=True, width=width, file=io.StringIO())
    console.print(renderable)
    text = console.export_text()
    assert max(len(line) for line in text.splitlines()) <= width
    return text


def row(text: str, start: str) -> str:
    (line,) = [line for line in text.splitlines() if line.startswith(start)]
    return line


def test_plan_names_modules_when_it_is_given_the_graph(plan: Plan, fleet: Fleet) -> None:
    ops = (
        Op(name="linear_0", kind="operator", target="aten.linear.default", module="blocks.0.attention"),
        Op(name="gelu_0", kind="operator", target="aten.gelu.default", module="blocks.0.mlp"),
    )
    graph = OpGraph(name="gpt-test", mode="train", ops=ops, loss=Ref("gelu_0"))
    text = render(plan_table(plan, fleet, graph), 200)
    assert "blocks.0.attention" in text
    assert "blocks.0.attention .. blocks.0.mlp" in text
    assert "linear_1" in text, "operators that the graph puts in no module keep their own name"


def test_plan_of_two_replicas_numbers_both(fleet: Fleet) -> None:
    half = make_plan(fleet.thin(2), 4)
    text = render(plan_table(msgspec.structs.replace(half, replicas=half.replicas * 2), fleet))
    assert [line.split()[0] for line in text.splitlines() if "linear_" in line] == ["0.0", "0.1", "1.0", "1.1"]


def test_names_are_not_markup(plan: Plan, fleet: Fleet) -> None:
    text = render(plan_table(msgspec.structs.replace(plan, model="[bold]x[/bold]", notes=("[red]y", ":smile:")), fleet))
    assert "[bold]x[/bold]" in text
    assert "[red]y" in text
    assert ":smile:" in text


@pytest.mark.parametrize("width", [80, 60])
def test_plan_stays_within_a_narrow_terminal(plan: Plan, fleet: Fleet, width: int) -> None:
    assert "device oslo-2." in render(plan_table(plan, fleet), width)


def test_no_color_is_honoured(plan: Plan, fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    def colours(environment: dict[str, str]) -> bool:
        console = Console(
            file=io.StringIO(), force_terminal=True, width=120, color_system="standard", _environ=environment
        )
        big = msgspec.structs.replace(plan.stages[0].memory, activations=2 * 1024**3)
        (replica,) = plan.replicas
        stages = (msgspec.structs.replace(replica.stages[0], memory=big), *replica.stages[1:])
        full = msgspec.structs.replace(plan, replicas=(msgspec.structs.replace(replica, stages=stages),))
        console.print(plan_table(full, fleet))
        assert isinstance(console.file, io.StringIO)
        return "\x1b[31m" in console.file.getvalue()

    monkeypatch.delenv("NO_COLOR", raising=False)
    assert colours({})
    assert not colours({"NO_COLOR": "1"})


def test_comparison(predicted: Trace, measured: Trace, plan: Plan) -> None:
    text = render(comparison_table(comparison_summary(predicted, measured, plan)))
    assert row(text, "measured").split()[-1] == "-"
    assert row(text, "simulator").split() == ["simulator", "1.44", "s", row(text, "simulator").split()[-1]]
    assert row(text, "simulator").endswith("%")
    assert "1.13 s" in row(text, "formula")
    assert row(text, "oslo-3  ").count("%") == 2
    link = row(text, "lisbon-1 to oslo-2")
    assert link.count("4,000,000") == 2
    assert "100 Mbit/s" in link


def test_comparison_without_links(predicted: Trace, plan: Plan) -> None:
    alone = Trace(source="runtime", run="alone", spans=tuple(s for s in predicted.spans if s.track == "compute"))
    text = render(comparison_table(comparison_summary(alone, alone, plan)))
    assert "Devices" in text
    assert "Links" not in text


def test_described_lists() -> None:
    listed = [("dp", "exact", ("price",)), ("even", "equal layers [baseline]", ()), ("own", "of somebody else", None)]
    text = render(planners_table("Planners", listed, ("replicas", "price")))
    assert "Planners" in text
    assert row(text, "dp").split() == ["dp", "-", "yes", "exact"]
    assert row(text, "even").split(maxsplit=3)[1:] == ["-", "-", "equal layers [baseline]"]
    assert row(text, "own").strip().split(maxsplit=3)[1:] == ["?", "?", "of somebody else"]
    assert row(render(fleets_table([("laptop", "two devices")])), "laptop").endswith("two devices")


def test_a_plan_is_not_told_twice(plan: Plan, fleet: Fleet) -> None:
    row = f"{plan.devices[0]} runs operators 0..3, 20% of the FLOPs at 1 GFLOPS, 0.1 s per micro-batch"
    text = render(plan_table(msgspec.structs.replace(plan, notes=(row, "lima is left out: it is slow")), fleet), 200)
    assert "runs operators" not in text
    assert "lima" in text


def test_a_plan_says_what_a_newcomer_needs(plan: Plan, fleet: Fleet) -> None:
    text = render(plan_table(plan, fleet))
    assert text.startswith("Plan for gpt-test on fleet two-cities: 8 micro-batches of 4")
    assert "488 KiB to oslo-2, 60 ms" in text and "488 KiB to lisbon-1, 65 ms" in text
    assert all(cell in row(text, "1 ") for cell in ("lisbon-1 (lisbon)", "3.81 MiB", "90 ms", "116 MiB of 2 GiB"))
    assert "One step should take 1.13 s" in text and "What limits it: device oslo-2." in text
    assert "No plan of this planner's kind can be faster than" in text and "(4.2 % more)" in text
    assert "lisbon-0 holds the embedding." in text and "operators" not in text and "FusionLLM" not in text
    left_out = msgspec.structs.replace(plan, notes=("lima is left out: it is slow", "rome is left out: no memory"))
    assert "Not used: lima, rome." in render(plan_table(left_out, fleet))
    many = msgspec.structs.replace(plan, notes=tuple(f"d{k} is left out: it is slow" for k in range(1500)))
    assert "Not used: d0, d1, d2, d3, d4, d5, d6, d7, d8, d9, d10, d11 and 1,488 more." in " ".join(
        render(plan_table(many, fleet)).split()
    )


def test_a_plan_says_that_there_are_replicas(fleet: Fleet, plan: Plan) -> None:
    half = msgspec.structs.replace(plan, micro_batches=2 * plan.micro_batches, replicas=plan.replicas * 2)
    words = "2 replicas of the whole model divide the batch; 1.0 is stage 0 of replica 1."
    assert words in render(plan_table(half, fleet))
    assert "replica" not in render(plan_table(plan, fleet))


def test_averaging_that_takes_most_of_a_step_is_what_limits_it(plan: Plan, fleet: Fleet) -> None:
    said = plan.predicted
    for sync_s, words in (
        (1.0, "What limits it: device oslo-2."),
        (2.0, "What limits it: averaging the replicas, 2 s."),
    ):
        averaged = msgspec.structs.replace(said, step_s=said.step_s + sync_s, sync_s=sync_s)
        assert words in render(plan_table(msgspec.structs.replace(plan, predicted=averaged), fleet), 200)


def test_a_table_says_what_this_computer_was_too_slow_for(predicted: Trace, measured: Trace, plan: Plan) -> None:
    found = comparison_summary(predicted, measured, plan)
    slow = "warning: this computer is too slow to emulate oslo-2"
    assert slow not in render(comparison_table(found), 200)
    assert slow in render(comparison_table(msgspec.structs.replace(found, too_slow=(slow,))), 200)


def test_a_proof_in_words() -> None:
    asked = question_in_words(Constraints(), [4], priced=False, period=1, recompute=True)
    certificate = Certificate(lower_bound=1.0, gap=0.026, question=asked)
    none = "No plan with one stage per device"
    found = f"{none} can be faster than 1 s; this one takes 1.03 s (2.6 % more)"
    assert proof_text(certificate) == found
    assert certificate_text(certificate).startswith(f"{found}. Bounded: the time of a step of any plan: any")
    proven = msgspec.structs.replace(certificate, gap=0.0)
    assert proof_text(proven) == f"{none} is faster: this is proven"
    ends = Constraints(data_holders=("d0",), labels_stay=True)
    asked = question_in_words(ends, [4], priced=False, period=1, recompute=True)
    both = msgspec.structs.replace(proven, question=asked)
    assert proof_text(both) == f"{none} or both ends on one is faster: this is proven"
    far = msgspec.structs.replace(certificate, gap=7.383)
    assert proof_text(far) == f"{none} can be faster than 1 s; this one takes 8.38 s (8.4 times)"
    priced = question_in_words(Constraints(objective="cost"), [4], priced=True, period=1, recompute=True)
    cheapest = Certificate(lower_bound=1.0, gap=0.5, question=priced, objective="cost")
    assert proof_text(cheapest) == f"{none} can cost less than 1000 per 1,000 steps; this one costs 1500 (50.0 % more)"
