"""Lists of the names that a job can have, and where; and `isthmus describe`."""

from __future__ import annotations

from typing import Annotated

import typer

from isthmus import api
from isthmus.cli.console import out, print_json, show
from isthmus.cli.options import JsonOption

app = typer.Typer()


@app.command()
def fleets(json: JsonOption = False) -> None:
    """List the built-in fleets."""
    found = api.names.fleets()
    show(found, lambda: api.names.fleets_table(list(found.items())), json=json)


@app.command()
def planners(json: JsonOption = False) -> None:
    """List the planners: what each kind decides, and what each planner can do."""
    found = api.names.planners()
    if json:
        print_json(found)
        return
    for kind in found.values():
        out().print(api.names.kind_table(kind))


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
    found = api.descriptions.described(name)
    if json:
        print_json([api.descriptions.plain(one) for one in found])
        return
    for one in found:
        out().print(api.descriptions.described_table(one))


def _list(kind: str, *, json: bool) -> None:
    found = api.descriptions.summaries(kind)
    if json:
        print_json(found)
        return
    where = api.descriptions.KINDS[kind][0]
    out().print(api.names.names_table(f"{kind.capitalize()}s: {where}", kind, found.items()))
    out().print("isthmus describe NAME shows the options of one", highlight=False)
