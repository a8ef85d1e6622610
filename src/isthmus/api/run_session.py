"""The surroundings of every run, whatever it trains: a folder that is claimed, callbacks, uploads, a page."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Generator
from pathlib import Path
from typing import NamedTuple

import msgspec

from isthmus.api.callbacks import callbacks_of
from isthmus.api.folder import RunFolder
from isthmus.api.observer import Observer
from isthmus.api.page import page_beside
from isthmus.api.stored_run import Uploads, chosen_folder, uploaded
from isthmus.callbacks import Callback, Callbacks
from isthmus.callbacks.events import Ended
from isthmus.errors import Interrupted
from isthmus.federated.job import FederatedJob
from isthmus.job import Job
from isthmus.run_files import keep_stop, stop_reason
from isthmus.runtime.processes.signals import Stop

LEAVING_S = 5.0
"""Executors of a coordinator that was killed are copies of it and hold its claim until they notice."""
PYTHON_AGAIN = "resume=True, run={run}"


class RunChoices(msgspec.Struct, frozen=True, kw_only=True):
    resume: bool = False
    run: Path | None = None
    again: str = PYTHON_AGAIN
    """The command that resumes the run; `{run}` stands for its folder."""
    callbacks: tuple[Callback, ...] = ()
    """Besides the job's."""
    dashboard: bool = False
    """Whether the run is shown in a browser."""

    def going_on(self, folder: Path) -> str:
        """How the run in this folder goes on, for a person."""
        return f"run folder {folder}; to go on: {self.again.replace('{run}', shlex.quote(str(folder)))}"

    def last_line(self, folder: RunFolder, outcome: str) -> str:
        """How the run ended, for a person; empty where it is done."""
        lines = {
            "stopped": f"stopped by {stop_reason(folder.path)}",
            "interrupted": f"interrupted: {self.going_on(folder.path)}",
        }
        return lines.get(outcome, "")


class RunSession(NamedTuple):
    folder: RunFolder
    callbacks: Callbacks
    uploads: Uploads


def ending(folder: RunFolder, outcome: Ended, stop: Stop) -> Ended:
    """`stopped` in place of `interrupted` where a callback asked for the end: the folder keeps its reason."""
    if outcome != "interrupted" or not stop.reason:
        return outcome
    keep_stop(folder.path, stop.reason)
    return "stopped"


def folder_of(job: Job | FederatedJob, choices: RunChoices, note: Callable[[str], None]) -> RunFolder:
    """Return the folder of the run to resume, or a new one. UserError."""
    return chosen_folder(
        Path(job.run_dir), job.name, resume=choices.resume, run=choices.run, store=job.store, note=note
    )


@contextlib.contextmanager
def run_session(job: Job | FederatedJob, choices: RunChoices, observer: Observer) -> Generator[RunSession]:
    """Raises UserError for a folder that is in use or of another kind of run, and Interrupted where the block ends at
    once: by a second Ctrl-C, or by one before the run began."""
    folder = folder_of(job, choices, observer.note)
    federated = isinstance(job, FederatedJob)
    folder.check_kind(federated=federated)
    page = page_beside(folder.path if choices.dashboard else None, observer.note)
    with folder.claimed(LEAVING_S if federated and choices.resume else 0.0), page:
        try:
            callbacks = callbacks_of(job, folder.path, choices.callbacks, observer.note)
            with (
                callbacks.session(folder.path),
                uploaded(job.store, folder, observer.note, resume=choices.resume) as uploads,
            ):
                yield RunSession(folder, callbacks, uploads)
        except KeyboardInterrupt:
            how = choices.going_on(folder.path) if folder.begun else "nothing was written"
            raise Interrupted(f"interrupted at once: {how}", folder.path if folder.begun else None) from None
