"""Tells the record, the observer, the callbacks and the store of a run what happens in it, of every program."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from isthmus.api.folder import RunFolder
from isthmus.api.losses import LossPoint
from isthmus.api.observer import Observer
from isthmus.api.run_log import RunLog
from isthmus.api.stored_run import Uploads
from isthmus.callbacks import Callbacks, Evaluated, RunEnded, RunFault, RunStarted, StepDone
from isthmus.callbacks.events import Ended
from isthmus.callbacks.loading import outcome_of
from isthmus.errors import UserError
from isthmus.trace import Span


class Ran(NamedTuple):
    """How a program's part of a run ended."""

    outcome: Ended
    reason: str = ""  # why the run did not come to its end
    failure: Exception | None = None  # the error of a run that is lost or has diverged; None: `reason` says it all
    explain: Callable[[], None] = lambda: None  # writes traces, pictures and summaries into the folder


class Watch:
    """The watch of one session. `noted` and other methods may be called by several threads."""

    def __init__(self, folder: RunFolder, callbacks: Callbacks, uploads: Uploads, observer: Observer) -> None:
        self.folder, self.callbacks, self.uploads, self.observer = folder, callbacks, uploads, observer
        self.log = RunLog(folder.path, observer.note)
        self.done = 0
        self._heldout_loss: float | None = None

    def began(self, started: RunStarted) -> None:
        """A session begins; its folder is there."""
        self.done = started.first_step
        self.log.began(started)
        self.callbacks.start(started)

    def stepped(self, done: StepDone, spans: Sequence[Span] = ()) -> None:
        """A step or a round is done; `spans` are those that were reported since the one before."""
        self.uploads.tell(self.noted)
        self.done = done.step
        done = msgspec.structs.replace(done, heldout_loss=self._heldout_loss, run=self.folder.path)
        if done.loss is not None:
            self.folder.log(LossPoint(step=done.step, loss=done.loss))
        self.log.stepped(done, spans)
        self.observer.stepped(done)
        self.callbacks.step(done)

    def evaluated(self, found: Evaluated) -> None:
        if found.loss is not None:
            self._heldout_loss = found.loss
            self.folder.log(LossPoint(step=found.step, loss=found.loss, split="heldout", metrics=dict(found.metrics)))
        self.log.evaluated(found)
        self.observer.evaluated(found)
        self.callbacks.evaluation(found)

    def fault(self, fault: RunFault, *, told: bool = True) -> None:
        """Something that is no step; callbacks hear of it where it is `told`."""
        self.log.fault(fault)
        if told:
            self.callbacks.fault(fault)

    def noted(self, text: str) -> None:
        """A line for people."""
        self.log.fault(RunFault(step=self.done, kind="note", text=text))
        self.observer.note(text)

    def rolled_back(self, step: int) -> None:
        """Steps after this one will be reported once more."""
        self.folder.forget_losses(step)
        self.done = step
        self.observer.went_back(step)
        self.fault(RunFault(step=step, kind="back"))

    def ended(self, ran: Ran, pictures: Mapping[str, Path] = {}) -> None:
        """The session is over, and the folder complete."""
        self.log.ended(ran.outcome, ran.reason)
        ended = RunEnded(run=self.folder.path, outcome=ran.outcome, reason=ran.reason, pictures=pictures)
        self.callbacks.end(ended)

    @contextlib.contextmanager
    def session(self) -> Generator[None]:
        """Whatever ends the block by an error is an end too."""
        try:
            yield
        except BaseException as e:
            with contextlib.suppress(UserError):  # the first error is the reason
                self.ended(Ran(outcome_of(e), str(e)))
            raise

    def saved(self, step: int, directory: Path) -> None:
        self.uploads.committed(directory, self.folder.path)
        self.log.saved(step)
        self.observer.saved(step, directory)
