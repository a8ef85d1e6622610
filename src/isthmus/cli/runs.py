"""`isthmus trace` and `isthmus export`: what a finished run has to give."""

from __future__ import annotations

from pathlib import Path

import msgspec
import typer
from rich.console import Console
from safetensors.torch import save_model

from isthmus.cli import federated_runs
from isthmus.cli.folder import RunFolder
from isthmus.documents import follow_umask
from isthmus.errors import UserError
from isthmus.federated.job import FederatedJob
from isthmus.models import build_model, is_hugging_face, save_hugging_face
from isthmus.report import comparison_table, run_summary
from isthmus.trace import write_perfetto
from isthmus.training.checkpoint import latest_checkpoint, load_checkpoint


def trace(run: Path, out: Console, *, json: bool) -> None:
    folder = RunFolder.existing(run)
    if folder.is_federated:
        federated_runs.trace(folder, out, json=json)
        return
    predicted, measured = folder.traces()
    write_perfetto([predicted, measured], folder.perfetto)
    summary = run_summary(predicted, measured, folder.periods())
    if summary is None:
        raise UserError(f"run folder {run}: no training step was finished")
    if json:
        told = {"perfetto": str(folder.perfetto), "comparison": msgspec.to_builtins(summary)}
        typer.echo(msgspec.json.format(msgspec.json.encode(told), indent=1).decode())
        return
    out.print(comparison_table(summary))
    out.print(f"{folder.perfetto}: open it in ui.perfetto.dev", highlight=False)


def export(run: Path, directory: Path, *, json: bool) -> None:
    folder = RunFolder.existing(run)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UserError(f"export: {directory} exists and is not an empty directory")
    if folder.is_federated:
        unit, job = "rounds", folder.read(FederatedJob)
        module, done = federated_runs.trained_model(folder, job)
    else:
        unit, job = "steps", folder.job()
        module = build_model(job.model)
        done = load_checkpoint(module, latest_checkpoint(folder.checkpoints))
    if is_hugging_face(module):
        tokenizer = "bytes" if job.data is None else job.data.options.get("tokenizer", "bytes")
        save_hugging_face(module, directory, Path(str(tokenizer)) if tokenizer != "bytes" else None)
    else:
        directory.mkdir(parents=True, exist_ok=True)
        save_model(module, str(directory / "model.safetensors"))  # knows ties: `load_model` restores them
        follow_umask(directory / "model.safetensors")
        (directory / "model.json").write_bytes(msgspec.json.encode(job.model))
    if json:
        typer.echo(msgspec.json.encode({"directory": str(directory), unit.removesuffix("s"): done}).decode())
    else:
        typer.echo(f"{directory}: the model after {done} {unit}")
