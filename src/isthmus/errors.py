"""What went wrong, and whose fault it was.

    IsthmusError
      ├─ UserError       bad config, model or input: exit 2
      │    └─ FleetTooSmall   the fleet cannot hold the job: exit 3
      ├─ PeerError       another party sent something wrong, or went away: exit 4
      └─ InternalError   ours: exit 1

The CLI prints the message of one of these on one line, never a traceback unless `--debug`.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Generator, Iterable


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


class InternalError(IsthmusError):
    """A broken invariant of our own."""


def unknown_name(kind: str, got: str, valid: Iterable[str], prefix: str = "") -> UserError:
    """A `UserError` for a name that is not in `valid`, offering the nearest name that is.

    `prefix` is shown before each name, and does not make names alike.
    """
    names = sorted(valid)
    near = difflib.get_close_matches(got, names, n=1, cutoff=0.5)
    known = f"expected one of: {', '.join(prefix + n for n in names)}" if names else "expected none"
    hint = f"did you mean {prefix + near[0]!r}?" if near else known
    return UserError(f"unknown {kind} {prefix + got!r}: {hint}")


@contextlib.contextmanager
def users_code(what: str) -> Generator[None]:
    """An algorithm or model of the user's own is at work here: whatever it raises becomes a `UserError` that begins
    with `what`. Memory that is short is this machine's, and stays what it is."""
    try:
        yield
    except (IsthmusError, MemoryError):
        raise
    except Exception as e:
        raise UserError(f"{what}: {type(e).__name__}: {e}") from e
