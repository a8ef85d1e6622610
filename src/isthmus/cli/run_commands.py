"""`isthmus trace`, `calibrate` and `export`: of a run's folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from isthmus.cli.lazy_import import LazyImport
from isthmus.cli.options import JsonOption, local_path

if TYPE_CHECKING:
    from isthmus.cli import runs
else:
    runs = LazyImport("isthmus.cli.runs")

app = typer.Typer()


@app.command()
def trace(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")], json: JsonOption = False
) -> None:
    """Write a run's Perfetto trace (predicted and measured); print how well it was predicted."""
    runs.trace(run, json=json)


@app.command()
def calibrate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
    target: Annotated[
        Path | None,
        typer.Option("--out", parser=local_path, metavar="FILE", help="Write the fleet here; default: stdout."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Write a run's fleet as its first steps showed it: stated speeds times measured factors."""
    runs.calibrate(run, target, json=json)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
    directory: Annotated[Path, typer.Argument(metavar="DIR", parser=local_path, help="Where to write.")],
    json: JsonOption = False,
) -> None:
    """Write a run's newest checkpoint or last federated round: a Hugging Face directory, or safetensors.

    A Hugging Face directory when the model is one."""
    runs.export(run, directory, json=json)
