"""A federated run's progress as events for its observer and calls of its callbacks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from isthmus.api.callbacks import run_started
from isthmus.api.observer import Observer
from isthmus.api.stored_run import RoundUploads
from isthmus.callbacks import Callbacks, Evaluated, RunFault, StepDone
from isthmus.federated.history import RoundLine
from isthmus.federated.job import FederatedJob
from isthmus.protocol.federated_reports import refusal_texts
from isthmus.protocol.federated_rules import Why
from isthmus.run_files import keep_stop
from isthmus.runtime.processes.signals import Stop


class FederatedWatch:
    """The watch of one run. `noted` and `round_done` may be called by two threads."""

    def __init__(
        self, job: FederatedJob, uploads: RoundUploads, observer: Observer, callbacks: Callbacks, stop: Stop
    ) -> None:
        self._job = job
        self._uploads = uploads
        self._folder = uploads.folder
        self._observer = observer
        self._callbacks = callbacks
        self._stop = stop
        self._done = 0
        self._heldout_loss: float | None = None

    def began(self, first_round: int) -> None:
        """The folder is the run's."""
        self._done = first_round
        if first_round:
            self._observer.note(f"resuming {self._folder} after {first_round} rounds")
        self._observer.note(f"run folder: {self._folder}")
        keep_stop(self._folder, "")
        self._callbacks.start(run_started(self._job, self._folder, first_round, self._stop.request))

    def noted(self, text: str) -> None:
        """A line for people, while rounds go on."""
        self._observer.note(text)
        self._callbacks.fault(RunFault(step=self._done, kind="note", text=text))

    def round_done(self, line: RoundLine) -> None:
        self._uploads.look(self.noted)
        self._done = done = line.record.round + 1
        for refused in line.record.refused:
            fault = RunFault(step=done, kind="refused", device=f"client {refused.client}", text=refused.reason)
            self._callbacks.fault(fault)
        evaluation = line.evaluation
        if evaluation is not None and evaluation.loss is not None:
            self._heldout_loss = evaluation.loss
        step = round_step(line, self._job.federated.rounds, self._folder, self._heldout_loss)
        self._observer.stepped(step)
        self._callbacks.step(step)
        if evaluation is not None:
            means = {name: figures.mean for name, figures in evaluation.clients.items()}
            found = Evaluated(step=done, loss=evaluation.loss, unit="round", metrics=evaluation.metrics, clients=means)
            self._observer.evaluated(found)
            self._callbacks.evaluation(found)


ENDED: Mapping[Why, str] = {
    "quorum": "ended with the share that must answer",
    "behind": "ended without those still at work for an earlier round",
    "deadline": "ended by the deadline",
}
"""Why a round ended, where not all have answered."""


def _text(line: RoundLine) -> str:
    """Why it ended, and why the first update was refused."""
    ended = ENDED.get(line.record.closed_by)
    refused = [f"{text:.100}" for text in refusal_texts(line.record.refused)[:1]]
    return ", ".join([*([f"{ended} ({line.rules})"] if ended else []), *refused])


def round_step(line: RoundLine, rounds: int, run: Path = Path(), heldout_loss: float | None = None) -> StepDone:
    """Return a round of `rounds` as the event of a step."""
    record, seconds, busy = line.record, line.seconds, line.busy_s()
    samples = sum(timed.samples for one in record.trained.values() for timed in one)
    return StepDone(
        step=record.round + 1,
        steps=rounds,
        unit="round",
        heldout_loss=heldout_loss,
        clients=line.clients,
        refused=len(record.refused),
        late=len(record.stale),
        missing=len(record.missing),
        reassigned=record.stolen,
        step_s=seconds,
        longest_s=line.makespan_s,
        planned_s=record.predicted_s,
        samples_per_s=samples / seconds if seconds else None,
        sent_bytes=line.sent_bytes + line.received_bytes,
        busy={name: min(1.0, busy_s / seconds) for name, busy_s in busy.items()} if seconds else {},
        devices=tuple(busy),
        text=_text(line),
        round=record,
        run=run,
    )
