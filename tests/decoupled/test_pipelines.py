"""Replicas of several devices: the same bits as one process, and what a lost device costs."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from isthmus.api.decoupled import plan_replicas, simulate_decoupled
from isthmus.data import load_dataset
from isthmus.errors import UserError
from isthmus.fleet import Device, Fleet, Links
from isthmus.job import Job, load_job, prepare
from isthmus.plans import CompressionConfig
from isthmus.protocol.decoupled_events import MergeChanges, StepsMade
from isthmus.protocol.decoupled_replica import RETURN_S
from isthmus.runtime.decoupled.merged_run import pipeline_prepared, replica_groups
from isthmus.runtime.decoupled.merger import MergerWatch
from isthmus.runtime.decoupled.run import DecoupledRun, check_decoupled
from isthmus.runtime.processes.signals import Stop
from isthmus.simulator import Fault
from isthmus.simulator.merging import MergingSimulation, PlannedStep, SimulatedReplicas
from isthmus.trace import Span
from isthmus_testing.decoupled_replay import replay
from tests.tiers import represented_by

from .small import LINK, SIZES, job_of, pid_of, replicas, replicas_of, rules

ENDLESS = 100_000
"""Steps of a run that a test stops."""
FLEET = Fleet(
    name="four",
    devices=tuple(
        Device(name=name, region=region, flops_per_s=1e6, memory_bytes=1 << 30)
        for name, region in (("a", "x"), ("b", "x"), ("c", "x"), ("d", "y"))
    ),
    links=Links(default=LINK),
)


def pipeline_job(steps: int = 12) -> Job:
    """Three devices that are a pipeline, and one alone."""
    job = job_of(replicas="regions")
    training = msgspec.structs.replace(job.training, steps=steps, clip_norm=1.0)
    runtime = msgspec.structs.replace(job.runtime, emulate=False, snapshot_every=1, timeout="600 s")
    return msgspec.structs.replace(job, planner="even", training=training, runtime=runtime)


def run_of(
    job: Job,
    folder: Path,
    enough: Callable[[], bool] = lambda: True,
    stepped: Callable[[Counter[str]], None] = lambda steps: None,
    traced: Callable[[Span], None] | None = None,
) -> tuple[list[MergeChanges], list[str], DecoupledRun]:
    """A real run: its merges, and what was noted. It ends once merges took of both replicas and there is enough, not
    after so many samples: one replica alone may make them all before the other has started. The device alone is stopped
    while it is ahead of the pipeline."""
    merges, notes, steps, stop = list[MergeChanges](), list[str](), Counter[str](), Stop()
    alone = list[int]()  # the process of the device alone
    run = DecoupledRun(replicas_of(job, FLEET), folder)
    run.machine.trace.add = traced

    def made(name: str, made: StepsMade, samples: int, seconds: float) -> None:
        steps[name] += 1
        stepped(steps)
        if contributors(merges) == {"x", "d"} and enough():
            stop.request()
        waits = steps["d"] > steps["x"] + 3 and not stop.requested
        if name == "d" and not alone:
            alone.append(pid_of("d"))
        for pid in alone:
            os.kill(pid, signal.SIGSTOP if waits else signal.SIGCONT)

    watch = MergerWatch(stepped=made, merged=lambda merge, _: merges.append(merge), note=notes.append)
    outcome = run.run(watch, stop)
    assert outcome.finish.outcome == "interrupted"
    return merges, notes, run


def contributors(merges: list[MergeChanges]) -> set[str]:
    return {c.replica for merge in merges for fragment in merge.fragments for c in fragment.contributions}


def bits_as_replayed(job: Job, merges: list[MergeChanges], run: DecoupledRun) -> bool:
    again = replay(job, load_dataset(job.used_data, "train"), ["x", "d"], merges)
    return all(torch.equal(a, b) for a, b in zip(again.known, run.merged.known, strict=True))


@pytest.mark.parametrize("named", represented_by(["", "a d"], ""))
def test_a_pipeline_gives_the_bits_of_one_process(named: str, tmp_path: Path) -> None:
    """Where data holders are named, no other device reads the data."""
    job, holders = pipeline_job(ENDLESS), tuple(named.split())
    job = msgspec.structs.replace(job, plan=msgspec.structs.replace(job.plan, data_holder=holders))
    check_decoupled(job, FLEET)
    spans = list[Span]()
    merges, _, run = run_of(job, tmp_path, traced=spans.append)
    assert contributors(merges) == {"x", "d"} and run.digests.keys() >= {*holders}
    assert not holders or run.digests.keys() == {*holders}
    assert bits_as_replayed(job, merges, run)
    steps = [span for span in spans if (span.device, span.name) == ("x", "step")]
    for device in "abc":  # what they computed lies in the time of their replica's steps
        tasks = [span for span in spans if (span.device, span.track, span.name) == (device, "compute", "F")]
        assert {span.step for span in tasks} >= {span.step for span in steps}
        assert all(steps[0].start_s < span.start_s < span.end_s for span in tasks)


@pytest.mark.long
def test_a_lost_data_holder_costs_its_own_replica_alone(tmp_path: Path) -> None:
    """It goes on once its only holder is back."""
    job, counts, at_loss = pipeline_job(ENDLESS), Counter[str](), Counter[str]()
    job = msgspec.structs.replace(job, plan=msgspec.structs.replace(job.plan, data_holder=("a", "d")))

    def stepped(steps: Counter[str]) -> None:
        counts.update(steps - counts)
        if not at_loss and steps["x"] == 6:
            at_loss.update(steps)
            os.kill(pid_of("a"), signal.SIGKILL)

    def enough() -> bool:
        return bool(at_loss) and min(counts[name] - at_loss[name] for name in ("x", "d")) > 10

    merges, _, run = run_of(job, tmp_path, enough, stepped)
    assert bits_as_replayed(job, merges, run)


@pytest.mark.long
def test_a_lost_device_costs_its_own_replica_alone(tmp_path: Path) -> None:
    job, counts, at_loss = pipeline_job(ENDLESS), Counter[str](), Counter[str]()

    def stepped(steps: Counter[str]) -> None:
        counts.update(steps - counts)
        if not at_loss and steps["x"] == 6:
            at_loss.update(steps)
            os.kill(pid_of("b"), signal.SIGKILL)

    def enough() -> bool:
        """Both went on after the loss."""
        return bool(at_loss) and min(counts[name] - at_loss[name] for name in ("x", "d")) > 10

    merges, notes, run = run_of(job, tmp_path, enough, stepped)
    plans = [note for note in notes if note.startswith("x: a pipeline over")]
    assert "over a, b, c" in plans[0]
    assert "b" not in plans[1].removeprefix("x: a pipeline over").partition(":")[0]
    assert bits_as_replayed(job, merges, run)


def test_a_simulated_pipeline_makes_lost_steps_again_and_the_others_do_not_notice() -> None:
    def planned(present: frozenset[str]) -> PlannedStep | None:
        step_s = 0.8 / max(1, len(present))
        busy_s = dict.fromkeys(present, 0.9 * step_s)
        return PlannedStep(step_s, busy_s, begin_s=1.0, keep_every=4 if len(present) > 1 else 0) if present else None

    alone, *_ = replicas()
    together = replace(alone, name="x", devices=("x-0", "x-1"), planned=planned)
    models = [replace(one, name="d") for one in (alone,)] + [together]

    def run(*faults: Fault) -> tuple[dict[str, int], float, list[str]]:
        found = MergingSimulation(rules(2400), models, SIZES, faults).run()
        steps = Counter(name for time_s, name, _ in found.steps if time_s < 40)
        return dict(steps), found.used, [text for _, text in found.notes]

    undisturbed, used, _ = run()
    lost, less, notes = run(Fault(kind="lost", device="x-1", time_s=10.0, lasts_s=10.0))
    assert used == pytest.approx((1 + 2 * 0.9) / 3, rel=0.02)
    assert lost["d"] == undisturbed["d"]
    (note,) = (note for note in notes if note.startswith("x: x-1 is lost"))
    assert int(note.split()[4]) <= 4  # since the last snapshot
    # 10 s at half the speed, a second to begin and one to take the device in again, and at most four steps made again
    assert undisturbed["x"] - lost["x"] == pytest.approx(5.0 / 0.4 + 2 / 0.4 + 4 / 2, abs=4)
    assert less < used
    gone, _, _ = run(*(Fault(kind="lost", device=name, time_s=10.0) for name in ("x-0", "x-1")))
    assert gone["d"] == undisturbed["d"]
    assert gone["x"] < lost["x"]


def test_a_simulated_pipeline_without_snapshots_begins_anew_from_what_is_merged() -> None:
    """After the time that a real one waits: what it had not contributed is lost."""
    alone, *_ = replicas()
    step = PlannedStep(0.4, {"x-0": 0.4, "x-1": 0.4})
    model = replace(alone, name="x", devices=("x-0", "x-1", "spare"), planned=lambda present: step)
    models = [replace(alone, name="d"), model]
    found = MergingSimulation(rules(2400), models, SIZES, [Fault(kind="lost", device="x-1", time_s=10.0)]).run()
    assert [text for _, text in found.notes] == [
        "x is lost: its other devices cannot go on; the others go on",
        "x is back after 24 steps: it takes the current fragments and goes on",
    ]
    assert found.notes[1][0] == pytest.approx(10.0 + RETURN_S)
    assert [made.steps for _, name, made in found.steps if name == "x"][23:26] == [24, 25, 26]


def test_a_slow_or_silent_device_of_a_simulated_pipeline_keeps_the_others_waiting_and_a_spare_one_nobody() -> None:
    alone, *_ = replicas()
    planned = PlannedStep(0.4, {"x-0": 0.4, "x-1": 0.4})
    model = replace(alone, name="x", devices=("x-0", "x-1", "spare"), planned=lambda present: planned)

    def run(*faults: Fault) -> SimulatedReplicas:
        return MergingSimulation(rules(400, quorum=1), [model], SIZES, faults).run()

    undisturbed = run()
    spare = [Fault(kind="slow", device="spare", time_s=0, factor=4), Fault(kind="silent", device="spare", time_s=9)]
    assert run(*spare).seconds == undisturbed.seconds
    silent = run(Fault(kind="silent", device="x-1", time_s=9, lasts_s=5))
    assert silent.seconds == pytest.approx(undisturbed.seconds + 5)
    slow = run(*(Fault(kind="slow", device=f"x-{n}", time_s=0, factor=factor) for n, factor in ((1, 4), (0, 1))))
    assert slow.seconds == pytest.approx(4 * undisturbed.seconds, rel=0.02)
    assert slow.busy_s["x-1"] == pytest.approx(4 * slow.busy_s["x-0"])


def test_a_cut_link_of_a_simulated_pipeline_stops_it_and_a_long_one_costs_it_a_device() -> None:
    def planned(present: frozenset[str]) -> PlannedStep | None:
        busy_s = dict.fromkeys(present, 0.3)
        chain = frozenset({frozenset(("x-0", "x-1")), frozenset(("x-1", "x-2"))})
        return PlannedStep(0.4, busy_s, begin_s=1.0, keep_every=1, links=chain) if len(present) > 1 else None

    alone, *_ = replicas()
    model = replace(alone, name="x", devices=("x-0", "x-1", "x-2"), planned=planned)

    def run(one: str, other: str, lasts_s: float) -> SimulatedReplicas:
        fault = Fault(kind="link", device=one, other=other, time_s=9, lasts_s=lasts_s)
        return MergingSimulation(rules(400, quorum=1), [model], SIZES, [fault], merger="x-0").run()

    apart = run("x-0", "x-2", 200)
    assert not apart.notes, "they send each other nothing"
    assert run("x-2", "x-1", 5).seconds == pytest.approx(apart.seconds + 5)
    long = run("x-2", "x-1", 80)
    assert long.notes == [(69.0, "x: x-1 is lost; 0 steps are made again")]
    assert long.seconds == pytest.approx(apart.seconds + 60 + 1, abs=1)


def test_a_job_with_pipelines_is_planned_and_simulated(tmp_path: Path) -> None:
    fleet = tmp_path / "fleet.toml"
    devices = (
        f'[[device]]\nname = "{d.name}"\nregion = "{d.region}"\ncompute = "1 MFLOPS"\nmemory = "1 GiB"\n'
        for d in FLEET.devices
    )
    links = '[links]\ndefault = { latency = "20 ms", bandwidth = "20 Mbit/s" }\n'
    fleet.write_text("\n".join(['name = "four"\n', *devices, links]))
    job = msgspec.structs.replace(pipeline_job(), fleet=str(fleet))
    found = simulate_decoupled(job)
    assert plan_replicas(job).plans == found.plans
    assert set(found.steps) == {"x", "d"} and {span.device for span in found.trace.spans} == {"x", "d", "merger"}
    assert set(found.run.busy_s) == {"a", "b", "c", "d"}
    assert found.lines()[0].startswith("x: 8 samples in ")
    assert found.lines()[0].endswith(" over a, b, c, nothing packed")
    assert found.lines()[1].startswith("d: 8 samples in ")
    assert {name: len(plan.used) for name, plan in found.plans.items()} == {"x": 3, "d": 1}
    assert 0 < found.run.used <= 1


def test_boundaries_of_chosen_replicas_are_packed() -> None:
    job = job_of(replicas=[["a", "b"], ["c", "d"]], packed=["c+d"])
    job = msgspec.structs.replace(job, planner="even", compression=CompressionConfig(method="int8"))
    prepared, groups = prepare(job), replica_groups(job, FLEET)
    asked = {name: pipeline_prepared(prepared, groups, name).job.compression for name in groups}
    assert asked == {"a+b": None, "c+d": job.compression}


def test_a_job_file_may_list_the_devices_of_replicas(tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text(
        'name = "small"\nmodel.name = "mlp"\ndata.kind = "digits"\nsync.mode = "decoupled"\n'
        'sync.decoupled.replicas = [["a", "b"], ["c", "d"]]\n'
    )
    assert load_job(file).sync.decoupled.replicas == (("a", "b"), ("c", "d"))


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"replicas": [["a", "e"]]}, "sync.decoupled.replicas: unknown device 'e'"),
        ({"replicas": [["a", "b"], ["b", "c", "d"]]}, "sync.decoupled.replicas: got 'b' 2 times"),
        ({"replicas": [["a", "b"]]}, "sync.decoupled.replicas: got no replica for c, d"),
        ({"replicas": [["a", "b"], ["c", "d"], []]}, "sync.decoupled.replicas: got an empty list"),
        ({"replicas": "regions", "packed": ["y"]}, "sync.decoupled.packed: unknown pipeline 'y'"),
        ({"replicas": "regions", "packed": ["x"]}, "sync.decoupled.packed: got x without a table [compression]"),
    ],
)
def test_bad_replicas_are_refused(wrong: dict[str, object], text: str) -> None:
    with pytest.raises(UserError) as error:
        check_decoupled(job_of(**wrong), FLEET)
    assert str(error.value).startswith(text)


def test_a_replica_without_a_data_holder_is_refused() -> None:
    job = pipeline_job()
    job = msgspec.structs.replace(job, plan=msgspec.structs.replace(job.plan, data_holder="x"))
    with pytest.raises(UserError, match=r"plan\.data_holder: got x, none of replica d: expected one of each replica"):
        check_decoupled(job, FLEET)
