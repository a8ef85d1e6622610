"""Callbacks that a job names, and all of a run together."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Literal, cast

import msgspec

from isthmus.callbacks.callback import Callback
from isthmus.callbacks.events import Evaluated, RunEnded, RunFault, RunStarted, StepDone
from isthmus.errors import Diverged, IsthmusError, PeerError, UserError, unknown_name
from isthmus.extensions import check_arguments, import_object, load_third_party, third_party

ENTRY_POINTS = "isthmus.callbacks"
METHODS = ("start", "step", "evaluation", "fault", "end")


class CallbackConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A callback of your own: a class derived from `isthmus.Callback`, or a function that returns such an object."""

    name: str  # `package.module:Class`, or a name registered under the entry-point group `isthmus.callbacks`.
    options: dict[str, object] = {}  # Its arguments.


def find_callback(config: CallbackConfig) -> Callable[[], object]:
    """Return the function that builds it. UserError for an unknown name and for options that it does not take."""
    owner = f"callback {config.name!r}"
    registered = third_party(ENTRY_POINTS)
    if config.name not in registered and ":" not in config.name:
        raise unknown_name("callback", config.name, [*registered, "package.module:Class"])
    entry = registered.get(config.name)
    found = load_third_party(entry) if entry is not None else import_object("callback", config.name)
    if not callable(found):
        raise UserError(f"{owner}: expected a class derived from isthmus.Callback, got {found!r:.80}")
    build: Callable[..., object] = found
    check_arguments("callback", config.name, build, config.options)
    return lambda: build(**config.options)


def check_callback(owner: str, found: object) -> Callback:
    """UserError for an object without one of the methods."""
    lacks = [name for name in METHODS if not callable(getattr(found, name, None))]
    if isinstance(found, type) or lacks:
        got = f"the class {found.__name__}" if isinstance(found, type) else f"{type(found).__name__} without {lacks[0]}"
        raise UserError(f"{owner}: got {got}, expected an object of a class derived from isthmus.Callback")
    return cast("Callback", found)


def build_callback(config: CallbackConfig) -> Callback:
    """UserError, also where its constructor raises."""
    owner = f"callback {config.name!r}"
    with _blamed(owner):
        found = find_callback(config)()
    return check_callback(owner, found)


class Callbacks:
    """Those of a run, called in their order and one call at a time. What one raises ends the run as the user's error,
    not ours."""

    def __init__(self, named: Sequence[tuple[str, Callback]]) -> None:
        self._named = tuple(named)
        self._calling = threading.RLock()  # notes of a federated run come from another thread than its rounds
        self._started = False

    def start(self, started: RunStarted) -> None:
        self._started = True
        for name, one in self._named:
            stop = partial(_stop, started.stop, name.rpartition(":")[2])
            self._call(name, one, "start", msgspec.structs.replace(started, stop=stop))

    def step(self, done: StepDone) -> None:
        self._each("step", done)

    def evaluation(self, evaluated: Evaluated) -> None:
        self._each("evaluation", evaluated)

    def fault(self, fault: RunFault) -> None:
        self._each("fault", fault)

    def end(self, ended: RunEnded) -> None:
        """Nothing where no session began, or `end` was called before. All get it, even where one raises."""
        if not self._started:
            return
        self._started = False
        with contextlib.ExitStack() as stack:  # the last error is raised
            for name, one in reversed(self._named):
                stack.callback(self._call, name, one, "end", ended)

    def _each(self, method: str, event: object) -> None:
        if self._started:  # a device may come before the run begins
            for name, one in self._named:
                self._call(name, one, method, event)

    def _call(self, name: str, one: Callback, method: str, event: object) -> None:
        # stdout is data, and a callback may print
        with self._calling, _blamed(f"callback {name!r}: {method}"), contextlib.redirect_stdout(sys.stderr):
            getattr(one, method)(event)


def _stop(stop: Callable[[str], None], name: str, reason: str = "") -> None:
    stop(f"{name}: {reason}" if reason else name)


def outcome_of(error: BaseException) -> Literal["interrupted", "lost", "diverged", "failed"]:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return "lost" if isinstance(error, PeerError) else "diverged" if isinstance(error, Diverged) else "failed"


@contextlib.contextmanager
def _blamed(owner: str) -> Generator[None]:
    """Report an exception of a user's own code in one line."""
    try:
        yield
    except IsthmusError:
        raise
    except Exception as e:
        raise UserError(f"{owner} raised {' '.join(f'{type(e).__name__}: {e}'.split())}") from e
