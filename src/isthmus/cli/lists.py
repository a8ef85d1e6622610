"""What a job can name, and where: lists of it, and `isthmus describe`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from isthmus.api import names
from isthmus.cli.lazy_import import LazyImport
from isthmus.cli.options import JsonOption, out
from isthmus.report.fleet_tables import names_table, planners_table, topologies_table

if TYPE_CHECKING:
    from isthmus.report import settings_reference
else:
    settings_reference = LazyImport("isthmus.report.settings_reference")

app = typer.Typer()


@app.command()
def topologies(json: JsonOption = False) -> None:
    """List the built-in fleets."""
    found = names.topologies()
    if json:
        typer.echo(msgspec.json.encode(found).decode())
    else:
        out().print(topologies_table(list(found.items())))


@app.command()
def planners(json: JsonOption = False) -> None:
    """List the planners."""
    found = names.planners()
    if json:
        typer.echo(msgspec.json.encode({kind: one.described for kind, one in found.items()}).decode())
        return
    for one in found.values():
        out().print(planners_table(one.where, one.described.items()))


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
