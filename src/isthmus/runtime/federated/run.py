"""A federated run: executors, the coordinator, commits, and what is left behind.

Its folder keeps the server's values, committed rounds, their lines, and evaluations:
job.json   rounds.jsonl   rounds/   privacy.json
"""

from __future__ import annotations

import queue
import secrets
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from isthmus.accelerators import HOST
from isthmus.data.clients import ClientData, Named
from isthmus.disclosure import SPENT
from isthmus.errors import UserError, warn
from isthmus.federated.accounting import written_guarantee
from isthmus.federated.admission import Guarantee, first_state
from isthmus.federated.algorithms import Values
from isthmus.federated.client_trainer import ClientTrainer
from isthmus.federated.cohorts import Cohorts
from isthmus.federated.evaluation import (
    Evaluation,
    Evaluator,
    OwnModels,
    RoundHistory,
    RoundLine,
    client_figures,
    evaluator,
    is_personal,
)
from isthmus.federated.in_process import InProcess
from isthmus.federated.job import FederatedJob, build, check_updates, client_data, executors, identity, round_rules
from isthmus.federated.resident import Resident, buffers_of
from isthmus.federated.secure.rules import check_sizes
from isthmus.federated.server import Commits, RunIdentity, Server
from isthmus.federated.states import StateForm, StateStore, unpack_states
from isthmus.graph.metrics import Metrics
from isthmus.programs.merging import Finish
from isthmus.programs.open_phase import RoundRecord
from isthmus.programs.rounds import Rounds
from isthmus.protocol.federated_planning import ExecutorChurn, RoundRules
from isthmus.protocol.federated_scheduler import ThroughputModel
from isthmus.run_files import CLIENT_NAMES, ROUNDS, STATES_FOLDER, keep_job, write_json
from isthmus.runtime.coordinator.backend import Backend, StartedProcesses
from isthmus.runtime.federated.executor import DeviceSums, KeptStates, request, serve
from isthmus.runtime.federated.host import ConnectionPolicy, FederatedHost, RoundMeasure, ended, over_networks
from isthmus.runtime.federated.trainer import executor_trainer, own_mean_of, pacers, sized
from isthmus.runtime.federated.update_receiver import SharedAccumulator, SharedBroadcast, SharedMemory, SumsReceiver
from isthmus.runtime.processes.forked import Forked
from isthmus.runtime.processes.memory import ANY_SIZE, keep_freed_pages
from isthmus.runtime.processes.signals import Stop
from isthmus.runtime.transport.listener import Listener
from isthmus.runtime.transport.message_sender import SWITCH_S


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


ONE_BY_ONE = (
    "runtime.clients_per_vmap: clients are trained one by one: with [[optimizer]] or training.clip_norm each has a "
    "state and norms of its own"
)


def process_names(count: int) -> list[str]:
    """Return the names of executors that are processes of this machine."""
    return [f"executor-{number}" for number in range(count)]


def coordinator_of(
    job: FederatedJob,
    sizes: NDArray[np.int64],
    cohorts: Cohorts,
    first_round: int,
    states: NDArray[np.int32] | None,
    *,
    joined: bool = False,
) -> Rounds:
    """The machine of a job's run, for the executors that its scheme takes; or for devices that join, of which so many
    begin."""
    scheme, count = job.scheme, 0 if joined else executors(job, len(sizes))
    rules = msgspec.structs.replace(
        round_rules(job, len(sizes), first_round),
        planner=job.runtime.planner or scheme.planner,
        warm_up_rounds=scheme.warm_up_rounds,
        single=scheme.single,
        steals=scheme.steals if job.runtime.steals is None else job.runtime.steals,
    )
    if cohorts.buffer is not None:
        needed, at_work = cohorts.buffer
        rules = msgspec.structs.replace(
            rules, needed=needed, at_work=at_work, quorum=1.0, staleness=job.federated.participation.staleness
        )
    if joined:
        rules = msgspec.structs.replace(rules, gathering=ExecutorChurn(start=job.runtime.executors))
    check_sizes(job.federated.aggregation, sizes)
    fleet = None if joined else job.executor_fleet(count)
    names = process_names(count) if fleet is None else fleet.names
    throughput = ThroughputModel(count, window_rounds=job.runtime.window_rounds)
    own = {name: number for number, name in enumerate(names)} if scheme.per == "population" else {}
    return Rounds(names, rules, sizes, cohorts.members, throughput, clients=own, states=states, late=cohorts.late)


class FederatedRun:
    """Everything of a run but its executors; in a folder, besides what its round store keeps:

    states/   logs/
    """

    def __init__(
        self,
        job: FederatedJob,
        folder: Path,
        *,
        resume: bool,
        began: Callable[[], None] = lambda: None,
        watch: Callable[[RoundLine], None] = lambda _: None,
        backend: Backend | None = None,
    ) -> None:
        """`began` is called when the folder is the run's, before executors are forked; `watch` when a round is
        committed, in another thread. With a `backend` executors are devices that join, else they are here, whatever
        `runtime.backend` says. UserError for a folder of another job."""
        self._backend = backend
        keep_freed_pages(ANY_SIZE, arenas=1)
        torch.set_num_threads(job.runtime.threads)
        self.folder = folder
        self.data: ClientData = client_data(job)
        if job.runtime.clients_per_vmap != 1 and not job.local.is_plain:
            warn(ONE_BY_ONE)
        self.job = job = sized(job, self.data, folder if resume else None, forks=backend is None)
        if text := own_mean_of(lambda: build(job), self.data.columns, job.local, forks=backend is None):
            warn(text)
        self._began, self._watch = began, watch
        population = len(self.data.sizes)
        self._algorithm = job.algorithm(population)
        self._resident = resident = Resident(build(job))
        late = job.federated.participation.staleness
        self.server = Server(self._algorithm, resident.vector(), resident.buffers(), population, past=late)
        check_updates(job, self.server)
        resident.bind(self.server.values["model"])  # not held twice
        self.store = RoundStore(job, folder, self.server, identity(job, self.data, resident.size), resume=resume)
        first = first_state(self._algorithm, self.server.values["model"])
        self.state_form = None if first is None else StateForm(first)
        if self.state_form is not None and self.store.states is not None and resume:
            self.store.unpack(self.folder / STATES_FOLDER, self.state_form.size_bytes)
        cohorts = Cohorts(job, self.data.sizes)
        first_round, joined = self.store.first_round, backend is not None
        self.machine = coordinator_of(job, self.data.sizes, cohorts, first_round, self.store.states, joined=joined)
        self._pacer = pacers(job, self.data, len(self.machine.executors))
        personal = is_personal(self._algorithm, self.server.values["model"])
        self.store.evaluator = evaluator(job, self.data, personal=personal)
        if personal and (states := self._states(0)) is not None:
            self.store.own_models = OwnModels(self._algorithm, states)  # which writes nothing

    def begin(self, note: Callable[[str], None] = lambda _: None) -> None:
        """The folder is this run's from now on."""
        self.store.begin(note)
        if isinstance(self.data, Named) and self.data.names:
            write_json(self.folder / CLIENT_NAMES, self.data.names)
        batch, largest = self.job.local.batch_size, int(self.data.sizes.max())
        if batch > largest:
            what = f"no client has more than {largest} samples: each makes one step per epoch, with all of its own"
            note(f"training.batch_size: got {batch}, and {what}")

    def run(self, note: Callable[[str], None] = lambda _: None, stop: Stop | None = None) -> Finish:
        """To the end. Raises UserError for what the job is to blame for, PeerError when no executor is left, Diverged
        when no client's numbers are finite."""
        self.begin(note)
        self._began()
        apart = self.job.scheme.processes and len(self.machine.executors) > 1  # one shares its work with nobody
        with _Aftermath(self._after) as after:
            if self._backend is not None:
                finish = self._on_devices(self._backend, after, note, stop or Stop())
            else:
                finish = self._in_processes(after, note, stop) if apart else self._in_process(after, stop)
        return ended(finish)

    def _trainer(self, number: int) -> ClientTrainer:
        """Return the trainer of executor `number`, in this process or a copy of it."""
        module, states, pacer = self._resident.module, self._states(number), self._pacer(number)
        return executor_trainer(self.job, self._algorithm, module, self.data, states, pacer, number)

    def _states(self, number: int) -> StateStore | None:
        """One executor's. The places that the last committed round needs are nobody's to fill."""
        if self.state_form is None or self.store.states is None:
            return None
        parts = len(self.machine.executors)
        return StateStore(self.folder / STATES_FOLDER, self.state_form, self.store.states, (number, parts))

    def _in_process(self, after: _Aftermath, stop: Stop | None) -> Finish:
        opened_s, before = time.monotonic(), (0, 0, 0)

        def committed(record: RoundRecord) -> None:
            nonlocal opened_s, before
            now_s, now = time.monotonic(), (run.trips, run.broadcast_bytes, run.value_bytes)
            trips, sent, values = (b - a if self.job.scheme.processes else 0 for a, b in zip(before, now, strict=True))
            seconds = now_s - opened_s
            measure = RoundMeasure(
                seconds=seconds,
                opened_at_s=time.time() - seconds,
                sent_bytes=sent,
                received_bytes=values,
                trips=trips,
                value_bytes=values,
            )
            opened_s, before = now_s, now
            self._commit(record, measure, after)()

        sites = {name: self._trainer(number) for number, name in enumerate(self.machine.executors)}
        after.start()
        run = InProcess(
            self.machine,
            self.server,
            sites,
            committed=committed,
            clients_per_vmap=self.job.runtime.clients_per_vmap,
            clock=time.monotonic,
        )
        before_s = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_S)  # what follows a round is done beside the next one
        try:
            with (stop or Stop()).calls(run.interrupt):
                return run.run()
        finally:
            sys.setswitchinterval(before_s)

    def _in_processes(self, after: _Aftermath, note: Callable[[str], None], stop: Stop | None) -> Finish:
        run, names = secrets.token_hex(16), self.machine.executors
        timeout_s, clients_per_vmap = self.job.timeout_s, self.job.runtime.clients_per_vmap

        broadcast_memory = SharedBroadcast(
            self.server.largest_broadcast, 1 + self.job.federated.participation.staleness
        )
        forms = self.server.sums
        accumulators = {name: SharedAccumulator(forms) for name in names}

        def execute(name: str, number: int) -> Callable[[str], None]:
            shared = SharedMemory(broadcast_memory, accumulators[name])
            return lambda address: serve(
                address, name, run, lambda: self._trainer(number), timeout_s, clients_per_vmap, shared
            )

        HOST.release_cached()  # a process that is about to be copied: each copy would have what was freed
        with Forked({name: execute(name, n) for n, name in enumerate(names)}, self.folder / "logs") as forked:
            self._resident.let_go()  # it trains elsewhere
            host = FederatedHost(
                self.machine,
                self.server,
                SumsReceiver(self.server, accumulators),
                ConnectionPolicy(run=run, timeout_s=timeout_s, broadcast_memory=broadcast_memory),
                committed=lambda record, measure: self._commit(record, measure, after),
                note=note,
            )
            after.start()
            listener = Listener("127.0.0.1", timeout_s=timeout_s)
            listener.start(host.acceptor.on_connection)
            forked.begin(f"127.0.0.1:{listener.port}")
            try:
                return host.coordinate(StartedProcesses(forked.ended), stop)
            finally:
                listener.close()

    def _on_devices(self, backend: Backend, after: _Aftermath, note: Callable[[str], None], stop: Stop) -> Finish:
        run, form = secrets.token_hex(16), self.state_form
        states = None if form is None else KeptStates(self.folder / STATES_FOLDER, form)
        host = FederatedHost(
            self.machine,
            self.server,
            DeviceSums(self.server, self.job, run, self.data.fingerprint, states),
            over_networks(run, self.job.timeout_s),
            committed=lambda record, measure: self._commit(record, measure, after),
            note=note,
        )
        after.start()
        with backend.at_work(request(self.job, run, self.folder / "logs", stop), host.acceptor) as devices:
            return host.coordinate(devices, stop)

    def _commit(self, record: RoundRecord, measure: RoundMeasure, after: _Aftermath) -> Callable[[], None]:
        """Close the round, as the next round changes its values; return the rest, which is done while that round
        runs."""
        closed = self.store.closed(record, measure)
        return lambda: after.put(closed)

    def _after(self, done: RoundResult) -> None:
        line = self.store.write(done, self.machine.rules)
        if done.saves:
            self.machine.durable_round = done.record.round
        self._watch(line)


class _Aftermath:
    """Does what follows a round while the next one trains, in order. What it raises is raised to who puts the next,
    `SystemExit` too: a thread that ended without a word would be waited for."""

    def __init__(self, act: Callable[[RoundResult], None]) -> None:
        self._act = act
        self._queue: queue.Queue[RoundResult | None] = queue.Queue(maxsize=2)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="aftermath", daemon=True)

    def put(self, done: RoundResult) -> None:
        if self._error is not None:
            raise self._error
        self._queue.put(done)

    def _run(self) -> None:
        while (done := self._queue.get()) is not None:
            if self._error is None:
                try:
                    self._act(done)
                except BaseException as e:
                    self._error = e

    def start(self) -> None:
        """Not before executors are forked."""
        self._thread.start()

    def __enter__(self) -> _Aftermath:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()
        if self._error is not None and error is None:
            raise self._error
