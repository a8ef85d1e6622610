"""Planning under a person's eyes: progress on standard error, and Ctrl-C ends it with the best plan so far."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

from rich.console import Console

from isthmus.planners import INTERRUPTED, cut_short, observed_by
from isthmus.report import PlanningProgress
from isthmus.runtime.processes.interrupting import interruptible


@contextlib.contextmanager
def shown(notes: Console) -> Generator[None]:
    """All planning inside shows its progress; Ctrl-C is as ever."""
    with PlanningProgress(notes) as progress, observed_by(progress):
        yield


@contextlib.contextmanager
def interruptible_planning(notes: Console) -> Generator[None]:
    """The first Ctrl-C inside ends planning with the best plan so far, a second one ends the command.

    A solver that is at work in C ends its call first: its work is limited.
    """
    with PlanningProgress(notes) as progress, observed_by(progress):
        with interruptible(progress.end):
            yield
        interrupted = cut_short()
    if interrupted:
        notes.print(INTERRUPTED, highlight=False, soft_wrap=True)
