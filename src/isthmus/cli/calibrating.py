"""`isthmus calibrate`: the fleet of a run, as the run's first steps showed it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import typer
from rich.console import Console

from isthmus.cli.folder import RunFolder
from isthmus.errors import UserError
from isthmus.fleet import Fleet, dump_fleet
from isthmus.units import format_compute


def calibrate(run: Path, target: Path | None, notes: Console, *, json: bool) -> None:
    """Write the run's fleet with what was fitted. UserError where nothing was."""
    folder = RunFolder.existing(run)
    folder.check_kind(federated=False)
    fleet = folder.fitted()
    if fleet is None:
        raise UserError(f"run folder {run}: nothing was measured: it takes a second step under one plan")
    if target is not None:
        target.write_text(dump_fleet(fleet), encoding="utf-8")
    if json:
        typer.echo(msgspec.json.format(msgspec.json.encode(fleet), indent=1).decode())
    elif target is None:
        typer.echo(dump_fleet(fleet))
    notes.print(fitted_text(fleet), highlight=False, markup=False, soft_wrap=True)
    if target is not None:
        notes.print(f"wrote {target}: --fleet {target} plans with it", highlight=False, markup=False, soft_wrap=True)


def fitted_text(fleet: Fleet) -> str:
    """Stated speed x factor of each device."""
    other = [d for d in fleet.devices if d.scale != 1]
    told = ", ".join(f"{d.name} computes at {format_compute(d.flops_per_s)} x {d.scale:.3g}" for d in other)
    return told or "all devices compute as stated"
