"""What a job can name, and where: lists of it, and `isthmus describe`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from isthmus.cli.later import Later
from isthmus.cli.options import JsonOption, out
from isthmus.cost.compression import describe_ratios, ratio_planner_names
from isthmus.errors import UserError
from isthmus.fleet import RANDOM, topology_names
from isthmus.fleet import describe as describe_topology
from isthmus.planners import describe as describe_planner
from isthmus.planners import planner_names
from isthmus.planners.cohort import cohort_names, describe_cohort
from isthmus.planners.sync import describe_sync, sync_planner_names
from isthmus.report.fleet_tables import names_table, planners_table, topologies_table

if TYPE_CHECKING:
    from isthmus.report import settings_reference
else:
    settings_reference = Later("isthmus.report.settings_reference")

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


@app.command()
def models(json: JsonOption = False) -> None:
    """List the models that a job can name."""
    _list("model", json=json)


@app.command()
def datasets(json: JsonOption = False) -> None:
    """List the kinds of data that a job can name."""
    _list("data set", json=json)


@app.command()
def algorithms(json: JsonOption = False) -> None:
    """List the federated algorithms."""
    _list("algorithm", json=json)


@app.command()
def describe(
    name: Annotated[str, typer.Argument(metavar="NAME", help="As gpt, text, scaffold, training or my_module:build.")],
    json: JsonOption = False,
) -> None:
    """Show the options of a model, data set or algorithm, or the keys of a table of a job."""
    found = settings_reference.described(name)
    if json:
        typer.echo(msgspec.json.format(msgspec.json.encode([_plain(one) for one in found]), indent=1).decode())
        return
    for one in found:
        out().print(settings_reference.described_table(one))


def _plain(one: settings_reference.Described) -> dict[str, object]:
    keys = ("key", "type", "default", "meaning")
    options = [{key: getattr(option, key) for key in keys} for option in one.options]
    return {"kind": one.kind, "name": one.name, "where": one.where, "summary": one.summary, "options": options}


def _list(kind: str, *, json: bool) -> None:
    found = settings_reference.summaries(kind)
    if json:
        typer.echo(msgspec.json.encode(found).decode())
        return
    where = settings_reference.KINDS[kind][0]
    out().print(names_table(f"{kind.capitalize()}s: {where}", kind, found.items()))
    out().print("isthmus describe NAME shows the options of one", highlight=False)


def _described(describe: Callable[[str], str], planner: str) -> str:
    """One broken package must not hide the others."""
    try:
        return describe(planner)
    except UserError as e:
        return str(e)
