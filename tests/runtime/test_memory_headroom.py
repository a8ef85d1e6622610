"""`[plan] memory_headroom`: jobs leave a tenth of each device's memory free, unless they say otherwise."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from isthmus.api.make_plan import plan_for
from isthmus.errors import FleetTooSmall
from isthmus.job import fleet_of, load_job, prepare
from isthmus.plans import load_plan

from .commands import Done, edited, isthmus, refused, write_job

FLEET = """
name = "tight"
[[device]]
name = "d"
region = "here"
compute = "1 GFLOPS"
memory = "{memory} B"
count = 2
[links]
intra = {{ latency = "1 ms", bandwidth = "1 Gbit/s" }}
default = {{ latency = "1 ms", bandwidth = "1 Gbit/s" }}
"""


QUICK = "chain,even,equal-compute"


def job_with(folder: Path, memory: int, *lines: str) -> Path:
    (folder / "tight.toml").write_text(FLEET.format(memory=memory))
    table = "[plan]\n" + "\n".join(lines) + "\n[learning_rate]"
    return edited(write_job(folder, fleet=str(folder / "tight.toml"), planner="chain"), ("[learning_rate]", table))


def needed(folder: Path) -> int:
    """What the fullest device holds where there is plenty."""
    document = folder / "roomy.json"
    document.write_text(isthmus("plan", job_with(folder, 1 << 32), "--json").out)
    return max(stage.memory.total for stage in load_plan(document).stages)


def shares(done: Done) -> dict[str, float]:
    """What each planner that found a plan leaves free on its fullest device."""
    assert done.code == 0, done
    return {row["planner"]: row["headroom"]["share"] for row in json.loads(done.out)["rows"] if row["headroom"]}


def test_planners_leave_a_tenth_free_by_default(tmp_path: Path) -> None:
    memory = needed(tmp_path)
    full = shares(isthmus("plan", job_with(tmp_path, memory, "memory_headroom = 0"), "--compare", QUICK, "--json"))
    assert 0 <= min(full.values()) < 0.1
    left = shares(isthmus("plan", job_with(tmp_path, memory), "--compare", QUICK, "--json"))
    assert len(left) > 1 and min(left.values()) >= 0.1, left


def test_a_document_and_its_explanation_say_so_and_an_edited_one_is_refused(tmp_path: Path) -> None:
    memory = needed(tmp_path)
    document = tmp_path / "plan.json"
    job = job_with(tmp_path, memory)
    done = isthmus("plan", job, "--explain", "--json")
    assert done.code == 0, done
    told = json.loads(done.out)
    assert told["plan"]["constraints"] == {"memory_headroom": 0.1}
    assert "after 10 % headroom" in json.dumps(told["explanation"])
    assert "at least 10 % of each device's" in isthmus("plan", job, "--explain").out
    document.write_text(json.dumps(told["plan"]))
    assert isthmus("plan", job, "--verify", document).code == 0
    told["plan"]["constraints"]["memory_headroom"] = 0.05
    document.write_text(json.dumps(told["plan"]))
    forged = isthmus("plan", job, "--verify", document, "--json")
    assert forged.code == 1
    assert "constraints.memory_headroom" in [d["field"] for d in json.loads(forged.out)["differences"]]


def test_a_plan_document_with_more_in_flight_than_fits_does_not_run(tmp_path: Path) -> None:
    document, memory = tmp_path / "plan.json", needed(tmp_path)
    free = load_job(job_with(tmp_path, memory, "memory_headroom = 0"))
    document.write_text(isthmus("plan", tmp_path / "job.toml", "--json").out)
    prepared, fleet = prepare(free), fleet_of(free)
    assert plan_for(prepared, fleet, document) == load_plan(document)
    asked = msgspec.structs.replace(prepared, job=load_job(job_with(tmp_path, memory)))
    words = r"plan.json: device d-\d needs .* offers .* after 10 % headroom: [\d.]+ \w+ short"
    with pytest.raises(FleetTooSmall, match=words):
        plan_for(asked, fleet, document)


def test_what_does_not_fit_names_need_offer_and_headroom(tmp_path: Path) -> None:
    job = job_with(tmp_path, 1000)
    refused(isthmus("plan", job), 3, "device d", "offers 900 B after 10 % headroom", "short")
    job = job_with(tmp_path, 1000, "memory_headroom = 0.0")
    refused(isthmus("plan", job), 3, "device d", "offers 1000 B: ", "short")


@pytest.mark.parametrize("value", ["1", "1.0", "-0.1", '"x"', "nan", "inf", "true"])
def test_a_headroom_that_is_no_share_is_refused(tmp_path: Path, value: str) -> None:
    refused(isthmus("plan", job_with(tmp_path, 1 << 30, f"memory_headroom = {value}")), 2, "plan.memory_headroom")
