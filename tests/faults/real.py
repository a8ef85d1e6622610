"""Runs over real processes on this machine, with something done to one of them in the middle."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
from torch import Tensor

from isthmus.cost import build_plan
from isthmus.experiments import RunOptions, Watcher, run_plan
from isthmus.fleet import Fleet, Link, Links
from isthmus.job import Job, Prepared, prepare
from isthmus.plans import Plan
from isthmus.protocol import Item
from isthmus.runtime.coordinator.backend import LocalBackend
from isthmus.runtime.coordinator.run_callbacks import Outcome
from isthmus.trace import Span
from tests.faults.history import History
from tests.runtime.commands import devices_of
from tests.runtime.jobs import DIGITS, final_weights, fleet_of, job_of, random_cut

FLOPS_PER_S = 2e7
"""Slow enough for something to happen in the middle of a step."""


Act = Callable[[History], None]
"""Does something to the run, and writes down when."""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    outcome: Outcome
    weights: Mapping[str, Tensor]
    losses: list[tuple[int, float | None]]
    """As they were told: a step that is done again is told again."""
    notes: list[str]
    history: History


def job(steps: int = 24, save_every: int = 0, **runtime: object) -> Job:
    made = job_of("mlp", {"layers": 4}, DIGITS, steps=steps, save_every=save_every)
    settings = {"emulate": True, "timeout": "6 s", "snapshot_every": 4, **runtime}
    return msgspec.structs.replace(made, runtime=msgspec.convert(settings, type(made.runtime)))


@functools.cache
def _captured(steps: int) -> Prepared:
    return prepare(job(steps))


def prepared_of(made: Job) -> Prepared:
    """The model is captured once: jobs here differ in how they are run."""
    if made.model.name == "mlp":
        return msgspec.structs.replace(_captured(made.training.steps), job=made)
    return prepare(made)


def keeps_cuts(prepared: Prepared, boundaries: list[int]) -> Callable[[Fleet], Plan]:
    """Plans with these cuts on the first devices that there are: equal cuts give equal bits."""

    def replan(fleet: Fleet) -> Plan:
        count = min(len(boundaries) + 1, len(fleet.names))
        return build_plan(prepared.problem(fleet), fleet.names[:count], boundaries[: count - 1], planner="test")

    return replan


def run(
    folder: Path,
    made: Job,
    *,
    devices: int = 2,
    spares: int = 1,
    backend: LocalBackend | None = None,
    act: tuple[int, Act] | None = None,
    link: Link | None = None,
    flops_per_s: float = FLOPS_PER_S,
) -> Run:
    """Train over one process per device. `act` is done once, in a thread of its own, after so many steps; with 0, as
    processes are started. `link` joins them all."""
    prepared = prepared_of(made)
    fleet = fleet_of(devices + spares, flops_per_s)
    if link is not None:
        fleet = msgspec.structs.replace(fleet, links=Links(default=link))
    replan = keeps_cuts(prepared, random_cut(prepared, devices, 0, once=True))
    plan = replan(fleet.subset(fleet.names[:devices]))
    losses: list[tuple[int, float | None]] = []
    notes: list[str] = []
    history = History()
    waiting = [act] if act is not None else []

    def strike() -> None:
        threading.Thread(target=waiting.pop()[1], args=(history,), daemon=True).start()

    def advanced(item: Item, loss: float | None, spans: tuple[Span, ...]) -> None:
        history.advanced(item)
        if item.kind == "train":
            losses.append((item.step, loss))
            if waiting and item.step + 1 >= waiting[0][0]:
                strike()

    options = RunOptions(emulate=made.runtime.emulate, backend=backend or LocalBackend(), replan=replan)
    watcher = Watcher(
        advanced=advanced,
        acknowledged=history.held,
        saved=lambda step, _: history.saved(step),
        rolled_back=history.rolled_back,
        noted=notes.append,
    )
    if waiting and not waiting[0][0]:
        strike()
    outcome = run_plan(prepared, plan, fleet, folder, options, watcher)
    weights = final_weights(folder) if outcome.outcome == "done" else {}
    return Run(outcome=outcome, weights=weights, losses=losses, notes=notes, history=history)


def pid_of(device: str) -> int:
    """Of the process that this one has started for a device."""
    return devices_of(os.getpid())[device]
