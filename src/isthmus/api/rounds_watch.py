"""Rounds of a federated run as steps and evaluations."""

from __future__ import annotations

from collections.abc import Mapping

from isthmus.api.callbacks import run_started
from isthmus.api.stored_run import RoundUploads
from isthmus.api.watch import Watch
from isthmus.callbacks import Evaluated, RunFault, StepDone
from isthmus.federated.evaluation import Evaluation
from isthmus.federated.history import RoundLine
from isthmus.federated.job import FederatedJob
from isthmus.programs.merging import Why
from isthmus.programs.round_records import refusal_texts
from isthmus.run_files import keep_stop
from isthmus.runtime.processes.signals import Stop


class RoundsWatch:
    """`noted` and `round_done` may be called by two threads."""

    def __init__(self, job: FederatedJob, watch: Watch, stop: Stop) -> None:
        self._job, self._watch, self._stop = job, watch, stop
        self._uploads = RoundUploads(watch.uploads, watch.folder.path)

    def began(self, first_round: int) -> None:
        """The folder is the run's."""
        watch, folder = self._watch, self._watch.folder
        if first_round:
            watch.observer.note(f"resuming {folder.path} after {first_round} rounds")
        watch.observer.note(f"run folder: {folder.path}")
        keep_stop(folder.path, "")
        folder.forget_losses(first_round)
        watch.began(run_started(self._job, folder.path, first_round, self._stop.request))

    def keeps_states(self, size_bytes: int) -> None:
        """Clients keep states of up to so many bytes."""
        self._uploads.keeps_states(size_bytes)

    def ended(self) -> None:
        """No round follows."""
        self._uploads.look(self.noted, last=True)

    def noted(self, text: str) -> None:
        """A line for people, while rounds go on."""
        self._watch.noted(text)
        self._watch.callbacks.fault(RunFault(step=self._watch.done, kind="note", text=text))

    def round_done(self, line: RoundLine) -> None:
        self._uploads.look(self.noted)
        for refused in line.record.refused:
            device, step = f"client {refused.client}", line.record.round + 1
            fault = RunFault(step=step, kind="refused", device=device, text=refused.reason)
            self._watch.callbacks.fault(fault)
        self._watch.stepped(round_step(line, self._job.federated.rounds))
        if line.evaluation is not None:
            self._watch.evaluated(round_evaluation(line.record.round + 1, line.evaluation))


def round_evaluation(done: int, found: Evaluation) -> Evaluated:
    """Return the evaluation after so many rounds as an event."""
    means = {name: figures.mean for name, figures in found.clients.items()}
    return Evaluated(step=done, loss=found.loss, unit="round", metrics=found.metrics, clients=means)


ENDED: Mapping[Why, str] = {  # why a round ended, where not all have answered
    "quorum": "ended with the share that must answer",
    "behind": "ended without those still at work for an earlier round",
    "deadline": "ended by the deadline",
}


def _text(line: RoundLine) -> str:
    """Return why it ended, and why the first update was refused."""
    ended = ENDED.get(line.record.closed_by)
    refused = [f"{text:.100}" for text in refusal_texts(line.record.refused)[:1]]
    return ", ".join([*([f"{ended} ({line.rules})"] if ended else []), *refused])


def round_step(line: RoundLine, rounds: int) -> StepDone:
    """Return a round of `rounds` as the event of a step."""
    record, seconds, busy = line.record, line.seconds, line.busy_s()
    samples = sum(timed.samples for one in record.trained.values() for timed in one)
    return StepDone(
        step=record.round + 1,
        steps=rounds,
        unit="round",
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
    )
