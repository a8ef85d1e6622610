"""A federated run's progress as events for its observer and calls of its callbacks."""

from __future__ import annotations

from isthmus.api.callbacks import run_started
from isthmus.api.observer import Observer
from isthmus.api.stored_run import RoundUploads
from isthmus.callbacks import Callbacks, Evaluated, RunFault, StepDone
from isthmus.federated.history import RoundLine
from isthmus.federated.job import FederatedJob
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
        self._observer.round_done(line)
        self._done = done = line.record.round + 1
        for refused in line.record.refused:
            fault = RunFault(step=done, kind="refused", device=f"client {refused.client}", text=refused.reason)
            self._callbacks.fault(fault)
        evaluation = line.evaluation
        if evaluation is not None and evaluation.loss is not None:
            self._heldout_loss = evaluation.loss
        self._callbacks.step(self._step(line, done))
        if evaluation is not None:
            means = {name: figures.mean for name, figures in evaluation.clients.items()}
            found = Evaluated(step=done, loss=evaluation.loss, metrics=evaluation.metrics, clients=means)
            self._callbacks.evaluation(found)

    def _step(self, line: RoundLine, done: int) -> StepDone:
        samples = sum(timed.samples for one in line.record.trained.values() for timed in one)
        busy = line.busy_s()
        return StepDone(
            step=done,
            steps=self._job.federated.rounds,
            loss=None,
            heldout_loss=self._heldout_loss,
            step_s=line.seconds,
            samples_per_s=samples / line.seconds if line.seconds else None,
            busy={name: min(1.0, busy_s / line.seconds) for name, busy_s in busy.items()} if line.seconds else {},
            sent_bytes=line.sent_bytes + line.received_bytes,
            devices=tuple(busy),
            round=line.record,
            run=self._folder,
        )
