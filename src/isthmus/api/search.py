"""Planning in a thread of its own, watched: a wish to stop ends it with the best plan so far."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import copy_context
from typing import TypeVar

from isthmus.api.observer import Observer
from isthmus.planners import INTERRUPTED, cut_short, observed_by
from isthmus.runtime.processes.signals import ComputeThreads, Stop

Planned = TypeVar("Planned")

TICK_S = 0.1
AT_ONCE_S = 1.0  # how long a planner that is to end without a plan may take for it


def searched(observer: Observer, stop: Stop, act: Callable[[], Planned], *, best_so_far: bool = False) -> Planned:
    """Return what `act` makes; all planning inside it is reported to the observer. Interrupted where that is to stop;
    with `best_so_far` only where the planner never looks up: else planning ends with the best plan so far.

    It plans in a thread: a solver in C holds up neither the progress nor Ctrl-C.
    """
    ending = False
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

        computing = ComputeThreads()
        try:
            with stop.calls(lambda: None):
                computing.start(plan, "planning")
                while not over.wait(TICK_S):
                    search.show()
                    if stop.requested and not ending:
                        ending = best_so_far and search.end()
                        if not ending:
                            stop.check()
        except KeyboardInterrupt:
            computing.end(AT_ONCE_S)
            raise
        interrupted = cut_short()
    if failed:
        raise failed[0]
    if interrupted:
        observer.note(INTERRUPTED)
    return done[0]
