"""A training run, by its folder; and the trace of its sessions, in one file for a viewer."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from torch import nn

import isthmus
from isthmus import api
from isthmus.api.folder import RunFolder
from isthmus.api.notebook import picture_of, table_of
from isthmus.api.observer import Observer
from isthmus.api.run_entries import LossPoint, run_entries, run_state
from isthmus.combinations import refused
from isthmus.data.description import DataDescription
from isthmus.disclosure import PrivacySpent
from isthmus.errors import UserError, unknown_name
from isthmus.federated.admission import Guarantee
from isthmus.federated.evaluation import Evaluation, RoundHistory, RoundLine
from isthmus.federated.job import FederatedJob
from isthmus.figures import FIGURES
from isthmus.fleet import Fleet
from isthmus.job import Job
from isthmus.models.registry import WithLoss
from isthmus.plans import Plan, PlanPeriod
from isthmus.reading import read_json
from isthmus.report import ComparisonSummary, run_summary
from isthmus.report.rounds_table import ReplicasTraced
from isthmus.run_files import CLIENT_NAMES, stop_reason
from isthmus.run_files import read_json as read_document
from isthmus.runtime.decoupled.merged_run import MergeLine, merges_file
from isthmus.runtime.processes.signals import Stop
from isthmus.trace import Trace, write_perfetto
from isthmus.training.checkpoint import newest_checkpoint
from isthmus.units import format_metrics


class SessionTraced(msgspec.Struct, frozen=True):
    """One session of a run in the file for the viewer."""

    folder: str
    first_step: int  # the first step that it could make, counted from 1
    last_step: int
    outcome: str  # empty where it works, or was killed
    start_s: float  # since the first session began

    def __str__(self) -> str:
        steps = f"steps {self.first_step} to {self.last_step}" if self.last_step >= self.first_step else "no step"
        return f"{self.folder}: {steps}, {self.outcome or 'killed or at work'}, from {self.start_s:.1f} s"


class Traced(NamedTuple):
    perfetto: Path  # for ui.perfetto.dev
    found: ComparisonSummary | list[RoundLine] | ReplicasTraced | None
    """How well the newest session was predicted: None where it was killed or made no step. Of a federated run its
    rounds, of decoupled replicas what each did."""
    notes: list[str]  # damage that was found while reading
    sessions: tuple[SessionTraced, ...] = ()  # those of a run that was resumed, in their order


def write_trace(run: Path) -> Traced:
    """A Perfetto trace of what was predicted and what was measured, in the run's folder. UserError for a run without
    one."""
    folder = RunFolder.existing(run)
    return api.run_job.program_of(folder.any_job()).traced(folder)


def trace_sessions(
    folder: RunFolder, found: Callable[[RunFolder], ComparisonSummary | ReplicasTraced | None]
) -> Traced:
    """Write the sessions of a run one after another, each when it began; `found` is asked of the newest. UserError
    where no session left a trace."""
    sessions, told, traces, end_s, first_s = folder.traced_sessions(), list[SessionTraced](), list[Trace](), 0.0, 0.0
    for session in sessions:
        entries = run_entries(session.path)
        at = max((n for n, entry in enumerate(entries) if entry.kind == "began"), default=len(entries))
        began_s = entries[at].at_s if at < len(entries) else first_s
        first_s = first_s or began_s
        start_s, state = max(end_s, began_s - first_s), run_state(entries[at:])
        here = [later(trace, start_s) for trace in session.traces()]
        end_s = max((span.end_s for trace in here for span in trace.spans), default=start_s)
        traces += here
        first = entries[at].step + 1 if at < len(entries) else 1
        told.append(SessionTraced(str(session.path), first, state.done, state.outcome, start_s))
    write_perfetto(traces, folder.perfetto)
    return Traced(folder.perfetto, found(sessions[-1]), [], tuple(told) if len(told) > 1 else ())


def compared(session: RunFolder) -> ComparisonSummary | None:
    """Return how well a session of a pipeline was predicted; None where it left no prediction, or made no step."""
    if len(traces := session.traces()) < 2:
        return None
    predicted, measured = traces
    summary = run_summary(predicted, measured, session.periods())
    if summary is not None and session.summary.is_file():
        kept = read_json(session.summary, ComparisonSummary)
        summary = msgspec.structs.replace(summary, too_slow=kept.too_slow)
    return summary


def later(trace: Trace, seconds: float) -> Trace:
    """Return the trace as if it had begun so much later."""
    if not seconds:
        return trace
    replace = msgspec.structs.replace
    moved = (replace(span, start_s=span.start_s + seconds, end_s=span.end_s + seconds) for span in trace.spans)
    return replace(trace, spans=tuple(moved))


PICTURES = ("plan", "timeline", "loss", "metrics", "round", "paces")


class Run:
    """A run of any program: its settings and its results. Each property reads the run folder when it is used.

    UserError for a folder that is not there or holds no run. A property of a program that the run is not of is empty or
    None, and `fleet` and `plan` raise UserError.

    >>> run = isthmus.Run(finished)
    >>> run.outcome, len(run.losses), run.losses[-1].step
    ('done', 4, 4)
    >>> rounds = isthmus.Run(federated)
    >>> rounds.outcome, len(rounds.rounds), rounds.heldout[-1].loss > 0
    ('done', 2, True)
    """

    def __init__(self, path: str | Path, outcome: str | None = None) -> None:
        self._folder = RunFolder.existing(Path(path))
        self._outcome = outcome

    @property
    def path(self) -> Path:
        """The run folder."""
        return self._folder.path

    @property
    def job(self) -> Job | FederatedJob:
        """Return the job as it was run: with what was overridden."""
        return self._folder.any_job()

    @property
    def fleet(self) -> Fleet:
        """Return the fleet as the job states it."""
        return self._folder.fleet()

    @property
    def fitted_fleet(self) -> Fleet | None:
        """The fleet as the run's steps showed it; None before a second step under one plan."""
        return self._folder.fitted()

    @property
    def plan(self) -> Plan:
        """The newest session's first one; `plans` has those that followed."""
        return self._folder.plan()

    @property
    def plans(self) -> tuple[PlanPeriod, ...]:
        """The plans of the newest session, each with the step and the second since which it was in force."""
        return self._folder.periods()

    @property
    def losses(self) -> list[LossPoint]:
        """Training losses, a point per optimizer step."""
        return [point for point in self._folder.losses() if point.split == "train"]

    @property
    def heldout(self) -> list[LossPoint]:
        """Losses of held-out samples, a point per evaluation."""
        return [point for point in self._folder.losses() if point.split == "heldout"]

    @property
    def loss_unit(self) -> str:
        """The unit of both losses: "nats per byte", "nats per token" or "nats per sample"."""
        described = self._folder.described()
        return loss_unit(self._folder.job(), next(iter(described.values()))) if described else "nats per sample"

    def figure(self, name: str) -> list[tuple[int, float]]:
        """Return (step, value) of a number of the steps or rounds, by its field in `isthmus.StepDone`. Of steps that
        came within half a second the last is on record. UserError for no such number.

        >>> [step for step, _ in isthmus.Run(federated).figure("clients")][-1]
        2
        """
        if name not in FIGURES:
            raise unknown_name("figure", name, FIGURES)
        entries = (entry for entry in run_entries(self.path) if name in entry.figures)
        return [(entry.step, entry.figures[name]) for entry in entries]

    @property
    def trace(self) -> Trace:
        """The trace of the newest session, in seconds since its first step began; of a federated run, of all rounds.
        UserError for a run that has none."""
        return api.run_job.program_of(self.job).trace(self._folder)

    @property
    def predicted(self) -> Trace:
        """The simulator's trace of the same plans. UserError of decoupled replicas, which share no plan."""
        return self._folder.predicted()

    @property
    def comparison(self) -> ComparisonSummary | None:
        """Predictions beside measurements; None where no step was finished."""
        path = self._folder.summary
        return read_json(path, ComparisonSummary) if path.is_file() else None

    @property
    def rounds(self) -> list[RoundLine]:
        """The outcome of each committed round: who took part, seconds, bytes, evaluation. Of a federated run."""
        return RoundHistory.of(self.path).lines()

    @property
    def merges(self) -> list[MergeLine]:
        """Return who contributed to each merge, and when. Of decoupled replicas."""
        return merges_file(self.path).lines()

    @property
    def client_names(self) -> list[str]:
        """The names of clients by number, as of files or of a mapping; empty where the data do not name them."""
        return read_document(self.path / CLIENT_NAMES, list[str]) or []

    @property
    def evaluation(self) -> Evaluation | None:
        """The newest: loss and metrics on held-out samples, and of a federated run's clients; None before any."""
        of_rounds = next((line.evaluation for line in reversed(self.rounds) if line.evaluation is not None), None)
        if of_rounds is not None or not (heldout := self.heldout):
            return of_rounds
        return Evaluation(loss=heldout[-1].loss, metrics=heldout[-1].metrics)

    @property
    def privacy(self) -> PrivacySpent | Guarantee | None:
        """The privacy of samples that messages spent, or that a private job promises; None without noise."""
        return api.run_job.program_of(self.job).privacy(self._folder)

    @property
    def checkpoint(self) -> Path | None:
        """The newest that is complete; None where none was saved, and of a federated run."""
        return newest_checkpoint(self._folder.checkpoints)

    @property
    def model(self) -> nn.Module:
        """With the newest checkpoint's weights, or the server's after the last committed round; of one that was given
        beside a loss, without it."""
        found, _ = api.run_job.program_of(self.job).trained(self._folder)
        return found.model if isinstance(found, WithLoss) else found

    @property
    def pictures(self) -> dict[str, Path]:
        """PNG files that are there: `plan`, `timeline`, `loss` and `metrics`; of rounds `metrics`, `round`, `paces`."""
        paths = {name: self.path / f"{name}.png" for name in PICTURES}
        return {name: path for name, path in paths.items() if path.is_file()}

    @property
    def outcome(self) -> str:
        """`done`; `stopped` where a callback ended it, or `interrupted`, where steps or rounds are left to do."""
        if self._outcome is not None:
            return self._outcome
        return "done" if self._folder.is_done else "stopped" if self.reason else "interrupted"

    @property
    def reason(self) -> str:
        """The callback that stopped the run, and why; empty for any other outcome."""
        return stop_reason(self.path)

    def resume(
        self,
        *,
        steps: int | None = None,
        overrides: Mapping[str, object] = {},
        observer: Observer | None = None,
        stop: Stop | None = None,
    ) -> Run:
        """Continue from the newest checkpoint. Losses and weights are those of a run that never stopped.

        `steps` is the number of steps or rounds at the end, those that are done included; by default what the job
        says. The other arguments, and the errors, are those of `isthmus.train`. A run of Python objects continues in
        the process that gave them; another process calls `isthmus.train(model=..., run=..., resume=True)`.

        >>> isthmus.Run(interrupted).resume(steps=5).losses[-1].step
        5
        """
        job, where = self.job, self.path
        changed = overrides if steps is None else {**overrides, job.LENGTH: steps}
        return isthmus.train(job, run=where, resume=True, overrides=changed, observer=observer, stop=stop)

    def load(self, model: nn.Module) -> int:
        """Put the newest weights into a module like the run's. Returns the steps or rounds that were done. UserError
        where nothing was saved, or the weights are another module's.

        >>> run.load(copy.deepcopy(model))
        4
        """
        return api.run_job.program_of(self.job).load(self._folder, model)

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    def _repr_html_(self) -> str:
        """Return HTML for a notebook: figures, and the pictures inline."""
        state = run_state(run_entries(self.path))
        rows = {"run": str(self.path), "outcome": self.outcome, f"{state.unit}s": f"{state.done}"}
        for name, points in (("loss", self.losses), ("held-out loss", self.heldout)):
            if points and points[-1].loss is not None:
                rows[name] = f"{points[-1].loss:.4f} {self.loss_unit}{format_metrics(points[-1].metrics)}"
        if (found := self.comparison) is not None:
            rows["step"] = f"{found.measured_step_s:.3g} s, predicted {found.predicted_step_s:.3g} s"
        return table_of(rows) + "".join(map(picture_of, self.pictures.values()))


def loss_unit(job: Job, samples: DataDescription) -> str:
    labels = samples.columns.get("labels")
    if "input_ids" not in samples.columns or labels is None or not labels.shape:
        return "nats per sample"
    return "nats per byte" if job.data.options.get("tokenizer", "bytes") == "bytes" else "nats per token"


def finite_points(points: Sequence[LossPoint]) -> list[tuple[int, float]]:
    """(step, loss), with NaN for a loss that is not a number."""
    return [(p.step, float("nan") if p.loss is None else p.loss) for p in points]


def calibrated(run: str | Path) -> Fleet:
    """The run's fleet with what its steps showed. UserError where nothing was measured."""
    folder = RunFolder.existing(Path(run))
    folder.check_kind("pipeline")
    if folder.job().sync.mode == "decoupled":
        raise refused("calibrate", "decoupled", f"run folder {folder.path}")
    found = Run(run).fitted_fleet
    if found is None:
        raise UserError(f"run folder {run}: nothing was measured: it takes a second step under one plan")
    return found


def draw_metrics(folder: RunFolder) -> None:
    """Metrics over the steps; nothing where the job has none."""
    evaluated = [(p.step, Evaluation(loss=None, metrics=p.metrics)) for p in folder.losses() if p.metrics]
    if evaluated:
        pictures = importlib.import_module("isthmus.report.timeline")  # with matplotlib, for half a second
        pictures.draw_evaluations(evaluated, folder.metrics_picture, axis="step")
