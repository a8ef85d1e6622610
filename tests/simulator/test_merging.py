"""Simulated decoupled replicas: whatever strikes them, each sample counts once or is lost with who made it."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from isthmus.fleet import Link
from isthmus.protocol.decoupled_events import MergeRules
from isthmus.simulator.merging import FragmentBytes, MergingSimulation, ReplicaModel, SimulatedReplicas
from isthmus.simulator.options import Fault
from isthmus.simulator.replica_devices import PlannedStep

BLOCKS, EACH = 10, 220
SAMPLES = 4
"""Of a replica's step."""


def planned(present: frozenset[str]) -> PlannedStep | None:
    """A pipeline of two or three devices, of which it needs two."""
    if len(present) < 2:
        return None
    return PlannedStep(0.6 / len(present), dict.fromkeys(present, 0.5 / len(present)), begin_s=0.5, keep_every=3)


def drawn(seed: int) -> SimulatedReplicas:
    """Up to ten faults strike two to four replicas, of which some are pipelines."""
    draw = random.Random(seed)
    link = Link(draw.choice((0.001, 0.05)), draw.choice((1e5, 1e7)))
    models = list[ReplicaModel]()
    for number in range(draw.randint(2, 4)):
        way, name = (link if number else None), f"r{number}"
        if draw.random() < 0.3:
            devices = tuple(f"{name}-{n}" for n in range(draw.randint(2, 3)))
            model = ReplicaModel(
                name=name, step_s=0.3, samples=SAMPLES, up=way, down=way, devices=devices, planned=planned
            )
        else:
            model = ReplicaModel(name=name, step_s=draw.uniform(0.05, 0.5), samples=SAMPLES, up=way, down=way)
        models.append(model)
    devices = [device for model in models for device in model.devices or (model.name,)]
    faults = [
        Fault(
            time_s=draw.uniform(0.0, 30.0),
            kind=kind,
            device=draw.choice(devices),
            lasts_s=draw.choice((0.2, 2.0, 8.0, 40.0)),
            factor=4.0 if kind == "slow" else 1.0,
        )
        for kind in draw.choices(("lost", "silent", "slow", "join", "leave"), k=draw.randint(1, 10))
    ]
    fragments = draw.randint(1, 3)
    rules = MergeRules(
        samples=draw.randint(200, 1500),
        merge_every=draw.choice((16, 64)) / fragments,
        fragments=fragments,
        quorum=draw.randint(1, len(models)),
        grace=0.5,
        timeout_s=4.0,
        step_samples=SAMPLES,
    )
    sizes = FragmentBytes(delta=(9000,) * fragments, change=(9000,) * fragments, whole=(70_000,) * fragments)
    found = MergingSimulation(rules, models, sizes, faults, seed=seed).run()
    _check(found, rules, f"seed {seed}: {found.notes}")
    return found


def _check(found: SimulatedReplicas, rules: MergeRules, seed: str) -> None:
    assert (found.finish.outcome == "done") != bool(found.finish.reason), seed
    given = [(f.fragment, c) for _, merge in found.merges for f in merge.fragments for c in f.contributions]
    left = {text.removesuffix(" has left") for _, text in found.notes if text.endswith(" has left")}
    numbers = [(fragment, c.replica, c.number) for fragment, c in given if c.replica not in left]
    assert len(set(numbers)) == len(numbers), seed
    assert not [text for _, text in found.notes if "expected" in text], "simulated replicas are honest: " + seed
    made, steps, merged = Counter[str](), Counter[str](), Counter[tuple[str, int]]()
    for _, name, step in found.steps:
        made[name] += SAMPLES * max(1, step.steps - steps[name])
        steps[name] = step.steps
    for fragment, contribution in given:
        merged[contribution.replica, fragment] += contribution.samples
    assert all(samples <= made[name] for (name, _), samples in merged.items()), seed
    if found.finish.outcome == "done":
        assert rules.samples is not None and sum(made.values()) >= rules.samples, seed
    times_s = [time_s for time_s, _ in found.notes]
    assert times_s == sorted(times_s) and found.used <= 1 + 1e-9, seed


@pytest.mark.parametrize("block", [0, pytest.param(1, marks=pytest.mark.long)])
def test_under_drawn_faults_a_run_ends_and_each_sample_is_merged_once_or_lost_with_its_replica(block: int) -> None:
    runs = [drawn(seed) for seed in (range(EACH) if block == 0 else range(EACH, BLOCKS * EACH))]
    notes = Counter(text.partition(":")[0].partition(" ")[2] for found in runs for _, text in found.notes)
    outcomes = Counter(found.finish.outcome for found in runs)
    assert outcomes["done"] > len(runs) / 2 and outcomes["lost"], outcomes
    assert all(notes[what] > len(runs) / 10 for what in ("is lost", "has left")), "the schedules must do harm"


def test_a_seed_gives_the_same_run_again() -> None:
    assert [drawn(seed) for seed in range(10)] == [drawn(seed) for seed in range(10)]
