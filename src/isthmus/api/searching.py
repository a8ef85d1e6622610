"""Planning in a thread of its own: what watches it shows its progress, and Ctrl-C ends it with the best plan so far."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from contextvars import copy_context
from typing import TypeVar

from isthmus.api.observing import Observer
from isthmus.planners import INTERRUPTED, cut_short, observed_by
from isthmus.runtime.processes.computing import Computing
from isthmus.runtime.processes.interrupting import interruptible

Planned = TypeVar("Planned")

TICK_S = 0.1
AT_ONCE_S = 1.0
"""How long a planner that is to end without a plan may take for it."""


def searched(observer: Observer, act: Callable[[], Planned], *, best_so_far: bool = False) -> Planned:
    """What `act` makes; all planning inside it is told to the observer. KeyboardInterrupt by Ctrl-C; with `best_so_far`
    only by a second one, or where the planner never looks up: the first ends planning with the best plan so far.

    It plans in a thread: a solver in C holds up neither the progress nor Ctrl-C.
    """
    done, failed = list[Planned](), list[BaseException]()
    over = threading.Event()  # not `join`: Ctrl-C in it makes Python take the thread for ended
    with observer.search() as search, observed_by(search):
        context = copy_context()

        def plan() -> None:
            try:
                done.append(context.run(act))
            except (Exception, SystemExit) as e:
                failed.append(e)
            finally:
                over.set()

        computing = Computing()
        try:
            with interruptible(search.end) if best_so_far else nullcontext():
                computing.start(plan, "planning")
                while not over.wait(TICK_S):
                    search.show()
        except KeyboardInterrupt:
            computing.end(AT_ONCE_S)
            raise
        interrupted = cut_short()
    if failed:
        raise failed[0]
    if interrupted:
        observer.note(INTERRUPTED)
    return done[0]
