"""The outcome of every round, a line each, written when it is committed: exactly which updates are in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from isthmus.federated.evaluation import Evaluation
from isthmus.programs.open_phase import RoundRecord
from isthmus.run_files import ROUND_LINES, LinesFile


class RoundLine(msgspec.Struct, frozen=True, kw_only=True):
    """A committed round."""

    record: RoundRecord
    seconds: float  # from its opening to the server's new values
    opened_at_s: float | None = None  # since 1970, by the coordinator's clock; None in a run of versions before
    sent_bytes: int = 0
    """Bytes that the coordinator sent: whole frames, and values that executors of this machine read in shared memory in
    place of frames; so, too, what was received."""
    received_bytes: int = 0
    trips: int = 0  # messages from executors that brought values
    value_bytes: int = 0  # bytes of those values: 8 for a summed number, and those of collected values
    rules: str = ""  # when a round is closed
    evaluation: Evaluation | None = None

    @property
    def makespan_s(self) -> float:
        """Seconds of the executor that trained longest in the last pass, which is what was planned."""
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


class RoundHistory(LinesFile[RoundLine]):
    """The lines of a run, in `rounds.jsonl`."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, RoundLine, "history")

    @classmethod
    def of(cls, run: Path) -> RoundHistory:
        """Return the history of the run in this folder."""
        return cls(run / ROUND_LINES)

    def keep(self, rounds: int, note: Callable[[str], None] = lambda _: None) -> None:
        """Forget what comes after so many rounds, and what cannot be read, of which `note` is called."""
        self.keep_if(lambda line: line.record.round < rounds, note)
