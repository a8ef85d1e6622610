"""`python -m tests.goldens [plans|runs|schedules|wire]` computes these results again and writes them."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import msgspec

from .files import kernels, read, write
from .plans import CASES as PROBLEMS
from .plans import PLANNERS, cost
from .runs import CASES as RUNS
from .schedules import CASES as SCHEDULES
from .schedules import digest, simulated
from .wire import wire


def plans() -> dict[str, object]:
    return {f"{case} {planner}": msgspec.to_builtins(cost(case, planner)) for case in PROBLEMS for planner in PLANNERS}


def runs() -> dict[str, object]:
    found: dict[str, object] = {"kernels": kernels()}
    for name, case in RUNS.items():
        with tempfile.TemporaryDirectory() as folder:
            found[name] = msgspec.to_builtins(case(Path(folder)))
    return found


def schedules() -> dict[str, object]:
    return {f"{program} {number}": digest(program, list(simulated(program, number))) for program, number in SCHEDULES}


def new_wire() -> dict[str, object]:
    found, kept = wire(), read("wire")
    if found["protocol"] == kept["protocol"] and found != kept:
        sys.exit("the schema changed: raise PROTOCOL in runtime/messages/versions.py first")
    return found


ALL = {"plans": plans, "runs": runs, "schedules": schedules, "wire": new_wire}
for wanted in sys.argv[1:] or ALL:
    write(wanted, ALL[wanted]())
