"""The events of a callback: one struct per method."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import msgspec

from isthmus.figures import StepFigures
from isthmus.plans import Plan
from isthmus.programs.open_phase import RoundRecord
from isthmus.units import format_metric, format_metrics

Unit = Literal["step", "round"]
Ended = Literal["done", "stopped", "interrupted", "lost", "diverged", "failed"]


def _nothing(reason: str = "", /) -> None: ...


class RunStarted(msgspec.Struct, frozen=True, kw_only=True):
    """A session of a run begins: its plan is made and its folder is written.

    >>> RunStarted(run=Path("runs/first"), kind="pipeline", steps=10).first_step
    0
    """

    run: Path  # The run's folder.
    kind: Literal["pipeline", "federated"]
    steps: int  # Optimizer steps, or federated rounds, of the whole run.
    first_step: int = 0  # Steps that were done before: more than 0 in a resumed run.
    settings: Mapping[str, object] = {}  # The job, table by table, with its defaults.
    metrics: tuple[str, ...] = ()  # Names of the job's metrics.
    lower_is_better: frozenset[str] = frozenset({"loss"})  # Those, and the loss, of which low values are good.
    plan: Plan | None = None  # None in a federated run.
    stop: Callable[..., None] = _nothing
    """Ends the run with a checkpoint; the outcome is `stopped`. One argument is the reason, in words. May be called
    later too, from any thread."""


class StepDone(StepFigures, frozen=True, kw_only=True):
    """An optimizer step, or a federated round, is done.

    >>> StepDone(step=3, steps=10, loss=0.5, learning_rates=(0.01,)).learning_rates
    (0.01,)
    """

    step: int  # Steps done, this one included.
    steps: int  # Steps of the whole run.
    unit: Unit = "step"  # The thing that is counted.
    heldout_loss: float | None = None  # The latest since the run began or was resumed; None before an evaluation.
    learning_rates: tuple[float, ...] = ()  # Rates of this step, in the order of the job's `[[optimizer]]` tables.
    busy: Mapping[str, float] = {}  # Share of the step that each device or executor computed, 0 to 1.
    link_bytes: Mapping[tuple[str, str], int] = {}  # Bytes that this step sent, by (source, target).
    devices: tuple[str, ...] = ()  # Devices of the plan in force, or executors that trained.
    period: int = 1  # Steps between two averagings of the plan's replicas; 1: after every step.
    plan_epoch: int = 0  # Rises whenever the run goes on after a lost device or with another plan.
    text: str = ""  # More that is to be said of the step, as why an update was refused.
    round: RoundRecord | None = None
    """Federated runs: which clients trained where, which updates were refused or missing."""
    run: Path = Path()  # The run's folder.


class Evaluated(msgspec.Struct, frozen=True, kw_only=True):
    """The model was evaluated on held-out samples.

    >>> Evaluated(step=20, loss=0.4, metrics={"accuracy": 0.9}).metrics["accuracy"]
    0.9
    """

    step: int  # Steps or rounds done.
    loss: float | None  # None in a federated run without held-out samples.
    unit: Unit = "step"
    metrics: Mapping[str, float | None] = {}  # The job's metrics by name; None of one that counted nothing.
    clients: Mapping[str, float] = {}
    """The mean of `loss` and of each metric of a federated run over clients or sites, each on its own data."""

    def __str__(self) -> str:
        if self.loss is None:
            return ", ".join(
                f"clients' own {name} {format_metric(name, value)}" for name, value in self.clients.items()
            )
        return f"held-out loss {self.loss:.4f}{format_metrics(self.metrics)}"


class RunFault(msgspec.Struct, frozen=True, kw_only=True):
    """Something that is no step changed the run.

    >>> RunFault(step=7, kind="lost", device="laptop-1", text="its process was killed by SIGKILL").device
    'laptop-1'
    """

    step: int  # Steps done; of `back`, the step after which the run goes on.
    kind: Literal["lost", "joined", "left", "plan", "back", "refused", "note"]
    """`plan`: another plan is in force. `back`: later steps are void and are made again. `refused`: a federated update
    was not accepted. `note`: of a federated run, a line for people, as of a lost executor."""
    device: str = ""
    text: str = ""  # In words; empty where the kind says it all.
    plan: Plan | None = None  # The new plan, for the kind `plan`.

    def __str__(self) -> str:
        words = {"plan": "another plan", "back": f"back to step {self.step}", "note": ""}
        what = " ".join(filter(None, (words.get(self.kind, self.kind), self.device)))
        return ": ".join(filter(None, (what, self.text)))


class RunEnded(msgspec.Struct, frozen=True, kw_only=True):
    """The session is over, for whatever reason.

    >>> RunEnded(run=Path("runs/first"), outcome="done").reason
    ''
    """

    run: Path  # The run's folder.
    outcome: Ended
    """Ends as in exit codes: done and stopped 0, interrupted 130, lost 4, diverged and failed 1 or 2. `stopped`: a
    callback asked for it."""
    reason: str = ""  # Empty where it went well; of `stopped`, the callback and its reason.
    pictures: Mapping[str, Path] = {}  # PNG files that are there, by name, as `plan`, `timeline`, `loss`, `metrics`.
