"""Planning and training as they go, for people, on standard error: a live view on a terminal, occasional plain lines
elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Self

import rich.progress
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from isthmus.plans import Plan
from isthmus.sanitize import sanitize
from isthmus.units import format_duration, format_metrics, format_size

MOST_DEVICES, MOST_LINKS = 6, 3
LEAST_SHARE = 0.01
"""Share of the busiest link: a link that carries less carries only short messages, and is not shown."""
PLAIN_EVERY_S = 5.0
PLAIN_SHARE = 0.1


class Progress:
    """A context manager that gets every step; it decides what of that is worth showing, and when.

    On a terminal the view stays in place at the bottom, and notes scroll past above it. Elsewhere a line is written
    for the first and the last step, and between them whenever 5 s or a tenth of the steps went by: no escape
    sequences, no carriage returns.
    """

    def __init__(self, console: Console, plan: Plan | str, clock: Callable[[], float] = time.monotonic) -> None:
        """`plan` heads the live view: a plan, or what is said in place of it."""
        self._console = console
        self._clock = clock
        self._live = _View(console, plan if isinstance(plan, str) else _heading(plan)) if is_watched(console) else None
        self._started_s = clock()
        self._first_step: int | None = None
        self._logged_s = float("-inf")
        self._logged_step = 0

    def __enter__(self) -> Self:
        self._started_s = self._clock()
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def step(
        self,
        step: int,
        steps: int,
        loss: float | None,
        *,
        tokens_per_s: float | None = None,
        samples_per_s: float | None = None,
        busy: Mapping[str, float] = {},
        link_bytes: Mapping[tuple[str, str], int] = {},
    ) -> None:
        """`step` of `steps` are done, this one included.

        `busy` is 0 to 1 by device; `link_bytes` is what this step sent, by (source, target).
        """
        speed = _speed(tokens_per_s, samples_per_s)
        if self._live is not None:
            self._live.step(step, steps, _loss(loss), speed, busy, link_bytes)
            return
        now_s = self._clock()
        if self._first_step is None:
            self._first_step = step
        due = now_s - self._logged_s >= PLAIN_EVERY_S or step - self._logged_step >= PLAIN_SHARE * steps
        if not due and step < steps:
            return
        self._logged_s, self._logged_step = now_s, step
        parts = [f"step {step}/{steps}", f"loss {_loss(loss)}", speed]
        if link_bytes:
            parts.append(f"{format_size(sum(link_bytes.values()))} sent")
        # The first step's end is the first time known: what came before it was no step.
        since = step - self._first_step
        if since == 0:
            self._started_s = now_s
        elif step < steps:
            parts.append(f"{format_duration((now_s - self._started_s) / since * (steps - step))} left")
        self._line(", ".join(part for part in parts if part))

    def validation(self, step: int, loss: float, metrics: Mapping[str, float | None] = {}) -> None:
        """The held-out loss and the metrics after `step` steps."""
        found = f"{_loss(loss)}{format_metrics(metrics)}"
        if self._live is not None:
            self._live.validation(step, found)
        self._line(f"step {step}: held-out loss {found}")

    def note(self, text: str) -> None:
        """Say something now, on a line of its own."""
        self._line(text)

    def _line(self, text: str) -> None:
        self._console.print(Text(sanitize(text)), soft_wrap=True, highlight=False)


class _View:
    """The live view: a bar of steps, then a line each for losses and speed, busy devices, and busy links."""

    def __init__(self, console: Console, heading: str) -> None:
        self._bar = rich.progress.Progress(
            rich.progress.TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            rich.progress.BarColumn(bar_width=None),
            rich.progress.TextColumn("{task.percentage:.0f} %"),
            rich.progress.TimeRemainingColumn(),
            rich.progress.TextColumn("left"),
            console=console,
            expand=True,
        )
        self._task: rich.progress.TaskID | None = None
        self._held_out = ""
        waiting = Text(f"{heading}: waiting for the first step")
        # Standard output is data, and stays where the caller sent it.
        self._live = Live(waiting, console=console, refresh_per_second=4, redirect_stdout=False)

    def start(self) -> None:
        self._live.start()

    def stop(self) -> None:
        self._live.stop()

    def step(
        self,
        step: int,
        steps: int,
        loss: str,
        speed: str,
        busy: Mapping[str, float],
        link_bytes: Mapping[tuple[str, str], int],
    ) -> None:
        if self._task is None:
            self._task = self._bar.add_task("steps", total=steps)
        self._bar.update(self._task, completed=step, total=steps)
        facts = ", ".join(fact for fact in (f"loss {loss}", self._held_out, speed) if fact)
        lines = [
            Text(line, no_wrap=True, overflow="ellipsis")
            for line in (facts, _busy_text(busy), _links_text(link_bytes))
            if line
        ]
        self._live.update(Group(self._bar, *lines))

    def validation(self, step: int, found: str) -> None:
        self._held_out = f"held out {found} (step {step})"


def _heading(plan: Plan) -> str:
    return f"{plan.model} on {plan.fleet}, {sum(len(r.stages) for r in plan.replicas)} stages"


def _busy_text(busy: Mapping[str, float]) -> str:
    """The busiest devices first."""
    ranked = sorted(busy.items(), key=lambda entry: -entry[1])
    shown = [f"{device} {share:.0%}" for device, share in ranked[:MOST_DEVICES]]
    return f"busy: {_listed(shown, len(ranked))}" if shown else ""


def _links_text(link_bytes: Mapping[tuple[str, str], int]) -> str:
    """The links that carry most, both directions together."""
    carried: dict[tuple[str, str], int] = {}
    for (source, target), size in link_bytes.items():
        ends = (min(source, target), max(source, target))
        carried[ends] = carried.get(ends, 0) + size
    ranked = sorted(carried.items(), key=lambda entry: -entry[1])
    used = [entry for entry in ranked if entry[1] >= LEAST_SHARE * ranked[0][1]]
    shown = [f"{first} <-> {second} {format_size(size)}" for (first, second), size in used[:MOST_LINKS]]
    return f"sent per step: {_listed(shown, len(used))}" if shown else ""


def _listed(shown: Sequence[str], count: int) -> str:
    return ", ".join([*shown, *([f"and {count - len(shown)} more"] if count > len(shown) else [])])


def _speed(tokens_per_s: float | None, samples_per_s: float | None) -> str:
    if tokens_per_s is not None:
        return f"{tokens_per_s:,.0f} tokens/s"
    return "" if samples_per_s is None else f"{samples_per_s:,.3g} samples/s"


def _loss(loss: float | None) -> str:
    return "-" if loss is None else f"{loss:.4f}"


QUIET_S = 2.0
"""A search that ends within that says nothing."""
REFRESH_S = 0.25
PLAN_AFTER_S, PLAN_EVERY_S = 5.0, 10.0


class PlanningProgress:
    """A context manager and an observer of planners: it says what is searched, how far it is and what was found.

    `end` asks the search to end. A planner that was never heard of cannot, which it says.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._clock = console, clock
        self._live = still_live(console)
        self._began_s = clock()
        self._due_s = self._began_s + (PLAN_AFTER_S if self._live is None else QUIET_S)
        self._planner, self._part = "", ""
        self._candidates = 0
        self._best_s: float | None = None
        self._heard = False
        self._ending = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def planning(self, name: str) -> None:
        self._planner, self._part = name, ""
        self._candidates, self._best_s, self._heard = 0, None, False

    def part(self, words: str) -> None:
        self._part = words

    def looked_at(self, candidates: int) -> None:
        self._heard = True
        self._candidates += candidates

    def found(self, step_s: float) -> None:
        self._best_s = step_s

    def stopped(self) -> bool:
        return self._ending

    def end(self) -> bool:
        self._ending = self._heard
        return self._heard

    def show(self) -> None:
        """Called now and then, by another thread than the planner's: that may be in a solver."""
        now_s = self._clock()
        if now_s >= self._due_s:
            self._due_s = now_s + (PLAN_EVERY_S if self._live is None else REFRESH_S)
            self._log(now_s)

    def _log(self, now_s: float) -> None:
        best = "no plan yet" if self._best_s is None else f"best step so far {format_duration(self._best_s)}"
        what = [part for part in (self._planner, self._part) if part]
        took = format_duration(now_s - self._began_s)
        facts = [f"planning: {self._candidates:,} plans tried", best, took, *(["ending"] if self._ending else [])]
        details = f" ({sanitize(', '.join(what))})" if what else ""
        text = Text(", ".join(facts), no_wrap=True, overflow="ellipsis")
        if self._live is None:
            self._console.print(text.append(details), soft_wrap=True, highlight=False)
            return
        self._live.start()  # nothing is shown of a search that ends sooner
        text.append("; Ctrl-C takes the best so far" if self._best_s is not None else "; Ctrl-C ends it", "dim")
        text.append(details, "dim")  # last: a narrow window cuts it
        self._live.update(text, refresh=True)


def is_watched(console: Console) -> bool:
    """Whether a view may stay in place; elsewhere plain lines are written."""
    return console.is_terminal and console.is_interactive


def still_live(console: Console) -> Live | None:
    """A view that changes when it is updated, without a thread of its own and without taking over standard error, for
    processes are forked while it is shown; None where nothing stays in place."""
    if not is_watched(console):
        return None
    return Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False)
