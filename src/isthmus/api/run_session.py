"""The surroundings of every run, whatever it trains: a folder that is claimed, callbacks, uploads, a page."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Generator
from pathlib import Path

import msgspec

from isthmus.api.callbacks import callbacks_of
from isthmus.api.folder import RunFolder
from isthmus.api.observer import Observer
from isthmus.api.page import page_beside
from isthmus.api.stored_run import chosen_folder, uploaded
from isthmus.api.watch import Watch
from isthmus.callbacks import Callback
from isthmus.errors import Interrupted
from isthmus.job import JobDocument
from isthmus.run_files import stop_reason
from isthmus.runtime.coordinator.backend import Backend

LEAVING_S = 5.0  # executors of a coordinator that was killed are copies of it and hold its claim until they notice
PYTHON_AGAIN = "resume=True, run={run}"


class Choices(msgspec.Struct, frozen=True, kw_only=True):
    resume: bool = False
    run: Path | None = None
    again: str = PYTHON_AGAIN  # the command that resumes the run; `{run}` stands for its folder
    callbacks: tuple[Callback, ...] = ()  # besides the job's
    dashboard: bool = False  # whether the run is shown in a browser
    plan: Path | None = None  # a plan document to follow
    backend: Backend | None = None
    """Devices or sites of a fleet, at their own speed; None: processes here, emulated as the job says."""
    devices_stay: bool = True  # whether devices of a run that was left in its middle may be at work still

    def going_on(self, folder: Path) -> str:
        """Return how the run in this folder goes on, for a person."""
        return f"run folder {folder}; to go on: {self.again.replace('{run}', shlex.quote(str(folder)))}"

    def last_line(self, folder: RunFolder, outcome: str) -> str:
        """Return how the run ended, for a person; empty where it is done."""
        lines = {
            "stopped": f"stopped by {stop_reason(folder.path)}",
            "interrupted": f"interrupted: {self.going_on(folder.path)}",
        }
        return lines.get(outcome, "")


def folder_of(job: JobDocument, choices: Choices, note: Callable[[str], None]) -> RunFolder:
    """Return the folder of the run to resume, or a new one. UserError."""
    return chosen_folder(
        Path(job.run_dir), job.name, resume=choices.resume, run=choices.run, store=job.store, note=note
    )


@contextlib.contextmanager
def run_session(job: JobDocument, choices: Choices, observer: Observer) -> Generator[Watch]:
    """Raises UserError for a folder that is in use or of another kind of run, and Interrupted where the block ends at
    once: by a second Ctrl-C, or by one before the run began."""
    folder = folder_of(job, choices, observer.note)
    folder.check_kind(job.kind)
    page = page_beside(folder.path if choices.dashboard else None, observer.note)
    with folder.claimed(LEAVING_S if job.kind == "federated" and choices.resume else 0.0), page:
        try:
            callbacks = callbacks_of(job, folder.path, choices.callbacks, observer.note)
            with uploaded(job.store, folder, observer.note, resume=choices.resume) as uploads:
                watch = Watch(folder, callbacks, uploads, observer)
                with watch.session():
                    yield watch
        except KeyboardInterrupt:
            how = choices.going_on(folder.path) if folder.begun else "nothing was written"
            raise Interrupted(f"interrupted at once: {how}", folder.path if folder.begun else None) from None
