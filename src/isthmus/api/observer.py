"""An observer gets the events of a call while it works."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from contextvars import copy_context
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TextIO, TypeVar

from isthmus.callbacks import Evaluated, StepDone
from isthmus.fleet import Fleet
from isthmus.graph import OpGraph
from isthmus.planners import INTERRUPTED, SearchObserver, cut_short, observed_by
from isthmus.plans import Plan
from isthmus.runtime.processes.signals import ComputeThreads, Stop

if TYPE_CHECKING:
    from isthmus.api.run import Run


class Search(SearchObserver, Protocol):
    """A search for a plan, as it is watched."""

    def end(self) -> bool:
        """End it with the best plan so far. False where the planner was never heard of, and cannot."""
        ...

    def show(self) -> None:
        """Called now and then, by another thread than the planner's: that may be in a solver."""


class Observer(Protocol):
    """Every method does nothing: a class derived from this one overrides those that it needs.

    >>> from isthmus.api.observer import Observer, StepDone
    >>> class Losses(Observer):
    ...     def __init__(self) -> None:
    ...         self.seen: list[float | None] = []
    ...
    ...     def stepped(self, done: StepDone) -> None:
    ...         self.seen.append(done.loss)
    >>> losses = Losses()
    >>> losses.stepped(StepDone(step=1, steps=2, loss=0.5))
    >>> losses.seen
    [0.5]
    """

    def note(self, text: str) -> None:
        """One line for a person: a device that was lost, a checkpoint, a warning."""

    def search(self) -> AbstractContextManager[Search]:
        """A planner begins."""
        return _unwatched()

    def planned(self, plan: Plan, fleet: Fleet, graph: OpGraph) -> None:
        """A run is to follow this plan."""

    def began(self, heading: str) -> None:
        """Devices start to work: `heading` says on what."""

    def stepped(self, done: StepDone) -> None:
        """An optimizer step or a round is done. Of a round called in another thread."""

    def evaluated(self, found: Evaluated) -> None:
        """The model was evaluated."""

    def saved(self, step: int, directory: Path) -> None:
        """A checkpoint is complete."""

    def went_back(self, step: int) -> None:
        """A device was lost: the run goes on after this step, and reports of later steps are void."""

    def ended(self) -> None:
        """Devices work no more, for whatever reason."""

    def reported(self, run: Run) -> None:
        """The run's folder is complete."""


class Silent(Observer):
    """Tells nobody."""


class Written(Observer):
    """Writes a line for each thing that a person may want to know.

    >>> import sys
    >>> Written(sys.stdout).evaluated(Evaluated(step=3, loss=0.5))
    step 3: held-out loss 0.5000
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def note(self, text: str) -> None:
        print(text, file=self._file, flush=True)

    def stepped(self, done: StepDone) -> None:
        self.note(f"{done.unit} {done.step}/{done.steps}" + ("" if done.loss is None else f", loss {done.loss:.4f}"))

    def evaluated(self, found: Evaluated) -> None:
        self.note(f"{found.unit} {found.step}: {found}")

    def saved(self, step: int, directory: Path) -> None:
        self.note(f"checkpoint of step {step}: {directory}")


class Unwatched(Search):
    """A search that nobody watches, and that can be ended all the same."""

    def __init__(self) -> None:
        self._looks, self._ending = False, False

    def planning(self, name: str) -> None:
        self._looks = False

    def looked_at(self, candidates: int) -> None:
        self._looks = True

    def stopped(self) -> bool:
        return self._ending

    def end(self) -> bool:
        self._ending = self._looks
        return self._looks


@contextlib.contextmanager
def _unwatched() -> Generator[Search]:
    yield Unwatched()


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
