"""A trace and a model, from the files of a federated run's rounds."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from isthmus.api.folder import RunFolder
from isthmus.documents import numbered
from isthmus.errors import UserError
from isthmus.federated.buffers import buffers_of
from isthmus.federated.history import RoundHistory, RoundLine
from isthmus.federated.job import FederatedJob, build
from isthmus.federated.resident import Resident
from isthmus.federated.server import Commits
from isthmus.report.federated_trace import trace_of
from isthmus.run_files import ROUND_LINES, ROUNDS
from isthmus.trace import write_perfetto


def write_federated_trace(folder: RunFolder) -> tuple[list[RoundLine], list[str]]:
    """Its rounds for a trace viewer; the rounds, and what could not be read."""
    notes: list[str] = []
    lines = RoundHistory.of(folder.path).lines(notes.append)
    kept = Commits(folder.path / ROUNDS).rounds()
    if not lines:
        raise _no_lines(folder, kept)
    reported_of = {line.record.round for line in lines}
    if missing := [
        number + 1 for number in range(max(kept, *(n + 1 for n in reported_of))) if number not in reported_of
    ]:
        unreported = numbered("round", missing)
        notes.append(f"run folder {folder.path}: {ROUND_LINES} tells nothing of {unreported}: not in the trace")
    write_perfetto([trace_of(folder.path.name, lines)], folder.perfetto)
    return lines, notes


def trained_model(
    folder: RunFolder, job: FederatedJob, note: Callable[[str], None] = lambda _: None
) -> tuple[nn.Module, int]:
    """The server's model after the last committed round that is whole, and how many rounds that is."""
    damaged: list[str] = []
    found = Commits(folder.path / ROUNDS).newest(damaged.append, needs_states=False)
    if found is None:
        raise _nothing_saved(folder, job)
    for why in damaged:
        note(f"{why}; going back to round {found.round + 1}")
    resident = Resident(build(job))
    model = found.values.get("model")
    if model is None or model.shape != (resident.size,) or model.dtype != resident.dtype:
        raise UserError(f"run folder {folder.path}: its rounds hold a model of another form than that of job.json")
    parameters = dict(resident.module.named_parameters())
    with torch.no_grad():  # each in memory of its own, as files hold them
        for name, value in resident.named(model).items():
            parameters[name].copy_(value)
    resident.set_buffers(buffers_of(found.values))
    return resident.module, found.round + 1


def _no_lines(folder: RunFolder, kept: int) -> UserError:
    """The error of a trace without lines of rounds, though rounds may have been made."""
    path = folder.path / ROUND_LINES
    if path.is_file() and path.stat().st_size:
        return UserError(f"{path}: damaged: none of its lines can be read")
    if kept:
        state = "empty" if path.is_file() else "missing"
        return UserError(
            f"{path}: {state}, expected a line for each of {kept} rounds, of which the last are in {ROUNDS}/"
        )
    return UserError(f"run folder {folder.path}: no round was committed yet")


def _nothing_saved(folder: RunFolder, job: FederatedJob) -> UserError:
    """The error of an export without a file of a round."""
    unread: list[str] = []
    lines, save_every = RoundHistory.of(folder.path).lines(unread.append), job.training.save_every
    done = max((line.record.round + 1 for line in lines), default=0)
    if done >= min(save_every, job.federated.rounds):
        what = f"{ROUNDS}/ holds no round, expected the last of the {done} that {ROUND_LINES} lists"
    elif done:
        what = f"no round was saved yet: training.save_every is {save_every}, and {done} were made"
    elif unread:
        what = f"{ROUNDS}/ holds no round, and no line of {ROUND_LINES} can be read"
    else:
        what = "no round was committed yet"
    return UserError(f"run folder {folder.path}: {what}")
