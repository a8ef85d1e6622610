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

from isthmus.callbacks import Evaluated, StepDone
from isthmus.figures import figures_of, figures_text
from isthmus.sanitize import sanitize
from isthmus.units import format_duration, format_size

MOST_DEVICES, MOST_LINKS = 6, 3
LEAST_SHARE = 0.01  # share of the busiest link: a link that carries less carries only short messages, and is not shown
PLAIN_EVERY = 5.0, 0.1  # seconds, and the share of all steps


class Progress:
    """A context manager that gets every step or round; it decides what of that is worth showing, and when.

    On a terminal the view stays in place at the bottom, and notes scroll past above it. Elsewhere a line is written
    for the first and the last step, and between them whenever 5 s or a tenth of the steps went by, and the same of
    evaluations: no escape sequences, no carriage returns. Its methods may be called by several threads.
    """

    def __init__(self, console: Console, heading: str, clock: Callable[[], float] = time.monotonic) -> None:
        """`heading` is shown until the first step is done."""
        self._console = console
        self._clock = clock
        self._live = still_live(console)
        self._heading = heading
        self._bar = _bar(console)
        self._task: rich.progress.TaskID | None = None
        self._first: tuple[int, float] | None = None
        """The first step, and when it ended: what came before it was no step."""
        self._done: StepDone | None = None
        self._held_out: Evaluated | None = None
        self._written: dict[str, tuple[float, int]] = {}
        """When the last line of each sort was written, and of which step."""

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
            self._live.update(Text(f"{self._heading}: waiting for the first step"), refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._show()
            self._live.stop()

    def step(self, done: StepDone) -> None:
        self._done, now_s = done, self._clock()
        if self._first is None:
            self._first = done.step, now_s
        last = done.step == done.steps
        if self._live is not None:
            if last or self._due("live", done, now_s, (REFRESH_S, 1.0)):
                self._show()
        elif last or self._due("steps", done, now_s):
            self._line(", ".join([*_facts(done), *self._left(done, now_s)]))

    def evaluated(self, found: Evaluated) -> None:
        """Held-out figures after `found.step` steps, and those of clients."""
        self._held_out, done = found, self._done
        if done is None or found.step == done.steps or self._due("evaluations", done, self._clock()):
            self._line(f"{found.unit} {found.step}: {found}")
        if self._live is not None and done is not None:
            self._show()

    def note(self, text: str) -> None:
        """Say something now, on a line of its own."""
        self._line(text)

    def _due(self, sort: str, done: StepDone, now_s: float, every: tuple[float, float] = PLAIN_EVERY) -> bool:
        every_s, share = every
        at_s, step = self._written.get(sort, (float("-inf"), 0))
        due = now_s - at_s >= every_s or done.step - step >= share * done.steps
        if due:
            self._written[sort] = now_s, done.step
        return due

    def _left(self, done: StepDone, now_s: float) -> list[str]:
        first, at_s = self._first or (0, 0.0)
        if not first < done.step < done.steps:
            return []
        return [f"{format_duration((now_s - at_s) / (done.step - first) * (done.steps - done.step))} left"]

    def _show(self) -> None:
        done, live = self._done, self._live
        if done is None or live is None:
            return
        if self._task is None:
            self._task = self._bar.add_task(done.unit, total=done.steps)
        self._bar.update(self._task, completed=done.step, total=done.steps)
        facts = _facts(done)[1:]
        if (e := self._held_out) is not None:
            facts.append(f"{e} ({e.unit} {e.step})")
        lines = [
            Text(sanitize(line), no_wrap=True, overflow="ellipsis")
            for line in (", ".join(facts), _busy_text(done.busy), _links_text(done.link_bytes))
            if line
        ]
        live.update(Group(self._bar, *lines), refresh=True)

    def _line(self, text: str) -> None:
        self._console.print(Text(sanitize(text)), soft_wrap=True, highlight=False)


def _bar(console: Console) -> rich.progress.Progress:
    return rich.progress.Progress(
        rich.progress.TextColumn("{task.description} {task.completed:.0f}/{task.total:.0f}"),
        rich.progress.BarColumn(bar_width=None),
        rich.progress.TextColumn("{task.percentage:.0f} %"),
        rich.progress.TimeRemainingColumn(),
        rich.progress.TextColumn("left"),
        console=console,
        expand=True,
    )


def _facts(done: StepDone) -> list[str]:
    return [f"{done.unit} {done.step}/{done.steps}", *figures_text(figures_of(done)), *filter(None, (done.text,))]


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


QUIET_S = 2.0  # a search that ends within that says nothing
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
    """Return whether a view may stay in place; elsewhere plain lines are written."""
    return console.is_terminal and console.is_interactive


def still_live(console: Console) -> Live | None:
    """A view that changes when it is updated, without a thread of its own and without taking over standard error, for
    processes are forked while it is shown; None where nothing stays in place."""
    if not is_watched(console):
        return None
    return Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False)
