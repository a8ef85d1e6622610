"""`isthmus topologies` and `planners`: what a job can name."""

from __future__ import annotations

import msgspec
import typer

from isthmus.cli.options import JsonOption, out
from isthmus.errors import UserError
from isthmus.fleet import RANDOM, topology_names
from isthmus.fleet import describe as describe_topology
from isthmus.planners import describe as describe_planner
from isthmus.planners import planner_names
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


@app.command()
def planners(json: JsonOption = False) -> None:
    """List the planners."""
    pairs = [(name, _described(name)) for name in planner_names()]
    if json:
        typer.echo(msgspec.json.encode(dict(pairs)).decode())
    else:
        out().print(planners_table(pairs))


def _described(planner: str) -> str:
    """One broken package must not hide the others."""
    try:
        return describe_planner(planner)
    except UserError as e:
        return str(e)
