"""`isthmus topologies` and `planners`: what a job can name, and where."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import typer

from isthmus.cli.options import JsonOption, out
from isthmus.cost.compression import describe_ratios, ratio_planner_names
from isthmus.errors import UserError
from isthmus.fleet import RANDOM, topology_names
from isthmus.fleet import describe as describe_topology
from isthmus.planners import describe as describe_planner
from isthmus.planners import planner_names
from isthmus.planners.cohort import cohort_names, describe_cohort
from isthmus.planners.sync import describe_sync, sync_planner_names
from isthmus.report.fleet_tables import planners_table, topologies_table

app = typer.Typer()


@app.command()
def topologies(json: JsonOption = False) -> None:
    """List the built-in fleets."""
    pairs = [(name, describe_topology(name)) for name in (*topology_names(), RANDOM)]
    if json:
        typer.echo(msgspec.json.encode(dict(pairs)).decode())
    else:
        out().print(topologies_table(pairs))


KINDS = {
    "plan": ("Plans: `planner` of a job", planner_names, describe_planner),
    "compression": ("Compression ratios: `compression.method` of a job", ratio_planner_names, describe_ratios),
    "sync": ("When what is averaged: `planner=` of isthmus.sync", sync_planner_names, describe_sync),
    "cohort": ("Clients on executors: `execution.planner` of a federated job", cohort_names, describe_cohort),
}
"""Kind of planner: what it plans and where it is named, the names, and one line on each."""


@app.command()
def planners(json: JsonOption = False) -> None:
    """List the planners."""
    found = {
        kind: {name: _described(describe, name) for name in names()} for kind, (_, names, describe) in KINDS.items()
    }
    if json:
        typer.echo(msgspec.json.encode(found).decode())
        return
    for kind, described in found.items():
        out().print(planners_table(KINDS[kind][0], described.items()))


def _described(describe: Callable[[str], str], planner: str) -> str:
    """One broken package must not hide the others."""
    try:
        return describe(planner)
    except UserError as e:
        return str(e)
