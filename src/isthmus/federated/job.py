"""A federated job: which model, whose data, which algorithm, who takes part, on how many executors, or at which real
sites. One TOML file."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal, cast

import msgspec
import numpy as np
import torch
from msgspec import Meta
from numpy.typing import NDArray
from torch import nn

from isthmus.accelerators import AUTO, Accelerator, open_accelerator
from isthmus.callbacks import find_callback
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
from isthmus.documents import beside
from isthmus.errors import IsthmusError, UserError, unknown_name
from isthmus.extensions import import_object, read_options
from isthmus.federated.accounting import Accounting
from isthmus.federated.admission import AdmissionRules, Guarantee, Privacy, first_state, private, tried
from isthmus.federated.algorithms import Algorithm, AlgorithmSpec, load_algorithm
from isthmus.federated.algorithms.registry import GIVEN
from isthmus.federated.emulated_speed import ExecutorFleet, SpeedEmulation, executor_fleet
from isthmus.federated.local import FederatedTraining, LocalConfig, OptimizerTables, Rate, StepsByRound, what_is_set
from isthmus.federated.pipeline import PipelineConfig
from isthmus.federated.resident import Resident, is_buffer
from isthmus.federated.robust import Aggregation, Robust
from isthmus.federated.secure.rules import check_secure
from isthmus.federated.secure.site_noise import check_site_noise
from isthmus.federated.server import RunIdentity, Server
from isthmus.job.settings import JobDocument, JobReader
from isthmus.models import build_model
from isthmus.old_spelling import respelled
from isthmus.planners.cohort import COHORT_ALGORITHMS
from isthmus.protocol.federated_participation import Choose, Integers, Participation, cohort
from isthmus.protocol.federated_planning import RoundRules
from isthmus.units import parse_duration

FIELD = "federated.participation.select"


def chooser(rules: Participation) -> Choose | None:
    """Return what chooses clients; None where they are drawn. UserError for a name of no function, and, when
    it is called, for a function that fails or chooses what it must not."""
    if rules.select is None:
        return None
    if rules.weighted or rules.poisson:
        other = "weighted" if rules.weighted else "poisson"
        raise UserError(f"federated.participation: got select and {other}, expected one of them")
    function = import_object(FIELD, rules.select)
    if not callable(function):
        raise UserError(f"{FIELD}: got {rules.select!r}, expected a function")
    own = cast("Callable[..., Iterable[int]]", function)

    def choose(round_: int, among: Integers, samples: Integers, wanted: int, draws: np.random.Generator) -> Integers:
        if wanted == 0:
            return among[:0]
        try:
            found = [int(client) for client in own(round_, among.copy(), samples, wanted, draws)]
        except IsthmusError:
            raise
        except Exception as e:  # the user's own code
            raise UserError(f"{FIELD}: {rules.select} raised {type(e).__name__}: {e}") from e
        if not 1 <= len(set(found)) == len(found) <= wanted or not set(found) <= set(among.tolist()):
            what = f"expected 1 to {wanted} of the clients that it was given, each once"
            raise UserError(f"{FIELD}: {rules.select} chose {found!s:.80} in round {round_}, {what}")
        return np.array(found, dtype=np.int64)

    return choose


class Scheme(msgspec.Struct, frozen=True, kw_only=True):
    """The differences between schemes; everything else is the same code."""

    description: str
    processes: bool = True  # whether executors are processes of their own
    per: str = "given"  # how many executors: as `given`, or one per client of the `cohort` or of the `population`
    planner: str = "certified"
    warm_up_rounds: int = 0
    steals: bool = False
    single: bool = False


_SCHEMES: Mapping[str, Scheme] = {
    "sp": Scheme(description="everything in one process", processes=False, planner="uniform"),
    "rw": Scheme(description="one process per client of the population", per="population"),
    "sd": Scheme(description="one process per client of the cohort", per="cohort", planner="uniform"),
    "fa": Scheme(description="one client at a time per executor, its result back at once", single=True),
    "parrot": Scheme(
        description="clients in turn by fitted times, sums on the executor", planner="parrot", warm_up_rounds=1
    ),
    "ours": Scheme(description="certified schedules, and idle executors take clients of others", steals=True),
}


def scheme(name: str) -> Scheme:
    """Raises UserError for an unknown name."""
    if name not in _SCHEMES:
        raise unknown_name("scheme", name, _SCHEMES)
    return _SCHEMES[name]


Positive = Annotated[int, Meta(ge=1)]
NotNegative = Annotated[int, Meta(ge=0)]


class RayRuntime(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The Ray cluster of `backend = "ray"`, and what each executor reserves there."""

    address: str = ""
    """HOST:PORT of the cluster's head; by default RAY_ADDRESS, or else the cluster that was started on this machine."""
    cpus: Annotated[float, Meta(gt=0)] = 1.0  # CPUs that Ray reserves for each executor.
    gpus: Annotated[float, Meta(ge=0)] = 0.0
    """GPUs, or the share of one, that Ray reserves for each executor; it sees no others."""


class FederatedRuntime(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where clients train."""

    scheme: str = "ours"  # How clients come to executors: ours, parrot, fa, sd, rw or sp.
    backend: Literal["processes", "ray"] = "processes"
    """Where `isthmus train` starts executors: as processes of this machine, or on a Ray cluster."""
    ray: RayRuntime = RayRuntime()  # Options of Ray.
    executors: NotNegative = 2
    """0: as many as memory and cores hold, and as train faster together, by measurement at the start of the run; on a
    Ray cluster as many as it has room for."""
    device: str | Annotated[tuple[str, ...], Meta(min_length=1)] = AUTO
    """Where executors train: `auto` (an accelerator of this machine, else the CPU), `cpu`, `cuda:1`, ... Of several,
    executor number k has number k modulo their count: `["cuda:0", "cuda:1"]`."""
    planner: str = ""  # In place of the scheme's.
    steals: bool | None = None  # In place of the scheme's.
    window_rounds: NotNegative = 5  # Times of so many rounds are fitted (Parrot's time window); 0: of all.
    slow_down: tuple[Annotated[float, Meta(ge=0)], ...] = ()
    """Emulation: eta of each executor, which sleeps eta T after training for T."""
    unstable: bool = False  # Emulation: speeds that change from round to round.
    noise: Annotated[float, Meta(ge=0, le=2)] = 0.0
    """Emulation: sigma of a log-normal factor of mean 1 in every client's time."""
    clients_per_vmap: NotNegative = 1
    """Clients of equal numbers of samples that are trained as one; 0: as many as a measurement finds best."""
    threads: Positive = 1  # Torch threads of each executor.
    timeout: str = "60 s"  # Silence after which an executor counts as lost.


class Deployment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sites in place of executors: devices of the fleet that have a client's data each."""

    sites: Annotated[tuple[str, ...], Meta(min_length=1)]
    """Names of the devices that may take part; their order numbers the clients."""
    start: Annotated[int, Meta(ge=1)] | None = None
    """The first round waits for so many of them; for all, where it is not given."""
    wait: str = "5 s"
    """Later, and after a restart: as soon as `federated.participation.minimum` are here, so long for the others."""
    fleets: dict[str, PipelineConfig] = {}
    """For `isthmus simulate`: of sites that are fleets, what their own files say in table [pipeline]."""

    @property
    def wait_s(self) -> float:
        return parse_duration(self.wait, "federated.deployment.wait")


FEMNIST = "femnist"
ALL = Participation(fraction=1.0)  # every client takes part in each round


class FederatedConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The algorithm, how long, whose data, and who takes part."""

    HINTS: ClassVar[Mapping[str, str]] = Privacy.HINTS
    algorithm: str = "fedavg"  # One of `isthmus algorithms`, or `package.module:Class` of your own.
    options: dict[str, object] = {}  # Settings of the algorithm: `isthmus describe NAME` lists them.
    rounds: Positive = 10  # Rounds of the whole run.
    partition: PartitionSpec | None = None  # How the data are shared out among simulated clients.
    participation: Participation = ALL  # Which clients take part in a round, and when a round closes.
    admission: AdmissionRules = AdmissionRules()  # Conditions under which an update is accepted.
    aggregation: Aggregation = Aggregation()  # How updates are combined.
    deployment: Deployment | None = None  # Real sites in place of simulated clients.


class FederatedJob(JobDocument, frozen=True, kw_only=True, forbid_unknown_fields=True):
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
    LENGTH: ClassVar[str] = "federated.rounds"
    data: DataSpec | None = None
    """The population's, shared out by `federated.partition`; of sites, the coordinator's own to evaluate on, if any."""
    federated: FederatedConfig  # The algorithm, its clients and its rounds.
    training: FederatedTraining = FederatedTraining()  # How clients train in a round, when to evaluate and to save.
    optimizer: OptimizerTables = ()
    """In place of SGD: one table [[optimizer]] per group of parameters. A client begins every round without what it
    kept of gradients."""
    learning_rate: Rate = None
    """A number: of a client's SGD, by default 0.05. A table: the learning rate by round, which stays for all steps of
    one."""
    privacy: Privacy | None = None  # Differential privacy of clients; without this table updates are not noised.
    runtime: FederatedRuntime = FederatedRuntime()  # Where simulated clients train.
    fleet: str = ""  # Emulation: a built-in fleet or a path to a fleet TOML, whose devices are the executors.
    coordinator: str = ""  # A device of that fleet, on whose machine the coordinator is; the first one, if not given.

    @property
    def kind(self) -> Literal["federated"]:
        """Its program."""
        return "federated"

    @property
    def has_sites(self) -> bool:
        """Whether it trains at sites, in place of simulated clients."""
        return self.federated.deployment is not None

    @property
    def length(self) -> int:
        """Rounds of the whole run."""
        return self.federated.rounds

    def unset_by(self, overrides: Mapping[str, object]) -> dict[str, object]:
        """A share of the clients that nobody gave, beside a number of them."""
        counted = self.federated.participation == ALL and "federated.participation.clients" in overrides
        return {"federated.participation.fraction": None} if counted else {}

    @property
    def local(self) -> LocalConfig:
        """Return how a client trains."""
        return self.training.local(self.learning_rate, self.optimizer)

    @property
    def devices(self) -> tuple[str, ...]:
        """Names of the accelerators that executors have in turn."""
        return (self.runtime.device,) if isinstance(self.runtime.device, str) else self.runtime.device

    @property
    def scheme(self) -> Scheme:
        """Return how executors get clients."""
        return scheme(self.runtime.scheme)

    def altered(self, **federated: object) -> FederatedJob:
        """The job with other values of its table [federated]."""
        return msgspec.structs.replace(self, federated=msgspec.structs.replace(self.federated, **federated))

    def executor_fleet(self, executors: int) -> ExecutorFleet | None:
        """The emulated fleet with so many executors, 0 for one on each device; None without a fleet. UserError."""
        return executor_fleet(self.fleet, self.coordinator, executors) if self.fleet else None

    @property
    def owner_column(self) -> str:
        """The column that says whose a sample is, which no model is given; empty where none does."""
        partition = self.federated.partition
        return partition.column if partition is not None and partition.scheme == "natural" else ""

    @property
    def timeout_s(self) -> float:
        """Seconds without a message after which an executor or a site is lost."""
        return parse_duration(self.runtime.timeout, "runtime.timeout")

    @property
    def deadline_s(self) -> float:
        """Seconds after which a round closes with the updates received so far."""
        return parse_duration(self.federated.participation.deadline, "federated.participation.deadline")

    def algorithm(self, population: int, *, deployed: bool = False) -> Algorithm:
        """With what the job puts around it; where it is not `deployed`, in a simulation."""
        inner = load_algorithm(_spec(self))
        if self.privacy is not None:
            expected, minimum = self.federated.participation.expected(population), self.federated.participation.minimum
            return private(inner, self.privacy, expected, minimum, simulated=not deployed)
        rule = self.federated.aggregation
        return inner if rule.rule == "declared" else Robust(inner=inner, rule=rule)

    @property
    def bounds(self) -> AdmissionRules:
        """The bounds of every update."""
        return self.federated.admission if self.privacy is None else self.privacy.bounds

    def accounting(self, population: int) -> Accounting | None:
        """The conditions of epsilon; None without privacy."""
        if self.privacy is None:
            return None
        return Accounting(
            privacy=self.privacy,
            participation=self.federated.participation,
            population=population,
            deployed=self.has_sites,
            passes=len(self.algorithm(population).passes),
        )


def kind_of(job: Mapping[str, object], source: str) -> Literal["pipeline", "federated"]:
    """The program of a job's document."""
    return "federated" if "federated" in respelled(job, source) else "pipeline"


def _counted_from(job: FederatedJob, folder: str) -> FederatedJob:
    """Return the job as a file in this folder says it: with its paths."""
    replace = msgspec.structs.replace
    if job.fleet:
        job = replace(job, fleet=beside(job.fleet, folder))
    if job.data is not None:
        job = replace(job, data=job.data.counted_from(folder))
    rounds = job.federated
    if rounds.participation.availability:
        availability = beside(rounds.participation.availability, folder)
        rounds = replace(rounds, participation=replace(rounds.participation, availability=availability))
    if rounds.deployment is not None:
        fleets = {name: config.counted_from(folder) for name, config in rounds.deployment.fleets.items()}
        rounds = replace(rounds, deployment=replace(rounds.deployment, fleets=fleets))
    return replace(job, federated=rounds)


def checked(job: FederatedJob) -> FederatedJob:
    """The job. UserError for what can be seen without its data."""
    job.check_common()
    for config in job.callback:
        find_callback(config)
    if job.data is not None:
        refuse_description(job.data)
    if job.training.precision == "fp16":
        raise refused("fp16", "federated", "'fp16'")
    check_combining(job)
    try:
        local = job.local
    except ValueError as e:
        raise UserError(str(e)) from None
    check_steps(job.federated.algorithm, load_algorithm(_spec(job)), local, job.federated.rounds)
    for field, seconds in (("runtime.timeout", job.timeout_s), ("federated.participation.deadline", job.deadline_s)):
        if not 1 <= seconds < math.inf:
            raise UserError(f"{field}: got {seconds:g} s, expected at least 1 s")
    if job.runtime.planner and job.runtime.planner not in COHORT_ALGORITHMS:
        raise unknown_name("runtime.planner", job.runtime.planner, COHORT_ALGORITHMS)
    if (deployment := job.federated.deployment) is not None:
        for name in deployment.fleets:
            if name not in deployment.sites:
                raise unknown_name("site in federated.deployment.fleets", name, deployment.sites)
    check_engine(job)
    check_emulation(job)
    return job


FEDERATED = JobReader(FederatedJob, _counted_from, checked)


def load_federated_job(path: Path, overrides: Mapping[str, object] = {}) -> FederatedJob:
    """Return the same as `JobReader.load`."""
    return FEDERATED.load(path, overrides)


def _spec(job: FederatedJob) -> AlgorithmSpec:
    return AlgorithmSpec(name=job.federated.algorithm, options=job.federated.options)


def check_engine(job: FederatedJob) -> None:
    """UserError for executors that a Ray cluster cannot hold as the job says."""
    if job.runtime.backend != "ray":
        if job.runtime.ray != RayRuntime():
            raise UserError(f"runtime.ray: got options for backend {job.runtime.backend!r}, expected backend 'ray'")
        return
    if not job.scheme.processes:
        raise refused("a scheme without executors", "Ray", repr(job.runtime.scheme))
    if job.fleet:
        raise refused("an emulated fleet", "Ray", repr(job.fleet))
    if job.devices not in ((AUTO,), ("cpu",)):
        raise refused("accelerators by name", "Ray", ", ".join(map(repr, job.devices)))


def check_emulation(job: FederatedJob) -> None:
    """UserError for executors that cannot be emulated as the job says."""
    if job.coordinator and not job.fleet:
        raise UserError(f"coordinator: got {job.coordinator!r} without a fleet, expected none")
    if job.fleet and (eta := job.runtime.slow_down):
        raise UserError(f"runtime.slow_down: got {len(eta)} numbers beside fleet {job.fleet!r}, expected one of them")
    if job.fleet and job.has_sites:
        raise refused("an emulated fleet", "sites", repr(job.fleet))
    job.executor_fleet(job.runtime.executors if job.scheme.per == "given" and job.scheme.processes else 1)
    if job.scheme.per != "given" and job.runtime.slow_down:
        raise refused("slow executors", "a scheme of its own", f"{len(job.runtime.slow_down)} numbers")
    if (eta := job.runtime.slow_down) and len(eta) != job.runtime.executors:
        raise UserError(f"runtime.slow_down: got {len(eta)}, expected {job.runtime.executors}, one per executor")


def check_combining(job: FederatedJob) -> None:
    """Check settings of the combination of updates against each other."""
    federated, rules = job.federated, job.federated.participation
    if federated.admission.clip and federated.admission.max_norm is None:
        raise UserError("federated.admission.max_norm: missing, expected the norm to clip to")
    if job.privacy is not None and federated.aggregation.rule != "declared":
        raise refused("robust aggregation", "client privacy", repr(federated.aggregation.rule))
    if job.privacy is not None and federated.admission.max_norm is not None:
        raise refused("a largest norm", "client privacy", f"{federated.admission.max_norm:g}")
    if federated.aggregation.fewest > rules.minimum:
        raise UserError(
            f"federated.participation.minimum: got {rules.minimum}, expected at least "
            f"{federated.aggregation.fewest} for {federated.aggregation.described}"
        )
    check_site_noise(job.privacy, rules.minimum, secure=federated.aggregation.secure)
    check_secure(federated.aggregation, rules, federated.admission, load_algorithm(_spec(job)))
    if rules.availability is not None and not 0 < rules.round_length_s < math.inf:
        raise UserError(f"federated.participation.round_length: got {rules.round_length!r}, expected more than 0 s")
    if rules.poisson and (rules.weighted or rules.over_select > 1):
        raise refused("weighted clients", "Poisson sampling", "weighted" if rules.weighted else "over_select")
    chooser(rules)


def check_deployment(job: FederatedJob) -> None:
    """UserError for one that cannot begin."""
    deployment, rules = job.federated.deployment, job.federated.participation
    if deployment is None:
        raise UserError("federated.deployment: missing, expected the table with the sites that may take part")
    sites = len(deployment.sites)
    if len(set(deployment.sites)) < sites:
        raise UserError("federated.deployment.sites: got a name twice, expected each once")
    if rules.availability is not None:
        raise refused("an availability trace", "sites", "one")
    if (deployment.start or 1) > sites:
        raise UserError(f"federated.deployment.start: got {deployment.start}, expected at most the {sites} sites")
    if not 0 <= deployment.wait_s < math.inf:
        raise UserError(f"federated.deployment.wait: got {deployment.wait_s:g} s, expected a finite time")
    if rules.minimum > sites:
        raise UserError(f"federated.participation.minimum: got {rules.minimum}, expected at most the {sites} sites")
    rules.needed(sites)


def check_simulation(job: FederatedJob) -> None:
    """UserError for what sites can do only."""
    if job.federated.participation.staleness and job.federated.participation.poisson:
        raise refused("late updates", "Poisson sampling", job.federated.participation.staleness)


def client_data(job: FederatedJob) -> ClientData:
    """The population. UserError for data that cannot be read or shared out."""
    partition = job.federated.partition
    sites = ": this job has sites: `isthmus serve JOB` trains there" if job.has_sites else ""
    if job.data is None:
        raise UserError(f"data: missing, expected the data to share out among clients{sites}")
    data = job.data if job.training.eval_every else job.data.training_alone()
    if data.kind == FEMNIST:
        if partition is not None:
            raise UserError(f"federated.partition: got scheme {partition.scheme!r} for data that come by writers")
        return FemnistShaped(read_options(FEMNIST, data.located, FemnistOptions))
    if data.kind == LEAF and partition is None:
        return LeafClients(read_options(LEAF, data.located, LeafOptions))
    if partition is None and data.kind != CLIENTS:
        raise UserError(f"federated.partition: missing, expected how the data is shared out among clients{sites}")
    return divided(data, partition, job.training.seed)


def build(job: FederatedJob) -> nn.Module:
    """The model with the weights that its seed gives."""
    torch.manual_seed(job.training.seed)
    with contextlib.redirect_stdout(sys.stderr):
        return build_model(job.model)


def members(
    job: FederatedJob, sizes: NDArray[np.int64], round_: int, here: NDArray[np.int64] | None = None
) -> NDArray[np.int64]:
    """The cohort of a round; with `here`, of those clients only."""
    rules = job.federated.participation
    return cohort(rules, sizes, job.training.seed, round_, here, chooser(rules))


def availability(job: FederatedJob, population: int) -> Availability | None:
    """Return when clients can take part; None for always. UserError for a round in which too few can."""
    rules = job.federated.participation
    if rules.availability is None:
        return None
    found = read_availability(Path(rules.availability), population, rules.round_length_s)
    for round_ in range(job.federated.rounds):
        here = len(found.at_round(round_))
        if here < rules.minimum:
            raise UserError(
                f"{rules.availability}: in round {round_ + 1} {here} clients are available, expected at least "
                f"{rules.minimum} (federated.participation.minimum)"
            )
    return found


def round_rules(job: FederatedJob, population: int, first_round: int) -> RoundRules:
    """Return how the job's rounds go, in a simulation and deployed. UserError for rounds that could never be
    committed."""
    rules = job.federated.participation
    needed = population if rules.poisson else rules.needed(population)  # a round waits for all that were drawn
    if rules.minimum > (asked := population if rules.poisson else rules.asked(population)):
        raise UserError(
            f"federated.participation.minimum: got {rules.minimum}, expected at most the {asked} clients of a round"
        )
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
        most_samples=job.federated.aggregation.most_samples or 0,
    )


def accelerator_of(job: FederatedJob, executor: int) -> Accelerator:
    """Where it trains. To be called in the executor's own process: a process whose accelerator is at work cannot be
    copied."""
    return open_accelerator(job.devices[executor % len(job.devices)], "runtime.device")


def executors(job: FederatedJob, population: int) -> int:
    """Return how many executors the scheme takes."""
    counts = {"cohort": job.federated.participation.asked(population), "population": population}
    return counts.get(job.scheme.per, job.runtime.executors if job.scheme.processes else 1)


def emulation(job: FederatedJob, executor: int) -> SpeedEmulation:
    """Return how executor number `executor` is to differ from this machine."""
    eta = job.runtime.slow_down[executor] if job.runtime.slow_down else 0.0
    return SpeedEmulation(
        executor=executor,
        eta=eta,
        unstable=job.runtime.unstable,
        noise=job.runtime.noise,
        rounds=job.federated.rounds,
        seed=job.training.seed,
    )


def identity(job: FederatedJob, data: ClientData, numbers: int) -> RunIdentity:
    """Return what a resumed run must have in common with the one before; where clients train is not part of it."""
    return _identity(job, numbers, data.fingerprint, len(data.sizes))


def site_identity(job: FederatedJob, numbers: int) -> RunIdentity:
    """Return the same as `identity`; the data are the sites'."""
    assert job.federated.deployment is not None, "a job with sites"
    sites = job.federated.deployment.sites
    return _identity(job, numbers, f"of the sites {', '.join(sites)}", len(sites))


def _identity(job: FederatedJob, numbers: int, data: str, clients: int) -> RunIdentity:
    combining = [job.federated.aggregation, job.privacy, job.federated.admission]
    local = msgspec.to_builtins(job.local)
    if local["precision"] == "fp32":
        del local["precision"]  # runs of versions before have none
    return RunIdentity(
        algorithm=job.federated.algorithm,
        options=job.federated.options,
        model=msgspec.json.encode(job.model).decode(),
        local=msgspec.json.encode(local).decode(),
        numbers=numbers,
        data=data,
        seed=job.training.seed,
        clients=clients,
        combining=msgspec.json.encode(combining).decode(),
        participation=str(job.accounting(clients) or ""),
    )


def check_steps(name: str, algorithm: Algorithm, local: LocalConfig, rounds: int) -> None:
    """UserError for optimizers and learning rates that cannot be, and for those that the algorithm of this name does
    not allow: its corrections are defined for SGD, or its clients make steps of SGD themselves."""
    by_round = StepsByRound(local.tabled(rounds), rounds)
    by_round.check()
    if local.is_plain:
        return
    if reason := algorithm.needs_sgd:
        field, got = what_is_set(local.optimizer, local.clip_norm)
        raise refused("optimizers", "an algorithm of SGD", f"{got} for {name.removeprefix(GIVEN)}", field, reason)
    model = torch.zeros(1)
    broadcast, state = algorithm.broadcast(algorithm.init_server(model)), first_state(algorithm, model)
    for one in algorithm.passes:
        tried(one, broadcast, state, lambda: by_round.at(0).learning_rate)


def promised(job: FederatedJob, population: int) -> Guarantee | None:
    """Return the guarantee of all rounds; None without privacy. UserError where epsilon cannot be computed."""
    if (accounting := job.accounting(population)) is None:
        return None
    resident = Resident(build(job))
    server = Server(job.algorithm(population), resident.vector(), resident.buffers(), population)
    return accounting.guarantee(job.federated.rounds, server.numbers)


def check_updates(job: FederatedJob, server: Server) -> None:
    """UserError for an algorithm whose updates cannot be late, clipped as one, or combined by the job's rule."""
    name = job.federated.algorithm
    if job.federated.participation.staleness and (server.keeps or server.passes > 1):
        raise refused("late updates", "states or passes", job.federated.participation.staleness)
    if job.privacy is not None and (single := _single_number(server)):
        raise refused("a single number", "client privacy", f"{name}, which returns {single!r},")
    if job.federated.aggregation.rule != "declared" and server.keeps and not _is_free(job):
        raise refused("robust aggregation", "summed states", repr(job.federated.aggregation.rule))


def _is_free(job: FederatedJob) -> bool:
    """Return whether the server's values do not depend on what clients keep."""
    spec = AlgorithmSpec(name=job.federated.algorithm, options=job.federated.options)
    return load_algorithm(spec).state_can_be_lost


def _single_number(server: Server) -> str:
    """The name of one beside a larger value; empty for none."""
    for forms in server.forms:
        sizes = {name: math.prod(form.shape) for name, form in forms.items() if not is_buffer(name)}
        for name, size in sizes.items():
            if size == 1 < max(sizes.values()):
                return name
    return ""
