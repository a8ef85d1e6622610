"""A federated run over sites that joined a fleet: each is an executor with one client, whose data stay there.

A round is on disk before the next one opens: a coordinator that is killed loses the open round at most (with
`save_every` = 1).
"""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from isthmus.atomic_write import atomic_write
from isthmus.errors import PeerError, UserError
from isthmus.federated.algorithms import AlgorithmSpec
from isthmus.federated.evaluation import RoundLine, site_evaluator
from isthmus.federated.job import Deployment, FederatedJob, build, check_updates, members, round_rules, site_identity
from isthmus.federated.resident import Resident
from isthmus.federated.secure.recovery import MaskedSum
from isthmus.federated.secure.rules import secure_rules
from isthmus.federated.server import Server
from isthmus.federated.task_spec import RUN_NAME, TaskSpec
from isthmus.programs.masked import MaskedRounds, TakeMasksOff
from isthmus.programs.merging import Finish
from isthmus.programs.open_phase import RoundRecord
from isthmus.programs.rounds import Rounds
from isthmus.protocol.federated_messages import PhaseId, SumsSent
from isthmus.protocol.federated_planning import ExecutorChurn
from isthmus.protocol.federated_scheduler import ThroughputModel
from isthmus.runtime.coordinator.backend import RunRequest
from isthmus.runtime.federated.host import FederatedHost, RoundMeasure, ended, over_networks
from isthmus.runtime.federated.run import RoundStore
from isthmus.runtime.federated.update_receiver import SiteUpdateReceiver
from isthmus.runtime.messages.federated import MaskedValues, SentValues
from isthmus.runtime.processes.signals import Stop
from isthmus.runtime.service.fleet_coordinator import FleetCoordinator

_RUN = "run"


def site_coordinator(
    job: FederatedJob,
    deployment: Deployment,
    sizes: NDArray[np.int64],
    first_round: int,
    states: NDArray[np.int32] | None,
) -> Rounds:
    """The machine of a job's run over sites. `sizes` (sites,) in samples are filled in as sites say them."""
    population = len(deployment.sites)
    rules = msgspec.structs.replace(
        round_rules(job, population, first_round),
        staleness=job.federated.participation.staleness,
        secure=secure_rules(job.federated.aggregation, job.federated.participation.minimum),
        gathering=ExecutorChurn(start=deployment.start or population, wait_s=deployment.wait_s),
    )
    kind = Rounds if rules.secure is None else MaskedRounds
    machine = kind(
        deployment.sites,
        rules,
        sizes,
        lambda round_: members(job, sizes, round_, machine.here),
        ThroughputModel(population, window_rounds=job.runtime.window_rounds),
        clients={name: number for number, name in enumerate(deployment.sites)},
        states=states,
    )
    return machine


class SiteRun:
    """Everything of a run but its sites."""

    def __init__(
        self,
        job: FederatedJob,
        folder: Path,
        *,
        resume: bool,
        began: Callable[[], None] = lambda: None,
        watch: Callable[[RoundLine], None] = lambda _: None,
    ) -> None:
        """`began` is called when the folder is the run's, `watch` when a round is committed. UserError for a job
        without sites, a folder of another job."""
        if job.federated.deployment is None:
            raise UserError("federated.deployment: missing, expected the table with the sites that may take part")
        torch.set_num_threads(job.runtime.threads)
        self.job = job
        self.folder = folder
        self.deployment: Deployment = job.federated.deployment
        self._began, self._watch = began, watch
        self._receiver: SiteUpdateReceiver | None = None
        resident = Resident(build(job))
        population = len(self.deployment.sites)
        algorithm = job.algorithm(population, deployed=True)
        self.server = Server(algorithm, resident.vector(), resident.buffers(), population)
        self.store = RoundStore(job, folder, self.server, site_identity(job, resident.size), resume=resume)
        check_updates(job, self.server)
        self.store.evaluator = site_evaluator(job)
        sizes = np.zeros(population, dtype=np.int64)
        self.machine = site_coordinator(job, self.deployment, sizes, self.store.first_round, self.store.states)

    def run(
        self, service: FleetCoordinator, note: Callable[[str], None] = lambda _: None, stop: Stop | None = None
    ) -> Finish:
        """To the end. Raises UserError for what the job is to blame for, PeerError when too few sites take part,
        Diverged when no site's numbers are finite."""
        self.store.begin(note)
        self._began()
        run = secrets.token_hex(16)
        clients = {name: number for number, name in enumerate(self.deployment.sites)}
        self._receiver = receiver = (
            SecureUpdateReceiver if self.job.federated.aggregation.secure else SiteUpdateReceiver
        )(
            self.server,
            clients,
            self._task_spec_from(self._kept_run()),
            self.job.bounds,
            run,
            note,
            rounds_late=self.machine.rounds_late,
        )
        policy = over_networks(run, self.job.timeout_s)
        host = FederatedHost(self.machine, self.server, receiver, policy, committed=self._commit, note=note)
        call = RunRequest(
            run=run, devices=self.deployment.sites, timeout_s=self.job.timeout_s, threads=1, logs=self.folder / "logs"
        )
        with service.long_lived_run(call, host.acceptor):
            return ended(host.coordinate(stop=stop))

    def _kept_run(self) -> str:
        """The name under which sites keep their clients' states: the run folder's own."""
        path = self.folder / _RUN
        try:
            if not path.is_file():
                atomic_write(path, secrets.token_hex(16).encode())
            name = path.read_bytes().strip()
        except OSError as e:
            raise UserError(f"{path}: cannot be read or written: {e.strerror or e}") from None
        if not re.fullmatch(RUN_NAME.encode(), name):
            raise UserError(f"{path}: damaged: expected the run's name of 32 hexadecimal digits")
        return name.decode()

    def _task_spec_from(self, kept: str) -> Callable[[int], TaskSpec]:
        job = self.job
        local = job.local.tabled(job.federated.rounds)
        whole = self.store.guarantee(job.federated.rounds)
        so_far = self.store.guarantee(self.store.first_round) if self.store.first_round else None

        def task_spec(client: int) -> TaskSpec:
            return TaskSpec(
                job=job.name,
                run=kept,
                model=job.model,
                local=local,
                seed=job.training.seed,
                client=client,
                owner_column=job.owner_column,
                algorithm=AlgorithmSpec(name=job.federated.algorithm, options=job.federated.options),
                aggregation=job.federated.aggregation,
                admission=job.federated.admission,
                privacy=job.privacy,
                minimum=job.federated.participation.minimum,
                rounds=job.federated.rounds,
                attempts=job.federated.participation.attempts,
                sites=self.deployment.sites,
                epsilon=None if whole is None else whole.epsilon,
                epsilon_so_far=None if so_far is None else so_far.epsilon,
            )

        return task_spec

    def _commit(self, record: RoundRecord, measure: RoundMeasure) -> None:
        closed = self.store.closed(record, measure)
        sites = self._receiver.take_figures(record.round) if self._receiver is not None else {}
        line = self.store.write(closed, self.machine.rules, sites)
        if closed.saves:
            self.machine.durable_round = record.round
        self._watch(line)


class SecureUpdateReceiver(SiteUpdateReceiver):
    """Receives updates to which no rule can be applied, since they are masked. Sites apply the rules."""

    values = MaskedValues
    _masked: dict[str, dict[str, Tensor]]  # updates that wait for the machine's word
    _sum: MaskedSum
    _summing: PhaseId | None

    def prepare(self) -> None:
        self._masked, self._summing = {}, None
        self._sizes = [{name: math.prod(f.shape) for name, f in forms.items()} for forms in self._server.sums]
        self._most_bytes = max(8 * sum(sizes.values()) for sizes in self._sizes) + 1024

    def _keep(self, executor: str, sums: SumsSent, values: SentValues, tensors: dict[str, Tensor]) -> SumsSent:
        client, samples = self._clients[executor], self._samples[executor]
        if [r.client for r in sums.refused] == [client] and not sums.timed and not tensors:
            self._note(f"site {executor}: has no update of round {sums.phase.round + 1}: {sums.refused[0].reason}")
            return sums
        self._check_of(executor, sums, client, samples)
        if not 0 <= sums.phase.number < len(self._sizes):
            raise PeerError(f"sent an update of pass {sums.phase.number + 1}")
        MaskedSum(self._sizes[sums.phase.number]).check(tensors)
        self._masked[executor] = tensors
        return sums

    def merge(self, executor: str) -> None:
        update, phase = self._masked.pop(executor, None), self._server.phase
        if update is None:
            return  # it has none, and said why
        assert phase is not None, "a phase is open"
        if phase != self._summing:
            self._sum, self._summing = MaskedSum(self._sizes[phase.number]), phase
        self._sum.add(update)

    def unmask(self, recovered: TakeMasksOff) -> frozenset[tuple[str, str]]:
        """Returns holder and owner of each share that is wrong. PeerError where those of the others are not enough."""
        sums, weights = self._sum.unmasked(recovered, self._run)
        largest = self._server.partial.check(sums, range(weights.clients), weights)
        self._server.partial.merge(sums, weights, largest)
        return self._sum.wrong

    def ignore(self, executor: str) -> None:
        self._masked.pop(executor, None)
        self._note(f"site {executor}: its masked update came too late: it is ignored")
