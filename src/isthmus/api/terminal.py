"""A run in a terminal: progress on one console, results on another."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import TextIO

import msgspec
from rich.console import Console
from rich.text import Text

from isthmus.api.consoles import LOG_WIDTH
from isthmus.api.observer import Observer, Search, StepDone
from isthmus.api.run import Run
from isthmus.callbacks import Evaluated
from isthmus.disclosure import PrivacySpent
from isthmus.fleet import Fleet
from isthmus.graph import OpGraph
from isthmus.plans import Plan
from isthmus.report import PlanningProgress, Progress, comparison_table, memory_table, plan_table
from isthmus.report.rounds_table import last_figures, rounds_table
from isthmus.sanitize import sanitize
from isthmus.units import format_metrics


def logged(file: TextIO) -> Terminal:
    """Writes a job's log."""
    console = Console(file=file, width=LOG_WIDTH, markup=False)
    return Terminal(console, console)


class Terminal(Observer):
    """With `json` no result is printed: `document` is the one to write."""

    def __init__(self, out: Console, notes: Console, *, json: bool = False) -> None:
        self._out, self._notes, self._json = out, notes, json
        self._progress: Progress | None = None
        self.document: object = None

    def note(self, text: str) -> None:
        if self._progress is not None:
            self._progress.note(text)
        else:
            self._notes.print(text, highlight=False, markup=False, soft_wrap=True)

    def search(self) -> AbstractContextManager[Search]:
        return PlanningProgress(self._notes)

    def planned(self, plan: Plan, fleet: Fleet, graph: OpGraph) -> None:
        (self._notes if self._json else self._out).print(plan_table(plan, fleet, graph))

    def began(self, heading: str) -> None:
        self._progress = Progress(self._notes, heading)
        self._progress.__enter__()

    def ended(self) -> None:
        if self._progress is not None:
            self._progress.__exit__(None, None, None)
        self._progress = None

    def stepped(self, done: StepDone) -> None:
        if self._progress is not None:
            self._progress.step(done)

    def evaluated(self, found: Evaluated) -> None:
        if self._progress is not None:
            self._progress.evaluated(found)

    def saved(self, step: int, directory: Path) -> None:
        self.note(f"checkpoint of step {step}: {directory}")

    def reported(self, run: Run) -> None:
        if self._json:
            self.document = run_document(run, finished=True)
            return
        summary, heldout, rounds, privacy = run.comparison, run.heldout, run.rounds, run.privacy
        if summary is not None:
            self._out.print(comparison_table(summary))
            if summary.memory:
                self._out.print(memory_table(summary.memory))
        if rounds:
            self._out.print(rounds_table(rounds))
            for text in last_figures(rounds, privacy, of_sites=run.job.has_sites):
                self._out.print(Text(sanitize(text)))
        if isinstance(privacy, PrivacySpent):
            self._out.print(f"local privacy of each sample: {privacy}", highlight=False)
        if heldout and not rounds:
            last = heldout[-1]
            loss = float("nan") if last.loss is None else last.loss
            metrics = format_metrics(last.metrics)
            self._out.print(
                f"held-out loss {loss:.4f} {run.loss_unit}{metrics} after {last.step} steps", highlight=False
            )
        self._out.print(f"run folder: {run.path}", highlight=False)


def run_document(run: Run, *, finished: bool) -> dict[str, object]:
    """A run as JSON has it; of a session that is not `finished`, the losses alone."""
    losses, heldout, rounds = run.losses, run.heldout, run.rounds
    document: dict[str, object] = {
        "run": str(run.path),
        "loss": losses[-1].loss if losses else None,
        "heldout_loss": heldout[-1].loss if heldout else None,
        "metrics": heldout[-1].metrics if heldout else {},
        "comparison": msgspec.to_builtins(run.comparison) if finished else None,
    }
    spent = run.privacy if finished else None
    if rounds:
        document |= {"rounds": len(rounds), **msgspec.to_builtins({"evaluation": run.evaluation, "privacy": spent})}
    elif isinstance(spent, PrivacySpent):
        shown = ("delta", "epsilon", "heldout_epsilon", "by_epoch")
        document["privacy"] = {name: getattr(spent, name) for name in shown}
    return document
