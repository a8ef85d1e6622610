"""A federated job: which model, whose data, which algorithm, who takes part, on how many executors. One TOML file."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar

import msgspec
import numpy as np
import torch
from msgspec import Meta
from numpy.typing import NDArray
from torch import nn

from isthmus.accelerators import AUTO, Accelerator, open_accelerator
from isthmus.callbacks import CallbackConfig, find_callback
from isthmus.combinations import refused
from isthmus.data import DataSpec
from isthmus.data.availability import Availability, read_availability
from isthmus.data.client_files import KIND as CLIENTS
from isthmus.data.clients import ClientData, divided
from isthmus.data.description import refuse_description
from isthmus.data.femnist import FemnistOptions, FemnistShaped
from isthmus.data.leaf import KIND as LEAF
from isthmus.data.leaf import LeafClients, LeafOptions
from isthmus.data.partition import PartitionSpec
from isthmus.documents import JOB_NAME, beside, check_is_local, convert, folder_of, read_toml
from isthmus.errors import UserError, unknown_name
from isthmus.extensions import read_options
from isthmus.federated.accounting import Accounting
from isthmus.federated.admission import AdmissionRules
from isthmus.federated.algorithms import Algorithm, AlgorithmSpec, load_algorithm
from isthmus.federated.deployment import Deployment
from isthmus.federated.emulated_speed import SpeedEmulation
from isthmus.federated.execution import Execution, RayExecution
from isthmus.federated.executor_fleet import ExecutorFleet, executor_fleet
from isthmus.federated.local import LocalConfig
from isthmus.federated.privacy import Privacy, private
from isthmus.federated.robust import Aggregation, Robust
from isthmus.federated.schemes import Scheme, scheme
from isthmus.federated.secure.rules import check_secure
from isthmus.federated.secure.site_noise import check_site_noise
from isthmus.federated.server import COMBINING, RunIdentity
from isthmus.federated.step_rules import check_steps
from isthmus.graph.metrics import Metrics
from isthmus.models import ModelSpec, build_model
from isthmus.overrides import counted_from, overridden
from isthmus.planners.cohort import COHORT_ALGORITHMS
from isthmus.protocol.federated_participation import Participation, cohort
from isthmus.protocol.federated_rules import RoundRules
from isthmus.stores import StoreConfig
from isthmus.trackers import Track, check_trackers
from isthmus.units import parse_duration
from isthmus.wire_types import Seed

Positive = Annotated[int, Meta(ge=1)]
NotNegative = Annotated[int, Meta(ge=0)]
FEMNIST = "femnist"
ALL = Participation(fraction=1.0)
"""Every client takes part in each round."""
OF_THIS_KIND = {"federated", "partition", "participation", "admission", "aggregation", "deployment"}
"""Tables that a pipeline's job has not: a file with one of them and no [federated] is refused with this reason."""


class FederatedConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The algorithm, and how long. Zero turns an `every` off."""

    HINTS: ClassVar[Mapping[str, str]] = Privacy.HINTS
    algorithm: str = "fedavg"
    """One of `isthmus algorithms`, or `package.module:Class` of your own."""
    options: dict[str, object] = {}
    """Settings of the algorithm: `isthmus describe NAME` lists them."""
    rounds: Positive = 10
    """Rounds of the whole run."""
    seed: Seed = 0
    """The seed of weights, partition, participation and the order of samples."""
    evaluate_every: NotNegative = 1
    """Rounds between evaluations on held-out samples; 0: none."""
    evaluate_samples: Positive = 2000
    """Held-out samples of an evaluation, at most: of more, so many drawn at random, the same in every evaluation."""
    evaluate_clients: NotNegative = 0
    """Clients whose own data the model is evaluated on too, evenly over the population."""
    save_every: Positive = 1
    """Rounds between commits to disk."""


class FederatedJob(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole job file; its table `federated` sets it apart from a pipeline's.

    Raises `UserError` where `load_federated_job` or `check` finds a value that cannot be.

    >>> import isthmus
    >>> from isthmus.federated.job import FederatedConfig
    >>> from isthmus.models import ModelSpec
    >>> federated = FederatedConfig(algorithm="scaffold", rounds=20)
    >>> job = isthmus.FederatedJob(name="first", model=ModelSpec(name="mlp"), federated=federated)
    >>> job.federated.algorithm, job.federated.rounds
    ('scaffold', 20)
    """

    BESIDE: ClassVar[str] = "federated"
    name: Annotated[str, Meta(pattern=JOB_NAME)]
    """The run's name: its folder is RUN_DIR/NAME."""
    model: ModelSpec
    """Which model to train."""
    data: DataSpec | None = None
    """The population's, shared out by `partition`; of a deployment, the coordinator's own to evaluate on, if any."""
    federated: FederatedConfig
    """The algorithm, and for how many rounds."""
    partition: PartitionSpec | None = None
    """How the data are shared out among simulated clients."""
    local: LocalConfig = LocalConfig()
    """How a client trains."""
    participation: Participation = ALL
    """Which clients take part in a round, and when a round closes."""
    admission: AdmissionRules = AdmissionRules()
    """Conditions under which an update is accepted."""
    aggregation: Aggregation = Aggregation()
    """How updates are combined."""
    privacy: Privacy | None = None
    """Differential privacy of clients; without this table updates are not noised."""
    execution: Execution = Execution()
    """Where simulated clients train."""
    fleet: str = ""
    """Emulation: a built-in fleet or a path to a fleet TOML, whose devices are the executors."""
    coordinator: str = ""
    """A device of that fleet, on whose machine the coordinator is; the first one, if not given."""
    deployment: Deployment | None = None
    """Real sites in place of simulated clients."""
    metrics: tuple[str, ...] = ()
    """Figures of evaluations beside the loss: `accuracy`, `perplexity`, or `package.module:function` of your own."""
    run_dir: str = "runs"
    """Where run folders are made."""
    callback: tuple[CallbackConfig, ...] = ()
    """One table [[callback]] per callback of your own."""
    track: Track = Track()
    """Which trackers get the run's figures."""
    store: StoreConfig | None = None
    """Where the run is kept besides its folder; without this table nowhere."""

    @property
    def devices(self) -> tuple[str, ...]:
        """Names of the accelerators that executors have in turn."""
        return (self.execution.device,) if isinstance(self.execution.device, str) else self.execution.device

    @property
    def scheme(self) -> Scheme:
        """How executors get clients."""
        return scheme(self.execution.scheme)

    def executor_fleet(self, executors: int) -> ExecutorFleet | None:
        """The emulated fleet with so many executors, 0 for one on each device; None without a fleet. UserError."""
        return executor_fleet(self.fleet, self.coordinator, executors) if self.fleet else None

    @property
    def owner_column(self) -> str:
        """The column that says whose a sample is, which no model is given; empty where none does."""
        return self.partition.column if self.partition is not None and self.partition.scheme == "natural" else ""

    @property
    def timeout_s(self) -> float:
        """Seconds without a message after which an executor or a site is lost."""
        return parse_duration(self.execution.timeout, "execution.timeout")

    @property
    def deadline_s(self) -> float:
        """Seconds after which a round closes with the updates received so far."""
        return parse_duration(self.participation.deadline, "participation.deadline")

    def algorithm(self, population: int, *, deployed: bool = False) -> Algorithm:
        """With what the job puts around it; where it is not `deployed`, in a simulation."""
        inner = load_algorithm(_spec(self))
        if self.privacy is not None:
            expected, minimum = self.participation.expected(population), self.participation.minimum
            return private(inner, self.privacy, expected, minimum, simulated=not deployed)
        return inner if self.aggregation.rule == "declared" else Robust(inner=inner, rule=self.aggregation)

    @property
    def bounds(self) -> AdmissionRules:
        """The bounds of every update."""
        return self.admission if self.privacy is None else self.privacy.bounds

    def accounting(self, population: int) -> Accounting | None:
        """The conditions of epsilon; None without privacy."""
        if self.privacy is None:
            return None
        return Accounting(
            privacy=self.privacy,
            participation=self.participation,
            population=population,
            deployed=self.deployment is not None,
            passes=len(self.algorithm(population).passes),
        )


def is_federated(path: Path) -> bool:
    """Whether a job file is one of these."""
    return not OF_THIS_KIND.isdisjoint(read_toml(path, "job file"))


def load_federated_job(path: Path, overrides: Mapping[str, object] = {}) -> FederatedJob:
    """Read and check a job file; UserError names the file, the field, what was got and what was expected."""
    folder = folder_of(path)
    changed = counted_from(overrides, os.getcwd()) if folder else overrides
    job = convert(overridden(read_toml(path, "job file"), changed), FederatedJob, str(path))
    job = _counted_from(job, folder)
    try:
        check(job)
    except UserError as e:
        raise UserError(f"{path}: {e}") from None
    return job


def _counted_from(job: FederatedJob, folder: str) -> FederatedJob:
    """As a file in this folder says it: with its paths."""
    replace = msgspec.structs.replace
    if job.fleet:
        job = replace(job, fleet=beside(job.fleet, folder))
    if job.participation.availability:
        availability = beside(job.participation.availability, folder)
        job = replace(job, participation=replace(job.participation, availability=availability))
    if job.data is not None:
        job = replace(job, data=job.data.counted_from(folder))
    if job.deployment is not None:
        fleets = {name: config.counted_from(folder) for name, config in job.deployment.fleets.items()}
        job = replace(job, deployment=replace(job.deployment, fleets=fleets))
    return job


def check(job: FederatedJob) -> None:
    """Check what needs no data."""
    check_is_local("run_dir", job.run_dir)
    check_trackers(job.track)
    Metrics(job.metrics)
    for config in job.callback:
        find_callback(config)
    if job.data is not None:
        refuse_description(job.data)
    check_combining(job)
    check_steps(job.federated.algorithm, load_algorithm(_spec(job)), job.local, job.federated.rounds)
    for field, seconds in (("execution.timeout", job.timeout_s), ("participation.deadline", job.deadline_s)):
        if not 1 <= seconds < math.inf:
            raise UserError(f"{field}: got {seconds:g} s, expected at least 1 s")
    if job.execution.planner and job.execution.planner not in COHORT_ALGORITHMS:
        raise unknown_name("execution.planner", job.execution.planner, COHORT_ALGORITHMS)
    if (deployment := job.deployment) is not None:
        for name in deployment.fleets:
            if name not in deployment.sites:
                raise unknown_name("site in deployment.fleets", name, deployment.sites)
    check_engine(job)
    check_emulation(job)
    if job.local.micro_batches > 1 and job.execution.clients_per_vmap != 1:
        raise refused("micro-batches", "clients together", job.local.micro_batches)


def _spec(job: FederatedJob) -> AlgorithmSpec:
    return AlgorithmSpec(name=job.federated.algorithm, options=job.federated.options)


def check_engine(job: FederatedJob) -> None:
    """UserError for executors that a Ray cluster cannot hold as the job says."""
    if job.execution.engine != "ray":
        if job.execution.ray != RayExecution():
            raise UserError(f"execution.ray: got options for engine {job.execution.engine!r}, expected engine 'ray'")
        return
    if not 0 < job.execution.ray.bandwidth_bytes_s < math.inf:
        raise UserError(f"execution.ray.bandwidth: got {job.execution.ray.bandwidth!r}, expected a finite bandwidth")
    if not job.scheme.processes:
        raise refused("a scheme without executors", "Ray", repr(job.execution.scheme))
    if job.fleet:
        raise refused("an emulated fleet", "Ray", repr(job.fleet))
    if job.devices not in ((AUTO,), ("cpu",)):
        raise refused("accelerators by name", "Ray", ", ".join(map(repr, job.devices)))


def check_emulation(job: FederatedJob) -> None:
    """UserError for executors that cannot be emulated as the job says."""
    if job.coordinator and not job.fleet:
        raise UserError(f"coordinator: got {job.coordinator!r} without a fleet, expected none")
    if job.fleet and (eta := job.execution.slow_down):
        raise UserError(f"execution.slow_down: got {len(eta)} numbers beside fleet {job.fleet!r}, expected one of them")
    if job.fleet and job.deployment is not None:
        raise refused("an emulated fleet", "sites", repr(job.fleet))
    job.executor_fleet(job.execution.executors if job.scheme.per == "given" and job.scheme.processes else 1)
    if job.scheme.per != "given" and job.execution.slow_down:
        raise refused("slow executors", "a scheme of its own", f"{len(job.execution.slow_down)} numbers")
    if (eta := job.execution.slow_down) and len(eta) != job.execution.executors:
        raise UserError(f"execution.slow_down: got {len(eta)}, expected {job.execution.executors}, one per executor")


def check_combining(job: FederatedJob) -> None:
    """Check settings of the combination of updates against each other."""
    rules = job.participation
    if job.admission.clip and job.admission.max_norm is None:
        raise UserError("admission.max_norm: missing, expected the norm to clip to")
    if job.privacy is not None and job.aggregation.rule != "declared":
        raise refused("robust aggregation", "client privacy", repr(job.aggregation.rule))
    if job.privacy is not None and job.admission.max_norm is not None:
        raise refused("a largest norm", "client privacy", f"{job.admission.max_norm:g}")
    if job.aggregation.fewest > rules.minimum:
        raise UserError(
            f"participation.minimum: got {rules.minimum}, expected at least {job.aggregation.fewest} for "
            f"{job.aggregation.described}"
        )
    check_site_noise(job.privacy, rules.minimum, secure=job.aggregation.secure)
    check_secure(job.aggregation, rules, job.admission, load_algorithm(_spec(job)))
    if rules.availability is not None and not 0 < rules.round_length_s < math.inf:
        raise UserError(f"participation.round_length: got {rules.round_length!r}, expected more than 0 s")
    if rules.poisson and (rules.weighted or rules.over_select > 1):
        raise refused("weighted clients", "Poisson sampling", "weighted" if rules.weighted else "over_select")


def check_deployment(job: FederatedJob) -> None:
    """UserError for one that cannot begin."""
    deployment = job.deployment
    if deployment is None:
        raise UserError("deployment: missing, expected the table with the sites that may take part")
    sites = len(deployment.sites)
    if len(set(deployment.sites)) < sites:
        raise UserError("deployment.sites: got a name twice, expected each once")
    if job.participation.availability is not None:
        raise refused("an availability trace", "sites", "one")
    if (deployment.start or 1) > sites:
        raise UserError(f"deployment.start: got {deployment.start}, expected at most the {sites} sites")
    if not 0 <= deployment.wait_s < math.inf:
        raise UserError(f"deployment.wait: got {deployment.wait_s:g} s, expected a finite time")
    if job.participation.minimum > sites:
        raise UserError(f"participation.minimum: got {job.participation.minimum}, expected at most the {sites} sites")
    job.participation.needed(sites)


def check_simulation(job: FederatedJob) -> None:
    """UserError for what sites can do only."""
    if job.participation.staleness and job.participation.poisson:
        raise refused("late updates", "Poisson sampling", job.participation.staleness)


def client_data(job: FederatedJob) -> ClientData:
    """The population. UserError for data that cannot be read or shared out."""
    sites = "" if job.deployment is None else ": this job has sites: `isthmus serve JOB` trains there"
    if job.data is None:
        raise UserError(f"data: missing, expected the data to share out among clients{sites}")
    data = job.data if job.federated.evaluate_every else job.data.training_alone()
    if data.kind == FEMNIST:
        if job.partition is not None:
            raise UserError(f"partition: got scheme {job.partition.scheme!r} for data that come by writers")
        return FemnistShaped(read_options(FEMNIST, data.located, FemnistOptions))
    if data.kind == LEAF and job.partition is None:
        return LeafClients(read_options(LEAF, data.located, LeafOptions))
    if job.partition is None and data.kind != CLIENTS:
        raise UserError(f"partition: missing, expected how the data is shared out among clients{sites}")
    return divided(data, job.partition, job.federated.seed)


def build(job: FederatedJob) -> nn.Module:
    """The model with the weights that its seed gives."""
    torch.manual_seed(job.federated.seed)
    with contextlib.redirect_stdout(sys.stderr):
        return build_model(job.model)


def members(
    job: FederatedJob, sizes: NDArray[np.int64], round_: int, here: NDArray[np.int64] | None = None
) -> NDArray[np.int64]:
    """The cohort of a round; with `here`, of those clients only."""
    return cohort(job.participation, sizes, job.federated.seed, round_, here)


def availability(job: FederatedJob, population: int) -> Availability | None:
    """When clients can take part; None for always. UserError for a round in which too few can."""
    rules = job.participation
    if rules.availability is None:
        return None
    found = read_availability(Path(rules.availability), population, rules.round_length_s)
    for round_ in range(job.federated.rounds):
        here = len(found.at_round(round_))
        if here < rules.minimum:
            raise UserError(
                f"{rules.availability}: in round {round_ + 1} {here} clients are available, expected at least "
                f"{rules.minimum} (participation.minimum)"
            )
    return found


def round_rules(job: FederatedJob, population: int, first_round: int) -> RoundRules:
    """How the job's rounds go, in a simulation and deployed. UserError for rounds that could never be committed."""
    rules = job.participation
    needed = population if rules.poisson else rules.needed(population)  # a round waits for all that were drawn
    if rules.minimum > (asked := population if rules.poisson else rules.asked(population)):
        raise UserError(f"participation.minimum: got {rules.minimum}, expected at most the {asked} clients of a round")
    return RoundRules(
        rounds=job.federated.rounds,
        first_round=first_round,
        passes=len(job.algorithm(population).passes),
        needed=needed,
        poisson=rules.poisson,
        quorum=rules.quorum,
        minimum=rules.minimum,
        deadline_s=job.deadline_s,
        timeout_s=job.timeout_s,
        attempts=rules.attempts,
        most_samples=job.aggregation.most_samples or 0,
    )


def accelerator_of(job: FederatedJob, executor: int) -> Accelerator:
    """Where it trains. To be called in the executor's own process: a process whose accelerator is at work cannot be
    copied."""
    return open_accelerator(job.devices[executor % len(job.devices)], "execution.device")


def executors(job: FederatedJob, population: int) -> int:
    """How many executors the scheme takes."""
    counts = {"cohort": job.participation.asked(population), "population": population}
    return counts.get(job.scheme.per, job.execution.executors if job.scheme.processes else 1)


def emulation(job: FederatedJob, executor: int) -> SpeedEmulation:
    """How executor number `executor` is to differ from this machine."""
    eta = job.execution.slow_down[executor] if job.execution.slow_down else 0.0
    return SpeedEmulation(
        executor=executor,
        eta=eta,
        unstable=job.execution.unstable,
        noise=job.execution.noise,
        rounds=job.federated.rounds,
        seed=job.federated.seed,
    )


def identity(job: FederatedJob, data: ClientData, numbers: int) -> RunIdentity:
    """Return what a resumed run must have in common with the one before; where clients train is not part of it."""
    return _identity(job, numbers, data.fingerprint, len(data.sizes))


def site_identity(job: FederatedJob, numbers: int) -> RunIdentity:
    """As `identity`; the data are the sites'."""
    assert job.deployment is not None, "a job with sites"
    return _identity(job, numbers, f"of the sites {', '.join(job.deployment.sites)}", len(job.deployment.sites))


def _identity(job: FederatedJob, numbers: int, data: str, clients: int) -> RunIdentity:
    return RunIdentity(
        algorithm=job.federated.algorithm,
        options=job.federated.options,
        model=msgspec.json.encode(job.model).decode(),
        local=msgspec.json.encode(job.local).decode(),
        numbers=numbers,
        data=data,
        seed=job.federated.seed,
        clients=clients,
        combining=msgspec.json.encode([getattr(job, table) for table in COMBINING]).decode(),
        participation=str(job.accounting(clients) or ""),
    )
