"""Errors, and whose fault each is.

    IsthmusError
      ├─ UserError       bad config, model or input: exit 2
      │    └─ FleetTooSmall   the fleet cannot hold the job: exit 3
      ├─ PeerError       a peer sent something wrong, or went away: exit 4
      │    └─ DivergedUpdate  its numbers are not finite
      ├─ StepError       the job's model or data raised on a device: exit 2
      ├─ Diverged        the training's numbers are not finite: exit 1
      └─ InternalError   ours: exit 1

The CLI prints the message of one of these on one line, never a traceback unless `--debug`.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import sys
import sysconfig
import traceback
import typing
import warnings
from collections.abc import Generator, Iterable

__all__ = [
    "Diverged",
    "DivergedUpdate",
    "FleetTooSmall",
    "InternalError",
    "Interrupted",
    "IsthmusError",
    "IsthmusWarning",
    "PeerError",
    "RankLost",
    "StepError",
    "UserError",
    "warn",
]

_LIBRARIES = (sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
_NOT_THEIRS = ("<", *(folder + os.sep for folder in (os.path.dirname(__file__), *_LIBRARIES)))


class IsthmusError(Exception):
    """Base of everything that Isthmus raises on purpose."""

    exit_code = 1


class UserError(IsthmusError):
    """Something the user gave is wrong. Says where, what was got, what was expected."""

    exit_code = 2


class FleetTooSmall(UserError):
    """No placement fits the devices' memory. Says which device, and how many bytes short."""

    exit_code = 3


class PeerError(IsthmusError):
    """Another party sent something wrong or went away. Names the party."""

    exit_code = 4


class DivergedUpdate(PeerError):
    """The numbers that another party trained are not finite, or too large to be added up."""


class StepError(IsthmusError):
    """An operator of the job's model raised, or its data or optimizers did: other devices would likely say the same."""

    exit_code = 2

    def __init__(self, what: str, reason: str, step: int = -1) -> None:
        """`what` raised, for this `reason`. The caller that knows the step and the samples adds them."""
        super().__init__(f"{what}: {reason}")
        self.what = what
        self.reason = reason
        self.step = step


class RankLost(IsthmusError):
    """Another process of the same device, a rank of its island, has ended or left: nothing can be computed there
    together any more."""


class Diverged(IsthmusError):
    """The loss, a gradient or a weight is not finite. Says in which step, and where that began."""


class InternalError(IsthmusError):
    """A broken invariant of our own."""


class Interrupted(KeyboardInterrupt):
    """A call was ended before it came to a good end: by Ctrl-C, or since somebody asked for it. Says what is left."""

    def __init__(self, what: str, folder: str | os.PathLike[str] | None = None) -> None:
        """`folder` is the run's, where one has begun."""
        super().__init__(what)
        self.folder = folder


def unknown_name(kind: str, got: str, valid: Iterable[str], prefix: str = "") -> UserError:
    """A `UserError` for a name that is not in `valid`, offering the nearest name that is.

    `prefix` is shown before each name, and does not make names alike.
    """
    names = sorted(set(valid))
    near = difflib.get_close_matches(got, names, n=1, cutoff=0.5)
    near = near or [name for name in names if "".join(part[:1] for part in name.split("_")) == got]  # lr
    known = f"expected one of: {', '.join(prefix + n for n in names)}" if names else "expected none"
    hint = f"did you mean {prefix + near[0]!r}?" if near else known
    return UserError(f"unknown {kind} {prefix + got!r}: {hint}")


def check_choice(kind: str, got: object, expected: object) -> None:
    """`UserError` where a `Literal` type is expected and the value is none of its own."""
    valid: tuple[object, ...] = typing.get_args(expected) if typing.get_origin(expected) is typing.Literal else (got,)
    if got in valid:
        return
    if isinstance(got, str):
        raise unknown_name(kind, got, map(str, valid))
    raise UserError(f"{kind} got {got!r}, expected one of: {', '.join(map(repr, valid))}")


@contextlib.contextmanager
def users_code(what: str) -> Generator[None]:
    """An algorithm or model of the user's own is at work here: whatever it raises becomes a `UserError` that begins
    with `what`; so does leaving by `sys.exit`, which would end an executor without a word. Memory that is short is this
    machine's, and stays what it is."""
    try:
        yield
    except (IsthmusError, MemoryError):
        raise
    except (Exception, SystemExit) as e:
        raise UserError(f"{what}: {type(e).__name__}: {' '.join(str(e).split())}{_place(e)}") from e


def _place(error: BaseException) -> str:
    """Where in the user's own files: the innermost line that is neither of ours nor of an installed library."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if _is_theirs(frame.filename):
            return f" ({frame.filename}, line {frame.lineno}, in {frame.name})"
    return ""


def _is_theirs(file: str) -> bool:
    """Return whether a file is the user's own. The emulated accelerator runs under a model, wherever it is
    installed."""
    return not file.startswith(_NOT_THEIRS) and f"{os.sep}isthmus_testing{os.sep}" not in file


_TYPES = {
    "str": "text",
    "int": "integer",
    "float": "number",
    "bool": "true or false",
    "array": "list",
    "object": "table",
}


def plain_types(message: str) -> str:
    """A message of msgspec with its types as files' users call them: "expected 'text | table', got 'list'"."""
    return re.sub(r"(?<=['`| ])(str|int|float|bool|array|object)(?=['`| ])", lambda found: _TYPES[found[0]], message)


class IsthmusWarning(UserWarning):
    """A warning of this package: the command line prints its text alone."""


def warn(text: str) -> None:
    """Warn, and name the caller's own line: the innermost outside this package and what is installed."""
    frame, level = sys._getframe(1), 2  # pyright: ignore[reportPrivateUsage]
    while frame.f_back is not None and not _is_theirs(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, IsthmusWarning, stacklevel=level)
