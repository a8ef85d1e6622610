"""What became of every round, a line each, written when it is committed: exactly which updates are in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from isthmus.atomic_write import atomic_write
from isthmus.documents import read_lines
from isthmus.errors import UserError
from isthmus.federated.evaluation import Evaluation
from isthmus.protocol.federated_events import RoundRecord

ROUND_LINES = "rounds.jsonl"
"""In a run's folder."""


class RoundLine(msgspec.Struct, frozen=True, kw_only=True):
    """A committed round."""

    record: RoundRecord
    seconds: float
    """From its opening to the server's new values."""
    opened_at_s: float | None = None
    """Since 1970, by the coordinator's clock; None in a run of versions before."""
    sent_bytes: int = 0
    """By the coordinator, whole frames, and values that executors of this machine read in shared memory in place of
    frames; so, too, what was received."""
    received_bytes: int = 0
    trips: int = 0
    """Messages from executors that brought values."""
    value_bytes: int = 0
    """Of those values: 8 bytes a summed number, and what is collected."""
    rules: str = ""
    """When a round is closed."""
    evaluation: Evaluation | None = None

    @property
    def makespan_s(self) -> float:
        """Of the executor that trained longest in the last pass, which is what was planned."""
        return max((sum(t.seconds for t in timed) for timed in self.record.trained.values()), default=0.0)

    def busy_s(self) -> dict[str, float]:
        """Seconds of training in all passes, by executor."""
        record = self.record
        names = record.trained.keys() | record.earlier_s.keys()
        spent = {name: sum(t.seconds for t in record.trained.get(name, ())) for name in names}
        return {name: last_s + record.earlier_s.get(name, 0.0) for name, last_s in spent.items()}

    @property
    def clients(self) -> int:
        return sum(map(len, self.record.trained.values()))

    def time_error(self) -> float | None:
        """Mean of |predicted - measured| / measured over the clients; None where nothing was predicted."""
        lines: Mapping[str, object] = self.record.lines
        errors = [
            abs(self.record.lines[name].seconds(t.samples) - t.seconds) / t.seconds
            for name, timed in self.record.trained.items()
            if name in lines
            for t in timed
            if t.seconds > 0
        ]
        return sum(errors) / len(errors) if errors else None


class RoundHistory:
    """The lines of a run, in `rounds.jsonl`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @classmethod
    def of(cls, run: Path) -> RoundHistory:
        """Of the run in this folder."""
        return cls(run / ROUND_LINES)

    def keep(self, rounds: int, note: Callable[[str], None] = lambda _: None) -> None:
        """Forget what comes after so many rounds, as a resumed run makes them again, and what cannot be read, of which
        `note` is called."""
        kept = [line for line in self.lines(note) if line.record.round < rounds]
        try:
            atomic_write(self._path, b"".join(msgspec.json.encode(line) + b"\n" for line in kept))
        except OSError as e:
            raise UserError(f"history {self._path}: cannot be written: {e.strerror or e}") from None

    def add(self, line: RoundLine) -> None:
        try:
            with self._path.open("ab") as file:
                file.write(msgspec.json.encode(line) + b"\n")
        except OSError as e:
            raise UserError(f"history {self._path}: cannot be written: {e.strerror or e}") from None

    def lines(self, note: Callable[[str], None] = lambda _: None) -> list[RoundLine]:
        """Lines that can be read; `note` receives a message about each other line."""
        return read_lines(self._path, RoundLine, note)
