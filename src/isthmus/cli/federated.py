"""`isthmus train` for a federated job: run, watch, and leave a folder that explains it all."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import msgspec
import typer
from rich.console import Console
from rich.text import Text

from isthmus.api.folder import RunFolder
from isthmus.errors import UserError
from isthmus.federated.history import History, RoundLine
from isthmus.federated.job import FederatedJob, check, check_deployment, check_simulation, load_federated_job
from isthmus.protocol.federated_events import Finish
from isthmus.report.federated_progress import FederatedProgress, rounds_table
from isthmus.runtime.federated.run import FederatedRun
from isthmus.runtime.federated.site_run import SiteRun
from isthmus.runtime.service.service import Service

Act = Callable[[], Finish]
ServeAs = Callable[[Callable[[str], None]], AbstractContextManager[Service]]
"""Opens a service, or one that is open already, that tells people what it does in this way."""
LEAVING_S = 5.0
"""Executors of a coordinator that was killed are copies of it and hold its claim until they notice."""


Begin = Callable[[Path, FederatedProgress], "tuple[Run, Act]"]


class FederatedChoices(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line adds to the job."""

    resume: bool = False
    run: Path | None = None
    scheme: str | None = None
    executors: int | None = None
    rounds: int | None = None
    json: bool = False
    again: str = "--resume"
    """What a person has to say for the run to go on."""


def read_job(path: Path, choices: FederatedChoices, overrides: Mapping[str, object] = {}) -> FederatedJob:
    """The job with what the command line overrides. UserError as `load_federated_job`."""
    job = load_federated_job(path, overrides)
    given = {"scheme": choices.scheme, "executors": choices.executors}
    execution = msgspec.structs.replace(job.execution, **{k: v for k, v in given.items() if v is not None})
    federated = job.federated
    if choices.rounds is not None:
        federated = msgspec.structs.replace(federated, rounds=choices.rounds)
    job = msgspec.structs.replace(job, execution=execution, federated=federated)
    check(job)
    return job


class Run(Protocol):
    """What the commands need of a run, wherever its clients train."""

    @property
    def first_round(self) -> int: ...
    @property
    def history(self) -> History: ...


def train(job: FederatedJob, choices: FederatedChoices, out: Console, notes: Console) -> int:
    """Simulate: the whole command; returns the exit code."""
    check_simulation(job)

    def begin(folder: Path, progress: FederatedProgress) -> tuple[Run, Act]:
        run = FederatedRun(job, folder, resume=choices.resume, watch=progress.round)
        count = len(run.machine.executors)
        several = f"{count} executor{'s' if count > 1 else ''}"
        what = f"{len(run.data.sizes)} clients, {several}, scheme {job.execution.scheme}"
        progress.note(f"{job.federated.algorithm} over {what}; a round is closed by {run.machine.rules.told}")
        return run, lambda: run.run(progress.note)

    return _in_folder(job, choices, begin, out, notes)


def deploy(job: FederatedJob, choices: FederatedChoices, serving: ServeAs, out: Console, notes: Console) -> int:
    """The whole command, at the sites of the service that `serving` opens; returns the exit code."""
    check_deployment(job)

    def begin(folder: Path, progress: FederatedProgress) -> tuple[Run, Act]:
        run = SiteRun(job, folder, resume=choices.resume, watch=progress.round)
        sites = ", ".join(run.deployment.sites)
        progress.note(f"{job.federated.algorithm} over sites {sites}; a round is closed by {run.machine.rules.told}")

        def act() -> Finish:
            with serving(progress.note) as service:
                return run.run(service, progress.note)

        return run, act

    return _in_folder(job, choices, begin, out, notes)


def _in_folder(job: FederatedJob, choices: FederatedChoices, begin: Begin, out: Console, notes: Console) -> int:
    parent = Path(job.run_dir)
    if choices.resume:
        folder = RunFolder.newest(parent, job.name) if choices.run is None else RunFolder.existing(choices.run)
    else:
        folder = RunFolder.fresh(parent, job.name) if choices.run is None else RunFolder.empty(choices.run)
    folder.check_kind(federated=True)
    with folder.claimed(LEAVING_S if choices.resume else 0.0):
        try:
            return _watched(job, choices, folder.path, begin, out, notes)
        except KeyboardInterrupt:
            _say(notes, f"interrupted: go on with {choices.again}, run folder {folder.path}")
            return 130


def _watched(
    job: FederatedJob, choices: FederatedChoices, folder: Path, begin: Begin, out: Console, notes: Console
) -> int:  # fmt: skip
    with FederatedProgress(notes, job.federated.rounds) as progress:
        run, act = begin(folder, progress)
        if run.first_round >= job.federated.rounds:
            progress.note(f"nothing left to do: {folder} has {run.first_round} rounds of {job.federated.rounds}")
            return 0
        if choices.resume:
            progress.note(f"going on with {folder} after {run.first_round} rounds")
        progress.note(f"run folder: {folder}")
        finish = act()
    _report(run.history.lines(), folder, choices, out)
    if finish.outcome == "interrupted":
        _say(notes, f"interrupted: go on with {choices.again}, run folder {folder}")
        return 130
    return 0


def _report(lines: list[RoundLine], folder: Path, choices: FederatedChoices, out: Console) -> None:
    if not lines:
        return
    pictures = importlib.import_module("isthmus.report.federated_pictures")  # with matplotlib, for half a second
    pictures.draw_rounds(lines, folder / "accuracy.png")
    pictures.draw_round_timeline(lines[-1], folder / "round.png")
    pictures.draw_paces(lines, folder / "paces.png")
    last = next((line.evaluation for line in reversed(lines) if line.evaluation is not None), None)
    if choices.json:
        told = {"run": str(folder), "rounds": len(lines), "evaluation": msgspec.to_builtins(last)}
        typer.echo(msgspec.json.format(msgspec.json.encode(told), indent=1).decode())
        return
    out.print(rounds_table(lines))
    if last is not None:
        if last.loss is not None:
            accuracy = "" if last.accuracy is None else f", accuracy {last.accuracy:.1%}"
            out.print(Text(f"held-out loss {last.loss:.4f}{accuracy} after {lines[-1].record.round + 1} rounds"))
        if last.clients is not None:
            worst = f"worst tenth {last.clients.worst_decile:.1%}, deviation {last.clients.deviation:.1%}"
            out.print(Text(f"clients' own data: mean accuracy {last.clients.mean:.1%}, {worst}"))
    out.print(Text(f"run folder: {folder}"))


def _say(notes: Console, text: str) -> None:
    notes.print(Text(text), soft_wrap=True)


def refuse_options(given: Mapping[str, object]) -> None:
    """Options of a pipeline's job say nothing here. UserError for the first that was given."""
    for name, value in given.items():
        if value is not None:
            raise UserError(f"{name}: got {value!r} for a federated job, expected none: see --scheme and --executors")
