"""`isthmus simulate` with faults: the same plans as a real run would make, on a virtual clock."""

from __future__ import annotations

import json
import math
from pathlib import Path

import msgspec
import pytest

from isthmus.api.make_plan import fleet_for, plan_for, simulation_options
from isthmus.api.observer import Observer
from isthmus.api.pipeline import FaultedRun, read_faults, simulate_faults
from isthmus.cost import SyncPolicy
from isthmus.errors import UserError
from isthmus.fleet import Fleet, Link, Links, dump_fleet
from isthmus.job import Job, prepare
from isthmus.plans import save_plan
from isthmus.runtime.coordinator.run import run_spec
from isthmus.runtime.coordinator.stage_assignments import StageAssignments
from isthmus.runtime.processes.signals import Stop
from isthmus.simulator import RecoveryTimes, simulate_run

from .commands import isthmus
from .jobs import DIGITS, fleet_of, job_of
from .test_replicated_runs import planned

STEPS = 60


class _Quiet(Observer):
    pass


def _job(tmp_path: Path) -> Job:
    fleet = tmp_path / "fleet.toml"
    fleet.write_text(dump_fleet(fleet_of(3, 2e6)))
    job = job_of("mlp", {"layers": 6}, DIGITS, steps=STEPS)
    return msgspec.structs.replace(job, fleet=str(fleet), planner="even")


def _run(tmp_path: Path, **options: str) -> FaultedRun:
    faults = read_faults({option: [text] for option, text in options.items()})
    return simulate_faults(_job(tmp_path), faults, _Quiet(), Stop())


def test_a_lost_device_is_replaced_by_those_that_are_left(tmp_path: Path) -> None:
    found = _run(tmp_path, fault="d1@2s")
    assert found.run.finish.outcome == "done" and found.steps == STEPS
    (recovery,) = found.run.recoveries
    assert "'d1' was lost" in recovery.reason
    assert [p.plan.used for p in found.run.periods] == [("d0", "d1", "d2"), ("d0", "d2")]
    assert found.run.seconds > found.undisturbed_s
    summary = found.summary()
    assert summary["outcome"] == "done" and summary["steps"] == STEPS
    found.draw(tmp_path / "faults.png")
    assert (tmp_path / "faults.png").read_bytes().startswith(b"\x89PNG")


def test_state_takes_as_long_as_its_bytes_on_the_fastest_link_of_a_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a checkpoint each device gets all of its stage, all at the same time: the largest decides."""

    def recovery(bytes_per_s: float) -> tuple[float, FaultedRun]:
        monkeypatch.setattr(Fleet, "line_bytes_per_s", lambda *_: bytes_per_s)
        found = _run(tmp_path, fault="d1@2s")
        (made,) = found.run.recoveries
        assert made.from_checkpoint
        return made.seconds, found

    line = fleet_of(3, 2e6)
    assert line.line_bytes_per_s("d0") == max(line.link(other, "d0").bandwidth_bytes_per_s for other in ("d1", "d2"))
    (at_once_s, _), (seconds, found) = recovery(math.inf), recovery(1e6)
    largest = max(stage.memory.weights + stage.memory.optimizer for stage in found.run.periods[-1].plan.stages)
    assert largest > 1e5 and seconds - at_once_s == pytest.approx(largest / 1e6, rel=1e-6)


def test_state_that_a_change_of_plan_moves_takes_its_time_on_the_links_between_devices(tmp_path: Path) -> None:
    """As long as the cost of the change says."""

    def left(bytes_per_s: float) -> tuple[float, float]:
        fleet = msgspec.structs.replace(fleet_of(3, 2e6), links=Links(default=Link(1e-4, bytes_per_s)))
        job = _job(tmp_path)
        (tmp_path / "fleet.toml").write_text(dump_fleet(fleet))
        found = simulate_faults(job, read_faults({"leave": ["d1@2s"]}), _Quiet(), Stop())
        assert [p.plan.used for p in found.run.periods] == [("d0", "d1", "d2"), ("d0", "d2")]
        before, after = (StageAssignments(prepare(job), p.plan, fleet) for p in found.run.periods)
        (change,) = found.run.recoveries
        assert change.redone == 0 and not change.from_checkpoint
        return change.seconds, after.moving_s(before)

    (at_once_s, least_s), (seconds, moving_s) = left(1e9), left(1e5)
    assert moving_s > 0.5 > 100 * least_s
    assert seconds - at_once_s == pytest.approx(moving_s - least_s, rel=0.02)


@pytest.mark.parametrize("save_every", [0, 20])
def test_a_checkpoint_takes_as_long_as_its_bytes_on_the_way_to_the_coordinator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save_every: int
) -> None:
    """The run ends when the last one is there: on a connection the bytes of all follow each other."""
    job = _job(tmp_path)
    job = msgspec.structs.replace(job, training=msgspec.structs.replace(job.training, save_every=save_every))

    def simulated(bytes_per_s: float) -> FaultedRun:
        monkeypatch.setattr(Fleet, "line_bytes_per_s", lambda *_: bytes_per_s)
        return simulate_faults(job, (), _Quiet(), Stop())

    at_once = simulated(math.inf)
    sizes = {stage.device: stage.memory.weights + stage.memory.optimizer for stage in at_once.plan.stages}
    if save_every:  # so slow that steps are nothing beside them
        alone_s, found = 1e4 * STEPS // save_every, simulated(max(sizes.values()) / 1e4)
        assert alone_s < found.run.seconds < alone_s + at_once.run.seconds
    else:
        found = simulated(1e6)
        saved_s = {span.device: span.end_s for span in at_once.trace.spans if span.name == "save"}
        assert found.run.seconds == pytest.approx(max(saved_s[name] + size / 1e6 for name, size in sizes.items()))
        assert found.run.seconds > at_once.run.seconds + 0.05
    assert found.run.seconds == found.undisturbed_s, "the run without faults that others are compared with has it too"


def test_replicas_with_equal_parameters_give_them_once(tmp_path: Path) -> None:
    """Of two replicas the first alone has something to give, whatever the second one's line takes."""
    job = _job(tmp_path)
    job = msgspec.structs.replace(job, training=msgspec.structs.replace(job.training, micro_batches=4))
    prepared, fleet = prepare(job), fleet_of(3, 2e6)
    plan = planned(prepared, [((0.5,), 2), ((), 2)])
    second = {stage.device for stage in plan.replicas[1].workers}
    ways = {name: 1.0 if name in second else 0.0 for name in fleet.names}
    options, spec = simulation_options(prepared, plan), run_spec(prepared)
    at_once = simulate_run(plan, fleet, spec, options)
    slow = msgspec.structs.replace(options, recovery=RecoveryTimes(control_s_per_byte=ways))
    assert len(plan.replicas) == 2
    assert simulate_run(plan, fleet, spec, slow).seconds == at_once.seconds


def test_a_device_that_the_plan_leaves_out_replaces_a_lost_one(tmp_path: Path) -> None:
    """A run offers it from its beginning."""
    job = _job(tmp_path)
    two = msgspec.structs.replace(job, planner="even", devices=2)
    save_plan(plan_for(prepare(job), fleet_for(two)), tmp_path / "plan.json")
    lost = read_faults({"fault": ["d1@2s"]})
    found = simulate_faults(job, lost, _Quiet(), Stop(), tmp_path / "plan.json")
    assert [p.plan.used for p in found.run.periods] == [("d0", "d1"), ("d0", "d2")]
    assert found.run.finish.outcome == "done" and found.faults == lost


def test_a_newcomer_takes_part_and_a_device_leaves(tmp_path: Path) -> None:
    found = _run(tmp_path, join="d2@1s", leave="d0@6s")
    assert found.plan.used == ("d0", "d1")
    assert found.run.periods[-1].plan.used == ("d1", "d2")
    assert found.redone == 0, "nobody was lost"
    notes = [text for _, text in found.timeline()]
    assert "d0 was asked to leave" in notes, "that is why the plan is changed"


def test_devices_that_cannot_leave_stay_and_it_is_told(tmp_path: Path) -> None:
    wishes = read_faults({"leave": [f"{name}@2s" for name in ("d0", "d1", "d2")]})
    found = simulate_faults(_job(tmp_path), wishes, _Quiet(), Stop())
    assert found.run.finish.outcome == "done"
    stays = [text for _, text in found.timeline() if "was asked to leave and stays: no plan" in text]
    assert [text[:2] for text in stays] == ["d0", "d1", "d2"]


def test_the_same_faults_give_the_same_run(tmp_path: Path) -> None:
    first, again = (_run(tmp_path, fault="silent:d1@2s+90s", slow="d0@3s:2") for _ in range(2))
    assert first.run == again.run
    assert any("silent for" in text for _, text in first.timeline())


def test_a_short_cut_of_a_link_delays_and_changes_no_plan(tmp_path: Path) -> None:
    found = _run(tmp_path, fault="link:d0:d1@2s+5s")
    assert not found.run.recoveries and found.run.seconds == pytest.approx(found.undisturbed_s + 5, abs=1)


def test_a_coordinator_that_is_started_again_goes_on(tmp_path: Path) -> None:
    found = _run(tmp_path, fault="coordinator@2s+3s")
    assert found.run.finish.outcome == "done" and found.steps == STEPS
    assert [r.reason for r in found.run.recoveries] == ["the coordinator was started again"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"fault": "d9@2s"}, "'d9'"),
        ({"fault": "d1"}, "expected a device, link:A:B or coordinator"),
        ({"fault": "link:d1@2s"}, "two devices"),
        ({"fault": "link:d1:d1@2s"}, "two devices"),
        ({"fault": "coordinator@2s"}, "until when"),
        ({"fault": "d1@soon"}, "time"),
        ({"slow": "d1@2s"}, "factor"),
        ({"slow": "d1@2s:-1"}, r"--slow: factor: got '-1', expected a positive number"),
        ({"slow": "d1@2s:0"}, r"--slow: factor: got '0', expected a positive number"),
        ({"slow": "d1@2s:much"}, r"--slow: factor: got 'much', expected a positive number"),
        ({"slow": "d9@2s:2"}, "unknown device in --slow 'd9'"),
        ({"slow": "d1@soon:2"}, "--slow: time: .*'soon'"),
        ({"fault": "d1@2s+soon"}, "--fault: duration: .*'soon'"),
        ({"fault": "link:d1:d9@2s"}, "unknown device in --fault 'd9'"),
        ({"join": "d1@2s+3s"}, "--join"),
        ({"join": "d9@2s"}, "unknown device in --join 'd9'"),
        ({"leave": "d1@2s:4"}, r"--leave: got 'd1@2s:4', expected a device and a time"),
        ({"leave": "d9@2s"}, "unknown device in --leave 'd9'"),
    ],
)
def test_refusals(tmp_path: Path, options: dict[str, str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        _run(tmp_path, **options)


def test_a_fault_after_the_end_is_named(tmp_path: Path) -> None:
    found = _run(tmp_path, fault="d1@1000s")
    assert "without effect: d1: its process dies (after the end of the run)" in found.lines()


def test_the_command(tmp_path: Path) -> None:
    examples = Path(__file__).parents[2] / "examples"
    fleet = ("--fleet", str(examples / "two-machines-fleet.toml"))
    job = (str(examples / "two-machines.toml"), *fleet, "--steps", "20")
    found = isthmus("simulate", *job, "--fault", "desk@1s+5s", "--json")
    assert found.code == 0, found.err
    assert '"recoveries": [' in found.out and '"detected_after_s"' in found.out


def test_the_exit_code_is_that_of_the_run(tmp_path: Path) -> None:
    examples = Path(__file__).parents[2] / "examples"
    fleet = ("--fleet", str(examples / "two-machines-fleet.toml"))
    job = (str(examples / "two-machines.toml"), *fleet, "--steps", "20")
    found = isthmus("simulate", *job, "--fault", "desk@1s", "--fault", "laptop@1s", "--json")
    assert found.code == 4 and json.loads(found.out)["outcome"] == "lost", found.err


def test_all_devices_die_at_once_and_come_back(tmp_path: Path) -> None:
    options = {"fault": [f"{name}@2s+4s" for name in ("d0", "d1", "d2")] + ["coordinator@30s+2s"]}
    found = simulate_faults(_job(tmp_path), read_faults(options), _Quiet(), Stop())
    assert found.run.finish.outcome == "done" and found.steps == STEPS
    assert all(time_s >= 0 for time_s, _ in found.timeline())


def test_replicas_that_average(tmp_path: Path) -> None:
    """Each replica takes its own samples; together they are those of the step."""
    job = msgspec.structs.replace(_job(tmp_path), sync=SyncPolicy(mode="local", period=4), planner="auto")
    found = simulate_faults(job, read_faults({"fault": ["d1@2s"]}), _Quiet(), Stop())
    assert found.run.finish.outcome == "done" and found.steps == STEPS
