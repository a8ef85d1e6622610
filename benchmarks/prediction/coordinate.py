"""One training run: reads a `Run` on standard input, writes a `Ran`. A process of its own, because the coordinator of a
network lab stands in a namespace of the lab."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import msgspec

from isthmus.experiments import LocalBackend, ProcessPlace, RunOptions, Watcher, check_outcome, run_plan
from isthmus.fleet import Fleet
from isthmus.job import Job, prepare
from isthmus.plans import Plan
from isthmus.trace import Span


class Run(msgspec.Struct, frozen=True, kw_only=True):
    job: Job
    fleet: Fleet
    plan: Plan
    places: dict[str, ProcessPlace] = {}
    """Per device; without places it is emulated on loopback."""
    host: str = "127.0.0.1"


class Ran(msgspec.Struct, frozen=True, kw_only=True):
    spans: tuple[Span, ...]
    late_s: dict[str, float]
    """How much emulated tasklets overran, in sum."""


def coordinate(run: Run) -> Ran:
    backend = LocalBackend(host=run.host, places=run.places, trusted_network=True)
    options = RunOptions(emulate=not run.places, backend=backend)
    with tempfile.TemporaryDirectory() as folder:
        outcome = run_plan(prepare(run.job), run.plan, run.fleet, Path(folder), options, Watcher())
    check_outcome(outcome)
    return Ran(spans=outcome.spans, late_s=dict(outcome.late_s))


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(coordinate(msgspec.json.decode(sys.stdin.buffer.read(), type=Run))))
