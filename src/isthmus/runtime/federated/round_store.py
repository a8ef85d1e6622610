"""The folder of a federated run keeps the server's values, committed rounds, their lines, and evaluations.

job.json   rounds.jsonl   rounds/   privacy.json
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from isthmus.disclosure import SPENT
from isthmus.errors import UserError
from isthmus.federated.accounting import written_guarantee
from isthmus.federated.algorithms import Values
from isthmus.federated.buffers import buffers_of
from isthmus.federated.evaluation import Evaluation, Evaluator, client_figures
from isthmus.federated.history import RoundHistory, RoundLine
from isthmus.federated.job import FederatedJob
from isthmus.federated.packed_states import unpack_states
from isthmus.federated.personal import OwnModels
from isthmus.federated.privacy import Guarantee
from isthmus.federated.server import Commits, RunIdentity, Server
from isthmus.graph.metrics import Metrics
from isthmus.programs.round_records import RoundRecord
from isthmus.protocol.federated_rules import RoundRules
from isthmus.run_files import ROUNDS, keep_job, write_json
from isthmus.runtime.federated.host import RoundMeasure


class RoundResult(msgspec.Struct, frozen=True, kw_only=True):
    """A round, with what must be seen of it before the next one changes it."""

    record: RoundRecord
    measure: RoundMeasure
    values: Values
    saves: bool
    states: NDArray[np.int32] | None


class RoundStore:
    """`first_round` is where a resumed run goes on; the server then has the values of the round before."""

    def __init__(self, job: FederatedJob, folder: Path, server: Server, identity: RunIdentity, *, resume: bool) -> None:
        """UserError for a folder of another job."""
        self.server = server
        self.folder = folder
        self.history = RoundHistory.of(folder)
        self.first_round = 0
        self.evaluator: Evaluator | None = None
        self.own_models: OwnModels | None = None  # the models of clients that use models of their own
        self._job = job
        self._accounting, self._unsampled = job.accounting(identity.clients), 0
        self._commits = Commits(folder / ROUNDS, identity)
        self.states: NDArray[np.int32] | None = None  # (population,), of algorithms whose clients keep something
        if server.keeps:
            self.states = np.full(identity.clients, -1, dtype=np.int32)
        self._passed_over: list[str] = []  # why of committed rounds that are damaged
        self._note: Callable[[str], None] = lambda _: None
        if resume and (found := self._commits.newest(self._passed_over.append)) is not None:
            self.first_round = found.round + 1
            server.restore(found.values, self.first_round)
            self.states = found.states if server.keeps else None
        if resume and self._accounting is not None:
            self._unsampled = self._made_twice(written_guarantee(folder))

    def unpack(self, folder: Path, size_bytes: int) -> None:
        """Put the clients' states of the round that the run goes on from into this folder, where they came with it from
        another machine."""
        if self.first_round and self.states is not None:
            unpack_states(self._commits.path(self.first_round - 1), folder, size_bytes, self.states)

    def _made_twice(self, before: Guarantee | None) -> int:
        """Rounds whose noisy sums were seen, and that are made again: each is another release of the same clients."""
        lost = sum(line.record.round >= self.first_round for line in self.history.lines())
        if before is None:
            return lost
        was_open = self.server.passes > 1 and self.first_round < before.rounds  # its first pass may have been seen
        return before.unsampled + lost + was_open

    def guarantee(self, rounds: int) -> Guarantee | None:
        """Return the guarantee of so many rounds for every client; None without privacy."""
        accounting = self._accounting
        return None if accounting is None else accounting.guarantee(rounds, self.server.numbers, self._unsampled)

    @property
    def promised(self) -> Guarantee | None:
        """The guarantee of the whole run for every client; for a run that is resumed with fewer rounds, of those that
        it made."""
        return self.guarantee(max(self._job.federated.rounds, self.first_round))

    def begin(self, note: Callable[[str], None]) -> None:
        """The folder is the run's now; lines of rounds that will be made again are forgotten. `note` gets what the
        whole run promises its clients."""
        self._note = note
        for why in self._passed_over:
            note(f"{why}; resuming from round {self.first_round}")
        promised = self.promised
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            keep_job(self.folder, self._job, note)
            if promised is not None:
                write_json(self.folder / SPENT, promised)
                note(f"privacy: {promised}")
        except OSError as e:
            raise UserError(f"run folder {self.folder}: cannot be written: {e.strerror or e}") from None
        self.history.keep(self.first_round, note)

    def closed(self, record: RoundRecord, measure: RoundMeasure) -> RoundResult:
        """A round as it is now."""
        rounds, save_every = self._job.federated.rounds, self._job.training.save_every
        while self.server.notices:
            self._note(self.server.notices.pop(0))
        saves = record.round + 1 == rounds or (record.round + 1) % save_every == 0
        read = saves or (self.own_models is not None and self._is_due(record))
        kept = self.states.copy() if read and self.states is not None else None
        return RoundResult(record=record, measure=measure, values=self.server.kept, saves=saves, states=kept)

    def write(self, closed: RoundResult, rules: RoundRules, sites: Mapping[str, Mapping[str, float]] = {}) -> RoundLine:
        """Evaluate where that is due, write the round's line, make the round durable where that is due. `sites` are
        figures that sites reported: of the model that the round began with."""
        evaluation, metrics = self._evaluation(closed), Metrics(self._job.metrics)
        asked = {name: {n: v for n, v in one.items() if n in ("loss", *metrics.names)} for name, one in sites.items()}
        if figures := client_figures(asked, metrics.lower_is_better):
            evaluation = msgspec.structs.replace(evaluation or Evaluation(loss=None), clients=figures)
        line = RoundLine(
            record=closed.record,
            **msgspec.structs.asdict(closed.measure),
            rules=rules.description,
            evaluation=evaluation,
        )
        self._count_missing(closed.record)
        self.history.add(line)
        self._tell_renewed(closed.record)
        if closed.saves:
            self._commits.save(closed.record.round, closed.values, closed.states)
        return line

    def _count_missing(self, record: RoundRecord) -> None:
        """Count clients that were drawn and are not in the round: they were left out for their time, which depends on
        the others."""
        if record.missing and self._accounting is not None and self._accounting.probability is not None:
            self._unsampled += 1
            write_json(self.folder / SPENT, self.promised)
            self._note(f"round {record.round + 1}: {len(record.missing)} clients are missing. privacy: {self.promised}")

    def _tell_renewed(self, record: RoundRecord) -> None:
        for name, timed in record.trained.items():
            if clients := [t.client for t in timed if t.renewed]:
                one, several = f"state of client {clients[0]} was", f"states of {len(clients)} clients were"
                what = one if len(clients) == 1 else several
                self._note(f"round {record.round + 1}: {name}: the {what} lost: training starts from a new state")

    def _evaluation(self, closed: RoundResult) -> Evaluation | None:
        if self.evaluator is None or not self._is_due(closed.record):
            return None
        model, own = closed.values["model"], None
        if self.own_models is not None and closed.states is not None:
            own = self.own_models.after(model, closed.states, self._note)
        return self.evaluator.evaluate(model, buffers_of(closed.values), own)

    def _is_due(self, record: RoundRecord) -> bool:
        every, number = self._job.training.eval_every, record.round + 1
        return bool(every) and (number % every == 0 or number == self._job.federated.rounds)
