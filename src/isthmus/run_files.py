"""The files of a run's folder, of whatever kind the run is: documents, lines that are added, files that are whole.

A process can be killed at any point. It leaves a document as it was or as it is to be, every line but perhaps the last
one, and of files that are saved again and again the ones before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from isthmus import reading
from isthmus.atomic_write import atomic_write
from isthmus.documents import differences, read_lines
from isthmus.errors import UserError
from isthmus.old_spelling import respelled

JOB = "job.json"  # the job, as it was run
LOSSES = "losses.jsonl"  # a pipeline's losses
ROUND_LINES = "rounds.jsonl"  # the rounds of a federated run
FINGERPRINTS = "fingerprints.jsonl"  # fingerprints of a pipeline whose steps can be audited
CHECKPOINTS, MANIFEST = "checkpoints", "manifest.json"
"""A pipeline's folder of checkpoints, and in each checkpoint the file that makes it complete."""
ROUNDS = "rounds"  # a federated run's folder of committed rounds
STATES_FOLDER = "states"  # a federated run's folder of what clients keep
PACKED = ".states"  # how the name of a file ends that has the clients' states of a round
STOPPED = "stopped.txt"  # the callback that ended the run, and its reason
CLIENT_NAMES = "clients.json"
"""The names of a federated run's clients, in the order of their numbers, where the data name them."""

Found = TypeVar("Found")
Line = TypeVar("Line", bound=msgspec.Struct)


def checkpoint_file(step: int, name: str) -> str:
    """Return where a file of a step's checkpoint is, below a run's folder.

    >>> checkpoint_file(40, MANIFEST)
    'checkpoints/step-000040/manifest.json'
    """
    return f"{CHECKPOINTS}/step-{step:06d}/{name}"


def as_json(value: object) -> bytes:
    """Indented: people read it."""
    return msgspec.json.format(msgspec.json.encode(value), indent=1)


def write_json(path: Path, value: object) -> None:
    """Replace the document, whole. OSError when it cannot be written."""
    atomic_write(path, as_json(value))


def keep_job(run: Path, job: object, note: Callable[[str], None]) -> None:
    """Replace the job that the run keeps; `note` gets each key that differs. OSError when it cannot be written."""
    written = as_json(job)
    try:
        before = read_job(run, dict[str, object])
    except FileNotFoundError:
        before = None
    except UserError:
        before = None  # an older version's
    atomic_write(run / JOB, written)
    if before is not None:
        for text in differences(before, msgspec.json.decode(written)):
            note(f"resumed with another job: {text}")


def keep_stop(run: Path, reason: str) -> None:
    """Keep the reason of a callback that ended the run; an empty one is forgotten, as the run goes on."""
    if reason:
        atomic_write(run / STOPPED, (reason + "\n").encode())
    else:
        (run / STOPPED).unlink(missing_ok=True)


def stop_reason(run: Path) -> str:
    """Return the callback that ended the run, and its reason; empty for any other end."""
    path = run / STOPPED
    return path.read_text(encoding="utf-8", errors="replace").strip() if path.is_file() else ""


def read_job(run: Path, kind: type[Found], source: str = "") -> Found:
    """The job of a run folder, also one in an old spelling. Errors as of `reading.read_json`."""
    source = source or str(run / JOB)
    return _job(reading.read_json(run / JOB, dict[str, object], source), kind, source)


def parse_job(text: bytes, kind: type[Found], source: str) -> Found:
    """Return the same as `read_job`, of the document itself."""
    return _job(reading.parse_json(text, dict[str, object], source), kind, source)


def _job(document: dict[str, object], kind: type[Found], source: str) -> Found:
    return reading.parse_json(msgspec.json.encode(respelled(document, source)), kind, source)


def read_json(path: Path, kind: type[Found], remedy: str = "") -> Found | None:
    """The document; None where there is none. UserError, which ends with `remedy`, for what cannot be read."""
    try:
        return reading.read_json(path, kind)
    except FileNotFoundError:
        return None
    except UserError as e:
        raise UserError(f"{e}{remedy}") from None


class LinesFile(Generic[Line]):
    """A line of JSON for each thing that happened."""

    def __init__(self, path: Path, kind: type[Line], what: str) -> None:
        """`what` the lines are, for errors."""
        self._path = path
        self._kind = kind
        self._what = what

    def add(self, line: Line) -> None:
        """UserError when it cannot be written."""
        try:
            with self._path.open("ab") as file:
                file.write(msgspec.json.encode(line) + b"\n")
        except OSError as e:
            raise self._unwritten(e) from None

    def keep_if(self, kept: Callable[[Line], bool], note: Callable[[str], None] = lambda _: None) -> None:
        """Forget the others, as a resumed run makes them again, and what cannot be read, of which `note` is called.
        UserError when it cannot be written."""
        lines = filter(kept, self.lines(note))
        try:
            atomic_write(self._path, b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
        except OSError as e:
            raise self._unwritten(e) from None

    def lines(self, note: Callable[[str], None] = lambda _: None) -> list[Line]:
        """Those that can be read; `note` receives a message about each other line."""
        return read_lines(self._path, self._kind, note)

    def _unwritten(self, error: OSError) -> UserError:
        return UserError(f"{self._what} {self._path}: cannot be written: {error.strerror or error}")


def newest_whole(
    newest_first: Iterable[Path],
    read: Callable[[Path], Found],
    passed_over: Callable[[str], None],
    damaged: type[UserError] = UserError,
) -> Found | None:
    """Read the newest file that is whole; None where nothing was ever saved.

    `read` raises `damaged` for a file that is not as it was saved; `passed_over` gets the reason of each. UserError
    when none of those that are there is whole: to begin anew is for the user to say.
    """
    refused: list[UserError] = []
    for path in newest_first:
        try:
            found = read(path)
        except damaged as e:
            refused.append(e)
            continue
        for reason in refused:
            passed_over(str(reason))
        return found
    if refused:
        raise refused[0]
    return None
