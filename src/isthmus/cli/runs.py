"""What commands of a run's folder print."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import msgspec
import typer

from isthmus.api.export import export_model, write_trace
from isthmus.api.run import calibrated
from isthmus.cli.options import notes, out, print_json
from isthmus.fleet import dump_fleet
from isthmus.report import comparison_table
from isthmus.report.federated_progress import rounds_table
from isthmus.report.fleet_tables import fitted_text


def trace(run: Path, *, json: bool) -> None:
    perfetto, found, notes = write_trace(run)
    _log(notes)
    if isinstance(found, list):
        document = {"rounds": len(found), "seconds": sum(line.seconds for line in found)}
        table = rounds_table(found)
    else:
        document, table = {"comparison": msgspec.to_builtins(found)}, comparison_table(found)
    if json:
        print_json({"perfetto": str(perfetto), **document})
        return
    out().print(table)
    out().print(f"{perfetto}: open it in ui.perfetto.dev", highlight=False)


def calibrate(run: Path, target: Path | None, *, json: bool) -> None:
    fleet = calibrated(run)
    if target is not None:
        target.write_text(dump_fleet(fleet), encoding="utf-8")
    if json:
        print_json(fleet)
    elif target is None:
        typer.echo(dump_fleet(fleet))
    wrote = [f"wrote {target}: --fleet {target} plans with it"] if target is not None else []
    for line in (fitted_text(fleet), *wrote):
        notes().print(line, highlight=False, soft_wrap=True)


def export(run: Path, directory: Path, *, json: bool) -> None:
    found, notes = export_model(run, directory)
    _log(notes)
    if json:
        done = {found.unit.removesuffix("s"): found.done}
        typer.echo(msgspec.json.encode({"directory": str(directory), **done}).decode())
    else:
        typer.echo(f"{directory}: the model after {found.done} {found.unit}")


def _log(lines: Iterable[str]) -> None:
    for line in lines:
        print(line, file=sys.stderr)
