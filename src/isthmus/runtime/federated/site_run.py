"""A federated run over sites that joined a fleet: each is an executor with one client, whose data stay there.

A round is on disk before the next one opens: a coordinator that is killed loses the open round at most (with
`save_every` = 1).
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from isthmus.errors import UserError
from isthmus.federated.algorithms import AlgorithmSpec
from isthmus.federated.history import History, RoundLine
from isthmus.federated.job import (
    Deployment,
    FederatedJob,
    build,
    check_staleness,
    members,
    round_rules,
    site_evaluator,
    site_identity,
)
from isthmus.federated.offer import RUN_NAME, Offer
from isthmus.federated.resident import Resident
from isthmus.federated.server import Server
from isthmus.protocol.federated_coordinator import FederatedCoordinator
from isthmus.protocol.federated_events import Finish, Record
from isthmus.protocol.federated_pace import Pace
from isthmus.protocol.federated_rules import Gathering
from isthmus.runtime.conducting.crew import Call
from isthmus.runtime.federated.books import Books
from isthmus.runtime.federated.conductor import FederatedConductor, Office, RoundMeasure, ended
from isthmus.runtime.federated.site_intake import UpdatesIntake
from isthmus.runtime.federated.site_reception import Lane, SiteReception
from isthmus.runtime.processes.interrupting import Stop
from isthmus.runtime.service.service import Service

_RUN = "run"


class SiteRun:
    """Everything of a run but its sites."""

    def __init__(
        self, job: FederatedJob, folder: Path, *, resume: bool, watch: Callable[[RoundLine], None] = lambda _: None
    ) -> None:
        """`watch` is called when a round is committed. UserError for a job without sites, a folder of another job."""
        if job.deployment is None:
            raise UserError("deployment: missing, expected the table with the sites that may take part")
        torch.set_num_threads(job.execution.threads)
        self.job = job
        self.folder = folder
        self.deployment: Deployment = job.deployment
        self._watch = watch
        resident = Resident(build(job))
        population = len(self.deployment.sites)
        self.server = Server(job.algorithm(population), resident.vector(), resident.buffers(), population)
        self.books = Books(job, folder, self.server, site_identity(job, resident.size), resume=resume)
        check_staleness(job, self.server)
        self.books.evaluator = site_evaluator(job)
        self._sizes = np.zeros(population, dtype=np.int64)
        gathering = Gathering(start=self.deployment.start or population, wait_s=self.deployment.wait_s)
        rules = msgspec.structs.replace(
            round_rules(job, population, self.first_round), staleness=job.participation.staleness
        )
        self.machine = FederatedCoordinator(
            self.deployment.sites, msgspec.structs.replace(rules, gathering=gathering), self._sizes, self._members,
            Pace(population, window_rounds=job.execution.window_rounds), states=self.books.states,
        )  # fmt: skip

    @property
    def first_round(self) -> int:
        return self.books.first_round

    @property
    def history(self) -> History:
        return self.books.history

    def _members(self, round_: int) -> NDArray[np.int64]:
        """Of the sites that are here."""
        return members(self.job, self._sizes, round_, self.machine.here)

    def run(
        self, service: Service, note: Callable[[str], None] = lambda _: None, stop: Stop | None = None
    ) -> Finish:  # fmt: skip
        """To the end. Raises UserError for what the job is to blame for, PeerError when too few sites take part,
        Diverged when no site's numbers are finite."""
        self.books.begin(note)
        run = secrets.token_hex(16)
        clients = {name: number for number, name in enumerate(self.deployment.sites)}
        intake = UpdatesIntake(
            self.server, clients, self._offer_by(self._kept_run()), self.job.bounds, run, note,
            staleness=self.job.participation.staleness,
        )  # fmt: skip
        office = Office(
            run=run, patience_s=self.job.patience_s, reception=SiteReception, out=Lane, last_words_s=0.0, returns=True
        )
        conductor = FederatedConductor(
            self.machine, self.server, intake, office, committed=self._commit, note=note
        )  # fmt: skip
        call = Call(
            run=run, devices=self.deployment.sites, patience_s=self.job.patience_s, threads=1, logs=self.folder / "logs"
        )
        with service.standing(call, conductor.reception):
            return ended(conductor.conduct(stop=stop))

    def _kept_run(self) -> str:
        """The name under which sites keep their clients' states: the run folder's own."""
        path = self.folder / _RUN
        try:
            if not path.is_file():
                unfinished = self.folder / f".{_RUN}"
                unfinished.write_text(secrets.token_hex(16), encoding="ascii")
                unfinished.replace(path)
            name = path.read_bytes().strip()
        except OSError as e:
            raise UserError(f"{path}: cannot be read or written: {e.strerror or e}") from None
        if not re.fullmatch(RUN_NAME.encode(), name):
            raise UserError(f"{path}: damaged: expected the run's name of 32 hexadecimal digits")
        return name.decode()

    def _offer_by(self, kept: str) -> Callable[[int], Offer]:
        job = self.job

        def offer(client: int) -> Offer:
            return Offer(
                job=job.name, run=kept, model=job.model, local=job.local, seed=job.federated.seed, client=client,
                algorithm=AlgorithmSpec(name=job.federated.algorithm, options=job.federated.options),
            )  # fmt: skip

        return offer

    def _commit(self, record: Record, measure: RoundMeasure) -> None:
        closed = self.books.closed(record, measure)
        line = self.books.write(closed, self.machine.rules)
        if closed.saves:
            self.machine.durable_round = record.round
        self._watch(line)
