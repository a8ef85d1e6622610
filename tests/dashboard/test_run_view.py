"""What the page shows, as documents: no browser is needed for it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from isthmus.api.run_entries import ENTRIES, SPANS, run_entries
from isthmus.api.watch import RunLog
from isthmus.callbacks import Evaluated, RunFault, RunStarted, StepDone
from isthmus.dashboard.run_folder import FolderSource, WatchedRun
from isthmus.dashboard.run_view import overview, state_at
from isthmus.dashboard.spans import LightSpan, SpanTable
from isthmus.dashboard.timeline import Timelines
from isthmus.errors import UserError
from isthmus.run_files import CLIENT_NAMES, ROUND_LINES
from isthmus.trace import Span
from tests.dashboard.folders import federated_run

STARTED = RunStarted(run=Path(), kind="pipeline", steps=10)


def _devices(shown: dict[str, Any]) -> dict[str, str]:
    return {d["name"]: d["state"] for devices in shown["regions"].values() for d in devices}


def _lost(run: WatchedRun) -> int:
    return next(n for n, entry in enumerate(run.entries) if entry.kind == "lost")


def test_the_moment_before_a_loss_shows_the_device_at_work(recorded: Path) -> None:
    run = WatchedRun(recorded)
    before: Any = state_at(run, _lost(run) - 1)
    after: Any = state_at(run, _lost(run))
    now: Any = state_at(run)
    assert _devices(before)["home-1"] == "working" and _devices(after)["home-1"] == "lost"
    assert {link["state"] for link in after["links"] if "home-1" in link["ends"]} == {"broken"}
    assert "broken" not in {link["state"] for link in before["links"]}
    assert (before["plans"], now["plans"]) == (1, 2)
    assert [s["device"] for s in now["stages"]] == ["home-0", "office-0", "office-1", "cloud-0", "cloud-1"]
    assert set(_devices(now).values()) == {"done", "lost"}


def test_stages_have_the_modules_that_tables_have(recorded: Path) -> None:
    run = WatchedRun(recorded)
    bare: Any = state_at(run)
    first = bare["stages"][0]["first_op"]
    ops = [{"name": first, "kind": "call", "module": "blocks.0.norm", "outputs": []}]
    (recorded / "graph.json").write_text(json.dumps({"name": "gpt", "ops": ops}))
    named: Any = state_at(WatchedRun(recorded))
    assert named["stages"][0]["first_op"] == "blocks.0.norm"
    assert named["stages"][0]["last_op"] == bare["stages"][0]["last_op"]


def test_clients_have_their_names_where_the_run_knows_them(tmp_path: Path) -> None:
    folder = federated_run(tmp_path / "rounds")
    lines = [json.loads(line) for line in (folder / ROUND_LINES).read_text().splitlines()]
    for line in lines:
        line["evaluation"]["clients"] = {"accuracy": {"mean": 0.5, "each": {"0": 0.25, "1": 0.75, "site": 0.5}}}
    (folder / ROUND_LINES).write_text("".join(json.dumps(line) + "\n" for line in lines))
    for names, expected in ((None, ["0", "1", "site"]), (["alice", "bob"], ["alice", "bob", "site"])):
        if names is not None:
            (folder / CLIENT_NAMES).write_text(json.dumps(names))
        shown: Any = overview(WatchedRun(folder))
        assert list(shown["rounds"][0]["evaluation"]["clients"]["accuracy"]["each"]) == expected
        now: Any = state_at(WatchedRun(folder))
        assert list(now["round"]["evaluation"]["clients"]["accuracy"]["each"]) == expected


def test_rounds_are_shown_as_their_entries_say(tmp_path: Path) -> None:
    run = WatchedRun(federated_run(tmp_path / "rounds"))
    shown: Any = overview(run)
    assert (shown["state"], shown["unit"], shown["done"], shown["of"]) == ("done", "round", 5, 5)
    assert shown["loss"] == pytest.approx(0.4) and shown["figures"]["step_s"]["curve"][1] == [1.5] * 5
    now: Any = state_at(run)
    assert now["round"]["round"] == now["step"] == 5 and now["metrics"] == {"accuracy": pytest.approx(0.8)}
    assert shown["figures"].keys() > {"clients", "refused", "missing", "longest_s", "planned_s"}


def test_a_run_at_once(recorded: Path) -> None:
    shown: Any = overview(WatchedRun(recorded))
    assert (shown["state"], shown["unit"], shown["unread"]) == ("done", "step", 0)
    assert shown["done"] == shown["of"]
    steps = shown["figures"]["sent_bytes"]["curve"][0]
    assert steps == sorted(set(steps)), "steps that were done again count once"
    assert [m["device"] for m in shown["marks"] if m["kind"] == "lost"] == ["home-1"]


def test_links_are_measured_against_the_plan(recorded: Path) -> None:
    shown: Any = state_at(WatchedRun(recorded))
    link = next(link for link in shown["links"] if set(link["ends"]) == {"office-1", "cloud-0"})
    assert link["planned_per_s"] == 20e6 / 8
    assert link["share"] == pytest.approx(link["measured_per_s"] / link["planned_per_s"])
    assert link["state"] == ("slow" if link["share"] < 0.6 else "used")


def test_a_step_as_predicted_and_as_measured(recorded: Path) -> None:
    run = WatchedRun(recorded)
    shown: Any = Timelines().timeline(run, 10)
    before: Any = Timelines().timeline(run, 10, _lost(run))
    assert {r["device"] for r in shown["measured"]["rows"]} == {r["device"] for r in shown["predicted"]["rows"]}
    assert "home-1" not in {r["device"] for r in shown["measured"]["rows"]}, "step 10 was done again, without it"
    assert shown["predicted"]["step_s"] != shown["measured"]["step_s"]
    for part in ("measured", "predicted"):
        assert "home-1" in {r["device"] for r in before[part]["rows"]}, "the plan of that moment"
    near: Any = Timelines().timeline(run, 10, span_s=(0.0, 0.1))
    assert sum(len(r["bars"]) for r in near["measured"]["rows"]) < sum(
        len(r["bars"]) for r in shown["measured"]["rows"]
    )
    assert "problem" in Timelines().timeline(run, 4000)


def test_a_run_that_works_has_its_prediction_simulated(recorded: Path) -> None:
    (recorded / "predicted.jsonl").unlink()
    lines = (recorded / "trace.jsonl").read_bytes().splitlines(keepends=True)[1:]
    (recorded / SPANS).write_bytes(b"".join(lines))
    (recorded / "trace.jsonl").unlink()
    shown: Any = Timelines().timeline(WatchedRun(recorded), 10)
    assert shown["predicted"]["step_s"] > 0 and shown["measured"]["step_s"] > 0


def test_lines_that_are_added_are_seen(recorded: Path) -> None:
    run = WatchedRun(recorded)
    count, stamp = len(run.entries), run.stamp()
    with (recorded / ENTRIES).open("a") as file:
        file.write('{"at_s": 1e9, "kind": "lost", "device": "cloud-1"}\n{"at_s": 1e9, "ki')
    assert len(run.entries) == count + 1 and run.stamp() != stamp and run.unread == 0
    assert _devices(state_at(run))["cloud-1"] == "lost"


def test_what_is_no_run_says_so(recorded: Path, tmp_path: Path) -> None:
    (tmp_path / "nothing").mkdir()
    assert "empty" in WatchedRun(tmp_path / "nothing").problem
    assert "no run" in WatchedRun(recorded.parent).problem
    (recorded / "plan.json").write_text("{")
    shown: Any = overview(WatchedRun(recorded))
    assert shown["state"] == "broken" and "plan.json" in shown["problem"]
    with pytest.raises(UserError, match="expected a path of this machine"):
        FolderSource(Path("s3://bucket/run"))
    assert list(FolderSource(recorded.parent).runs()) == ["recorded"]


def test_half_a_million_spans_are_few_bars() -> None:
    table, count = SpanTable(), 500_000
    table.add(
        [
            LightSpan("a", "compute", "F" if n % 3 else "B", n * 1e-3, n * 1e-3 + 8e-4, n // 8, n % 8)
            for n in range(count)
        ]
    )
    bars = table.bars(0.0, count * 1e-3, 1000)["a", "compute"]
    assert sum(bar.spans for bar in bars) == count and len(bars) == 1000
    assert all(bar.busy == pytest.approx(0.8, abs=0.05) for bar in bars)
    assert {bar.name for bar in bars} == {"F"}
    assert [bar.spans for bar in table.bars(10.0, 10.01, 1000)["a", "compute"]] == [1] * 10


def test_the_log_of_a_run(tmp_path: Path) -> None:
    clock, notes = iter(range(100)), list[str]()
    log = RunLog(tmp_path, notes.append, lambda: float(next(clock)))
    log.fault(RunFault(step=0, kind="note", text="too early"))
    log.began(STARTED)
    span = Span(device="a", track="compute", name="F", start_s=0.0, end_s=1.0, step=0)
    log.stepped(StepDone(step=1, steps=10, loss=0.5, link_bytes={("a", "b"): 7}, sent_bytes=7), (span,))
    log.ended("done")
    kinds = [entry.kind for entry in run_entries(tmp_path)]
    assert kinds == ["began", "step", "ended"] and not notes
    step = run_entries(tmp_path)[1]
    assert (step.sent, step.figures, step.spans) == ((("a", "b", 7),), {"loss": 0.5, "sent_bytes": 7.0}, 1)
    assert json.loads((tmp_path / SPANS).read_text())["device"] == "a"


def test_quick_steps_share_a_line(tmp_path: Path) -> None:
    now = time.time()
    log = RunLog(tmp_path, lambda _: None, lambda: now)
    log.began(STARTED)
    for step in (1, 2, 3):
        log.stepped(StepDone(step=step, steps=10, loss=0.5), ())
    log.evaluated(Evaluated(step=3, loss=0.25))
    assert [(e.kind, e.step) for e in run_entries(tmp_path)] == [("began", 0), ("step", 1), ("step", 3), ("heldout", 3)]


def test_a_log_that_cannot_be_written_is_noted_once(tmp_path: Path) -> None:
    notes = list[str]()
    log = RunLog(tmp_path / "missing", notes.append)
    log.began(STARTED)
    log.evaluated(Evaluated(step=1, loss=0.5))
    assert len(notes) == 1 and "cannot be written" in notes[0]
