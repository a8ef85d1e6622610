"""How long steps take, by the cost model: kept in a file, as capturing the model for them takes seconds."""

from __future__ import annotations

from pathlib import Path

import msgspec
from jobs import SHARES, job_of

from isthmus.api.decoupled import step_times
from isthmus.cost import PlanLayout, build_replicas
from isthmus.fleet import resolve_fleet
from isthmus.job import prepare

FILE = Path(__file__).parent / "results" / "times.json"
MODES = ("every-step", "local", "dreamddp", "outer")


class Times(msgspec.Struct, frozen=True):
    alone_s: dict[str, float]
    """By device, of a replica that never waits."""
    together_s: dict[str, float]
    """By mode, of replicas that wait for each other; with what they exchange."""


def times() -> Times:
    if FILE.exists():
        return msgspec.json.decode(FILE.read_bytes(), type=Times)
    fleet = resolve_fleet(job_of("every-step").fleet)
    layouts = [PlanLayout((name,), (), SHARES[name]) for name in fleet.names]
    prepared = prepare(job_of("every-step"))
    together_s: dict[str, float] = {}
    for mode in MODES:
        problem = msgspec.structs.replace(prepared, job=job_of(mode)).problem(fleet)
        together_s[mode] = build_replicas(problem, layouts, planner="benchmark").predicted.step_s
    decoupled = msgspec.structs.replace(prepared, job=job_of("decoupled"))
    found = Times(step_times(decoupled, fleet), together_s)
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    return found


if __name__ == "__main__":
    print(times())
