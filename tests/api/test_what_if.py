"""A job planned again under changes: figures that can be computed by hand, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import isthmus
from isthmus.errors import UserError
from tests.runtime.commands import isthmus as command
from tests.runtime.commands import refused

FLEET = """
name = "two"
links = { default = { latency = "0 s", bandwidth = "1000 Tbit/s" } }
[[device]]
name = "desk"
region = "office"
compute = "1 GFLOPS"
memory = "1 GiB"
price_per_hour = 2.0
[[device]]
name = "rack"
region = "cellar"
compute = "500 MFLOPS"
memory = "1 GiB"
price_per_hour = 0.5
"""
JOB = """
name = "small"
fleet = "{folder}/fleet.toml"
model = {{ name = "mlp", options = {{ features = 64, width = 256, layers = 1, classes = 10 }} }}
data = {{ kind = "digits", options = {{ flat = true }} }}
training = {{ batch_size = 24, micro_batches = 12 }}
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "fleet.toml").write_text(FLEET)
    (tmp_path / "job.toml").write_text(JOB.format(folder=tmp_path))
    return tmp_path / "job.toml"


@pytest.mark.long
def test_figures_are_those_by_hand(job: Path) -> None:
    """A micro-batch takes a time u on the desk and 2 u on the rack; links take none, and devices are replicas.

    | devices | micro-batches | step | samples/s |
    | desk, rack | 8, 4 | 8 u | 24 / 8 u |
    | desk, desk, rack | 5, 5, 2 | 5 u | 24 / 5 u |
    | desk, rack, rack | 6, 3, 3 | 6 u | 24 / 6 u |
    | desk, rack, rack, rack | 6, 2, 2, 2 | 6 u | 24 / 6 u |
    """
    changes = ["device=desk", "device=rack", "device=rack@office*2", "batch=*2", "speed=office*2 + speed=rack*2"]
    found = isthmus.what_if(job, changes)
    steps = [row.step_s for row in found.rows]
    assert None not in steps
    u = (steps[0] or 0.0) / 8
    assert steps == pytest.approx([8 * u, 5 * u, 6 * u, 6 * u, 16 * u, 4 * u], rel=0.01)
    rates = [24 / 8, 24 / 5, 24 / 6, 24 / 6, 48 / 16, 24 / 4]
    assert [row.samples_per_s for row in found.rows] == pytest.approx([rate / u for rate in rates], rel=0.01)
    assert [row.devices for row in found.rows] == [2, 3, 3, 4, 2, 2]
    per_hour = [2.5, 4.5, 3.0, 3.5, 2.5, 2.5]
    prices = [1000 * price * u / rate / 3600 for price, rate in zip(per_hour, rates, strict=True)]
    assert [row.price_per_1000_samples for row in found.rows] == pytest.approx(prices, rel=0.01)
    assert [row.bought_per_hour for row in found.rows] == [0.0, 2.0, 0.5, 1.0, 0.0, 0.0]
    gained = [(24 / 5 - 3) / 2 / u, (4 - 3) / 0.5 / u, (4 - 3) / 1.0 / u]
    assert [row.gained_per_price for row in found.rows[1:4]] == pytest.approx(gained, rel=0.05)
    assert {row.gained_per_price for row in (found.rows[0], *found.rows[4:])} == {None}
    assert found.best_purchase is found.rows[2]


def test_the_usual_changes_in_a_table(job: Path) -> None:
    done = command("plan", job, "--what-if", "all", "--what-if", "memory=*0.000001")
    assert done.code == 0, done.err
    for change in ("device=desk", "device=rack", "region=office", "without=cellar", "precision=bf16", "batch=*2"):
        assert change in done.out, done.out
    assert "pays most: 1 more device like rack" in done.out
    assert "1e-06 times the memory everywhere: no plan: " in done.out


def test_a_plan_that_stays_possible_is_never_undercut(job: Path) -> None:
    """`even` would use all devices of the larger fleet, whatever that costs."""
    slow = ["device=rack", "speed=rack*2", "without=rack", "planner=auto"]
    now, more, faster, less, auto = isthmus.what_if(job, slow, overrides={"planner": "even"}).rows
    assert more.step_s is not None and now.step_s is not None and more.step_s <= now.step_s
    assert faster.step_s is not None and faster.step_s <= now.step_s  # what the link takes hides it
    assert less.devices == 1 and auto.step_s is not None and auto.step_s <= now.step_s


def test_a_change_without_a_plan_says_why(job: Path) -> None:
    overrides = {"plan.data_holder": "office", "planner": "even"}
    (_, row) = isthmus.what_if(job, "without=office", overrides=overrides).rows
    assert row.refused is not None and "none of the data holders is there: office" in row.refused
    assert row.step_s is None and row.bought_per_hour == -2.0


def test_json_has_a_row_for_each_change(job: Path) -> None:
    done = command("plan", job, "--what-if", "schedule=gpipe", "--json")
    assert done.code == 0, done.err
    assert [row["change"] for row in json.loads(done.out)["rows"]] == ["", "schedule=gpipe"]


BAD = {
    "more": "got 'more', expected all; device=NAME[@REGION][*COUNT]; ",
    "devise=desk": "got 'devise=desk', expected all; device=",
    "device=": "device: got '', expected device=NAME[@REGION][*COUNT]",
    "device=desk*0": "device: got 'desk*0', expected",
    "device=dest": "device=dest: unknown device 'dest': did you mean 'desk'?",
    "device=desk@offise": "unknown region 'offise': did you mean 'office'?",
    "region=desk": "unknown region 'desk'",
    "without=nobody": "unknown device or region 'nobody'",
    "link=desk*2": "link: got 'desk*2', expected link=A:B*FACTOR",
    "link=desk:desk*2": "got 'desk' twice, expected two devices or regions",
    "latency=desk:rack*fast": "latency: got 'desk:rack*fast', expected latency=A:B*FACTOR",
    "uplink=office*2": "uplink 'office': the fleet limits none there",
    "memory=*0": "memory: got '*0', expected memory=[NAME]*FACTOR",
    "batch=*0.3": "batch: got '*0.3', expected batch=SAMPLES or *FACTOR",
    "batch=25": "batch: got 25, expected a multiple of 2",
    "precision=int8": "precision: got 'int8', expected precision=fp32, bf16 or fp16",
    "training.batch_sise=4": "batch_sise",
    "fleet=nowhere": "unknown fleet 'nowhere'",
}


@pytest.mark.parametrize(("change", "reason"), BAD.items())
def test_what_is_no_change_is_said_in_one_line(change: str, reason: str, job: Path) -> None:
    with pytest.raises(UserError, match="--what-if") as raised:
        isthmus.what_if(job, change)
    assert reason in str(raised.value) and "\n" not in str(raised.value)


def test_it_is_asked_alone(job: Path) -> None:
    refused(command("plan", job, "--what-if", "all", "--explain"), 2, "--what-if and --explain")
