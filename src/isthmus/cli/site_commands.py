"""`isthmus site`: what a site's owner sees and says."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from isthmus import api
from isthmus.cli.console import log, show
from isthmus.cli.options import DeviceStateOption, JsonOption
from isthmus.sanitize import sanitize

app = typer.Typer()


@app.command()
def site(
    what: Annotated[Literal["log", "yes", "no"], typer.Argument(help="Show the log, or answer what was asked last.")],
    state: DeviceStateOption = None,
    json: JsonOption = False,
) -> None:
    """Show a site's owner what was asked and what left the site, or say yes or no to a coordinator."""
    if what == "log":
        found = api.site.log(state)
        show(found, lambda: api.site.table(found), json=json)
        return
    asked = api.site.answer(state, yes=what == "yes")
    show([asked], lambda: api.site.table([asked]), json=json)
    log(f"answered {what}: the run of {sanitize(asked.job)}")
