"""`isthmus trace` and `isthmus export` of a federated run's folder."""

from __future__ import annotations

import sys

import msgspec
import torch
import typer
from rich.console import Console
from torch import nn

from isthmus.cli.folder import RunFolder
from isthmus.errors import UserError
from isthmus.federated.algorithms import BUFFERS
from isthmus.federated.history import History
from isthmus.federated.job import FederatedJob, build
from isthmus.federated.resident import Resident
from isthmus.federated.server import ROUNDS, Commits
from isthmus.report.federated_progress import rounds_table
from isthmus.report.federated_trace import trace_of
from isthmus.trace import write_perfetto


def trace(folder: RunFolder, out: Console, *, json: bool) -> None:
    """Its rounds for a trace viewer, and what they took."""
    lines = History.of(folder.path).lines()
    if not lines:
        raise UserError(f"run folder {folder.path}: no round was committed yet")
    write_perfetto([trace_of(folder.path.name, lines)], folder.perfetto)
    if json:
        told = {"perfetto": str(folder.perfetto), "rounds": len(lines), "seconds": sum(line.seconds for line in lines)}
        typer.echo(msgspec.json.format(msgspec.json.encode(told), indent=1).decode())
        return
    out.print(rounds_table(lines))
    out.print(f"{folder.perfetto}: open it in ui.perfetto.dev", highlight=False, markup=False)


def trained_model(folder: RunFolder, job: FederatedJob) -> tuple[nn.Module, int]:
    """The server's model after the last committed round that is whole, and how many rounds that is."""
    damaged: list[str] = []
    found = Commits(folder.path / ROUNDS).newest(damaged.append, needs_states=False)
    if found is None:
        raise UserError(f"run folder {folder.path}: no round was committed yet")
    for why in damaged:
        print(f"{why}; going back to round {found.round + 1}", file=sys.stderr)
    resident = Resident(build(job))
    model = found.values.get("model")
    if model is None or model.shape != (resident.size,) or model.dtype != resident.dtype:
        raise UserError(f"run folder {folder.path}: its rounds hold a model of another form than that of job.json")
    parameters = dict(resident.module.named_parameters())
    with torch.no_grad():  # each in memory of its own, as files hold them
        for name, value in resident.named(model).items():
            parameters[name].copy_(value)
    if BUFFERS in found.values:
        resident.set_buffers(found.values[BUFFERS])
    return resident.module, found.round + 1
