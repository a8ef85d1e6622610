"""Simulated decoupled replicas: whatever strikes them, each sample counts once or is lost with who made it."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence

from isthmus.fleet import Link
from isthmus.protocol.decoupled_events import MergeRules
from isthmus.simulator.merging import FragmentBytes, MergingSimulation, PlannedStep, ReplicaModel, SimulatedReplicas
from isthmus.simulator.options import Fault

SAMPLES = 4
"""Of a replica's step."""


def planned(present: frozenset[str]) -> PlannedStep | None:
    """A pipeline of two or three devices, of which it needs two."""
    if len(present) < 2:
        return None
    busy_s = dict.fromkeys(present, 0.5 / len(present))
    links = frozenset(map(frozenset, itertools.combinations(sorted(present), 2)))
    return PlannedStep(0.6 / len(present), busy_s, begin_s=0.5, keep_every=3, links=links)


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
    faults = [_fault(draw, devices) for _ in range(draw.randint(1, 10))]
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
    saves = draw.choice((0, 100))
    found = MergingSimulation(rules, models, sizes, faults, seed=seed, merger=devices[0], save_samples=saves).run()
    _check(found, rules, f"seed {seed}: {found.notes}")
    return found


def _fault(draw: random.Random, devices: Sequence[str]) -> Fault:
    kind = draw.choice(("lost", "silent", "slow", "join", "leave", "link", "coordinator"))
    device, *others = draw.sample(devices, 2)
    return Fault(
        time_s=draw.uniform(0.0, 30.0),
        kind=kind,
        device="" if kind == "coordinator" else device,
        other=others[0] if kind == "link" else "",
        lasts_s=draw.choice((0.2, 2.0, 8.0, 40.0)),
        factor=4.0 if kind == "slow" else 1.0,
    )


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


def check_harm(runs: Sequence[SimulatedReplicas]) -> None:
    notes = Counter(text.partition(":")[0].partition(" ")[2] for found in runs for _, text in found.notes)
    outcomes = Counter(found.finish.outcome for found in runs)
    assert outcomes["done"] > len(runs) / 2 and outcomes["lost"], outcomes
    assert all(notes[what] > len(runs) / 10 for what in ("is lost", "has left", "coordinator was started again")), notes


def line(found: SimulatedReplicas) -> str:
    merges = [(f"{time_s:.6f}", merge.merge, merge.samples) for time_s, merge in found.merges]
    return f"{found.finish} {found.seconds:.6f} {merges} {len(found.steps)} {found.late}"
