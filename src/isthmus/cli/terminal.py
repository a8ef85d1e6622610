"""What calls of the API tell, for people: progress on standard error, results on standard output."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec
from rich.console import Console
from rich.text import Text

from isthmus.api.federated_result import FederatedResult
from isthmus.api.federated_run import FederatedChoices, run_simulated
from isthmus.api.observer import Observer, Search, StepDone
from isthmus.api.pipeline import Choices, run_job
from isthmus.api.run import Run, is_federated_run
from isthmus.api.stop import Stop
from isthmus.cli.options import notes, out, print_json
from isthmus.errors import Interrupted, UserError
from isthmus.federated.history import RoundLine
from isthmus.federated.job import FederatedJob
from isthmus.fleet import Fleet
from isthmus.graph import OpGraph
from isthmus.job import Job
from isthmus.plans import Plan
from isthmus.report import PlanningProgress, Progress, comparison_table, memory_table, plan_overview
from isthmus.report.federated_progress import FederatedProgress, rounds_table


class Terminal(Observer):
    """With `json` standard output is left to JSON."""

    def __init__(self, out: Console, notes: Console, *, json: bool = False) -> None:
        self._out, self._notes, self._json = out, notes, json
        self._progress: Progress | None = None
        self._rounds: FederatedProgress | None = None
        self.reported_json = False

    def note(self, text: str) -> None:
        if (shown := self._progress or self._rounds) is not None:
            shown.note(text)
        else:
            self._notes.print(text, highlight=False, markup=False, soft_wrap=True)

    def search(self) -> AbstractContextManager[Search]:
        return PlanningProgress(self._notes)

    def planned(self, plan: Plan, fleet: Fleet, graph: OpGraph) -> None:
        (self._notes if self._json else self._out).print(plan_overview(plan, fleet, graph))

    def began(self, plan: Plan) -> None:
        self._progress = Progress(self._notes, plan)
        self._progress.__enter__()

    def ended(self) -> None:
        for shown in (self._progress, self._rounds):
            if shown is not None:
                shown.__exit__(None, None, None)
        self._progress = self._rounds = None

    def stepped(self, done: StepDone) -> None:
        if self._progress is not None:
            self._progress.step(
                done.step,
                done.steps,
                done.loss,
                tokens_per_s=done.tokens_per_s,
                samples_per_s=done.samples_per_s,
                busy=done.busy,
                link_bytes=done.link_bytes,
            )

    def evaluated(self, step: int, loss: float) -> None:
        if self._progress is not None:
            self._progress.validation(step, loss)

    def saved(self, step: int, directory: Path) -> None:
        self.note(f"checkpoint of step {step}: {directory}")

    def rounds_began(self, rounds: int) -> None:
        self._rounds = FederatedProgress(self._notes, rounds)
        self._rounds.__enter__()

    def round_done(self, line: RoundLine) -> None:
        if self._rounds is not None:
            self._rounds.round(line)

    def rounds_reported(self, result: FederatedResult) -> None:
        lines, last = result.rounds, result.evaluation
        if not lines:
            return
        if self._json:
            document = {"run": str(result.path), "rounds": len(lines), "evaluation": msgspec.to_builtins(last)}
            print_json(document)
            return
        self._out.print(rounds_table(lines))
        if last is not None:
            if last.loss is not None:
                accuracy = "" if last.accuracy is None else f", accuracy {last.accuracy:.1%}"
                done = f"after {lines[-1].record.round + 1} rounds"
                self._out.print(Text(f"held-out loss {last.loss:.4f}{accuracy} {done}"))
            if last.clients is not None:
                worst = f"worst tenth {last.clients.worst_decile:.1%}, deviation {last.clients.deviation:.1%}"
                self._out.print(Text(f"clients' own data: mean accuracy {last.clients.mean:.1%}, {worst}"))
        self._out.print(Text(f"run folder: {result.path}"))

    def reported(self, run: Run) -> None:
        if self._json:
            print_run(run, finished=True)
            self.reported_json = True
            return
        summary, heldout = run.comparison, run.heldout
        if summary is not None:
            self._out.print(comparison_table(summary))
            if summary.memory:
                self._out.print(memory_table(summary.memory))
        if run.privacy is not None:
            self._out.print(f"local privacy of each sample: {run.privacy}", highlight=False)
        if heldout:
            last = heldout[-1]
            loss = float("nan") if last.loss is None else last.loss
            self._out.print(f"held-out loss {loss:.4f} {run.loss_unit} after {last.step} steps", highlight=False)
        self._out.print(f"run folder: {run.path}", highlight=False)


def print_run(run: Run, *, finished: bool) -> None:
    """As JSON; of a session that is not `finished`, losses alone."""
    document: dict[str, object] = {
        "run": str(run.path),
        "loss": run.losses[-1].loss if run.losses else None,
        "heldout_loss": run.heldout[-1].loss if run.heldout else None,
        "comparison": msgspec.to_builtins(run.comparison) if finished else None,
    }
    if finished and (spent := run.privacy) is not None:
        document["privacy"] = {
            "delta": spent.delta,
            "epsilon": spent.epsilon,
            "heldout_epsilon": spent.heldout_epsilon,
            "by_epoch": spent.by_epoch,
        }
    print_json(document)


def show_training(job: Job, choices: Choices, *, json: bool) -> int:
    """The exit code."""
    return ended(lambda document: run_job(job, choices, document, Stop()), json=json)


def show_rounds(job: FederatedJob, choices: FederatedChoices, *, json: bool) -> int:
    """The exit code."""
    return ended(lambda document: run_simulated(job, choices, document, Stop()), json=json)


def ended(act: Callable[[Terminal], Run | FederatedResult], *, json: bool) -> int:
    """The exit code of a run."""
    document = Terminal(out(), notes(), json=json)
    try:
        run = act(document)
    except Interrupted as e:
        notes().print(str(e), highlight=False, soft_wrap=True)
        folder = None if e.folder is None else Path(e.folder)
        if json and folder is not None and not is_federated_run(folder):
            print_run(Run(folder), finished=False)
        return 130
    if json and not document.reported_json and isinstance(run, Run):
        print_run(run, finished=False)
    return 130 if run.outcome == "interrupted" else 0


def refuse_options(given: Mapping[str, object]) -> None:
    """Options of a pipeline's job say nothing here. UserError for the first that was given."""
    for name, value in given.items():
        if value is not None:
            raise UserError(f"{name}: got {value!r} for a federated job, expected none: see --scheme and --executors")
