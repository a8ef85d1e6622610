"""`isthmus plan`: compared, explained, drawn, and verified."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from isthmus.errors import FleetTooSmall
from isthmus.planners import registry

from .commands import edited, isthmus, refused, write_job


def refusing(problem: object) -> None:
    """Never."""
    raise FleetTooSmall("device d0 is 7 bytes short")


def test_planners_are_compared_and_refusals_have_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_OURS", {**registry._OURS, "refusing": refusing})  # pyright: ignore[reportPrivateUsage]
    job = write_job(tmp_path, fleet="three-sites")
    done = isthmus("plan", job, "--compare", "even, chain,refusing,even", "--json")
    assert done.code == 0, done.err
    rows = {row["planner"]: row for row in json.loads(done.out)["rows"]}
    assert list(rows)[-1] == "refusing" and len(rows) == 3
    assert rows["refusing"]["refused"] == "device d0 is 7 bytes short" and rows["refusing"]["step_s"] is None
    for name in ("even", "chain"):
        row = rows[name]
        assert row["refused"] is None
        assert row["plan_s"] > 0 and row["step_s"] > 0 and row["simulated_step_s"] > 0
        assert 0 < row["headroom"]["share"] < 1 and row["replicas"] == 1
    assert rows["chain"]["step_s"] <= rows["even"]["step_s"]
    assert rows["chain"]["lower_bound_s"] <= rows["chain"]["step_s"] and rows["even"]["gap"] is None
    alone = isthmus("plan", job, "--compare", "refusing")
    assert alone.code == 3 and "refusing made no plan: device d0 is 7 bytes short" in alone.out


def test_all_planners_are_compared_in_one_table(tmp_path: Path) -> None:
    done = isthmus("plan", write_job(tmp_path), "--compare", "all")
    assert done.code == 0, done.err
    for name in ("auto", "chain", "even", "simulated", "lower bound"):
        assert name in done.out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--compare", "evne"), ["unknown planner 'evne'", "'even'"]),
        (("--compare", ","), ["--compare: got ','", "all"]),
        (("--compare", "all", "--verify", "p.json"), ["--compare and --verify"]),
        (("--verify", "p.json", "--explain"), ["--verify and --explain"]),
        (("--verify", "nowhere.json"), ["nowhere.json", "not found"]),
        (("--picture", "no/such/folder/plan.png"), ["--picture", "no/such/folder is not a folder"]),
    ],
)
def test_what_cannot_be_done(tmp_path: Path, options: tuple[str, ...], words: list[str]) -> None:
    refused(isthmus("plan", write_job(tmp_path), *options), 2, *words)


def test_a_plan_is_explained_drawn_and_verified(tmp_path: Path) -> None:
    job = write_job(tmp_path, fleet="three-sites")
    picture, document = tmp_path / "plan.png", tmp_path / "plan.json"
    explained = isthmus("plan", job, "--explain", "--picture", str(picture))
    assert explained.code == 0, explained.err
    assert "What sets the pace" in explained.out and "What would help most" in explained.out
    assert picture.read_bytes().startswith(b"\x89PNG")
    done = isthmus("plan", job, "--explain", "--json")
    told = json.loads(done.out)
    assert told["explanation"]["helps"][0]["saved"] > 0
    document.write_text(json.dumps(told["plan"]))
    verified = isthmus("plan", job, "--verify", str(document))
    assert verified.code == 0 and "figures hold" in verified.out, verified
    told["plan"]["predicted"]["step_s"] *= 1.01
    told["plan"]["replicas"][0]["stages"][1]["memory"]["weights"] += 1
    document.write_text(json.dumps(told["plan"]))
    tampered = isthmus("plan", job, "--verify", str(document), "--json")
    found = json.loads(tampered.out)
    assert tampered.code == 1 and not found["holds"]
    assert [d["field"] for d in found["differences"]] == ["replicas[0].stages[1].memory.weights", "predicted.step_s"]
    document.write_text("{}")
    refused(isthmus("plan", job, "--verify", str(document)), 2, "not a plan")


def test_state_of_the_jobs_optimizers_is_verified(tmp_path: Path) -> None:
    job = edited(
        write_job(tmp_path),
        ("[learning_rate]", '[[optimizer]]\nname = "sgd"\nmomentum = 0.9\n[learning_rate]'),
        ("batch_size = 8", 'batch_size = 8\nprecision = "bf16"'),
    )
    document = tmp_path / "plan.json"
    document.write_text(isthmus("plan", job, "--json").out)
    done = isthmus("plan", job, "--verify", str(document))
    assert done.code == 0, done.out
