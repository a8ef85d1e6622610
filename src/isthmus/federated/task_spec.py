"""A coordinator's request to a site, and the owner's permission: both must match before anything runs.

Code does not travel: the offer names an algorithm and a model, and the site loads its own if its owner's file names
the same. The coordinator says how to train (steps, learning rate, seed), as in a simulation.

Requests, the owner's answers, and the values that left the site are in `site-log.jsonl`, in the folder of the site's
key, one line each.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from isthmus.accelerators import AUTO
from isthmus.data import DataSpec
from isthmus.data.description import refuse_description
from isthmus.documents import convert, folder_of, read_toml
from isthmus.errors import PeerError, UserError, unknown_name
from isthmus.federated.admission import AdmissionRules, Privacy, Private, bounded
from isthmus.federated.algorithms import Algorithm, AlgorithmSpec, ClientUpdate, load_algorithm
from isthmus.federated.local import MOST_ROUNDS, RATE, LocalConfig
from isthmus.federated.pipeline import PipelineConfig, check_descends
from isthmus.federated.robust import Aggregation
from isthmus.federated.secure.rules import secure_rules
from isthmus.fleet import resolve_fleet
from isthmus.graph.metrics import Metrics
from isthmus.models import ModelSpec
from isthmus.planners import check_planner
from isthmus.protocol.federated_messages import (
    MOST_SAMPLES,
    NONE,
    ExecutorOrder,
    PhaseClosed,
    PhaseDropped,
    PhaseId,
    PhaseOpened,
    TasksGranted,
    TasksRecalled,
)
from isthmus.protocol.federated_planning import SecureRules
from isthmus.protocol.secure_messages import KeysListed, SecureOrder, SharesDelivered, UnmaskAsked
from isthmus.protocol.secure_site import round_key
from isthmus.run_files import LinesFile
from isthmus.training.learning_rate import LearningRate
from isthmus.units import parse_duration
from isthmus.wire_types import MOST_CLIENTS, MOST_ID, Client, Count, Many, Name, NotNegative, Positive, Seed

RUN_NAME = "^[0-9a-f]{32}$"  # the name of a run at its sites


class TaskSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The work, and which client the site is."""

    job: Name
    run: Annotated[str, Meta(pattern=RUN_NAME, max_length=MOST_ID)]
    """The same after a restart: the site keeps its client's states under it."""
    algorithm: AlgorithmSpec
    model: ModelSpec
    local: LocalConfig
    seed: Seed
    client: Client
    owner_column: Name = ""  # the column of data that says whose a sample is, which no model is given
    aggregation: Aggregation = Aggregation()  # whether updates are masked, and the most samples of a site
    admission: AdmissionRules = AdmissionRules()  # the bounds to which a site clips its update where updates are masked
    privacy: Privacy | None = None  # the noise that covers the updates
    minimum: Annotated[int, Meta(ge=1, le=MOST_CLIENTS)] = 1  # updates in a sum
    rounds: Count = 0  # rounds of the whole run
    attempts: Positive = 3  # at a round
    sites: Many[Name] = ()  # who may take part
    epsilon: NotNegative | None = None  # epsilon of the whole run, as the coordinator accounts it; None: no promise
    epsilon_so_far: NotNegative | None = None  # epsilon of the rounds that were committed before

    @property
    def secure_rules(self) -> SecureRules | None:
        """None where updates are not masked."""
        return secure_rules(self.aggregation, self.minimum)

    @property
    def bounds(self) -> AdmissionRules:
        """The bounds to which a site clips its update, where it does so itself."""
        return self.admission if self.privacy is None else self.privacy.bounds

    def around(self, algorithm: Algorithm) -> Algorithm:
        """With what the job puts around it, where the site makes the sum of its update itself."""
        if self.privacy is None or not self.aggregation.secure:
            return algorithm
        return Private(inner=algorithm, privacy=self.privacy, expected=1)

    def clip(self, algorithm: Algorithm) -> Callable[[ClientUpdate], ClientUpdate]:
        """Return the function by which a site clips its update, and the coordinator one that was not clipped."""
        bounds = self.bounds
        if not bounds.clip:
            return lambda update: update
        if self.privacy is not None:
            algorithm = Private(inner=algorithm, privacy=self.privacy, expected=1)
        return lambda update: bounded(update, bounds, algorithm.change)

    def check_samples(self, samples: int) -> None:
        """UserError for more than the coordinator counts on."""
        most = self.aggregation.most_samples
        if most is not None and samples > most:
            raise UserError(f"data: this site has {samples} samples, the coordinator counts on at most {most}")

    def check_site(self, name: str) -> None:
        """PeerError where the coordinator takes the site of this name for another one's client, for sums of more
        updates than there are sites, and for a schedule over more rounds than anybody steps through."""
        if self.sites and self.sites[self.client : self.client + 1] != (name,):
            number = self.sites.index(name) if name in self.sites else "none"
            raise PeerError(f"coordinator: called site {name!r} client {self.client} of the run, expected {number}")
        _check("updates in a sum", self.minimum, 1, max(1, len(self.sites)))
        if isinstance(self.local.learning_rate, LearningRate):
            _check("a schedule over rounds", self.rounds, 1, MOST_ROUNDS)

    def check_order(self, order: ExecutorOrder | SecureOrder, passes: int, samples: int) -> None:
        """PeerError for a number that this run does not have, and for what no site is asked, at a site that told the
        coordinator of so many samples: nothing is trained for it. The algorithm's `passes` are those of a round."""
        match order:
            case PhaseOpened(opening=opening, tasks=tasks):
                self._check_phase(phase := opening.phase, passes)
                _check("durable round", opening.durable_round, -1, phase.round - 1, shown=1)
                _check("clients at this site", len(tasks), 1, 1)
                _check("clients", opening.clients, 1, max(1, len(self.sites)))
                least, most = self._samples_of_a_site
                others = opening.clients - 1
                _check("samples", opening.samples, samples + others * least, samples + others * most)
                (task,) = tasks
                _check("client", task.client, self.client, self.client)
                _check("samples of this site", task.samples, samples, samples)
                _check("rounds late", task.late, 0, 0)  # in a simulation alone
                # A later pass goes on from the state of the one before.
                _check("state", task.state, NONE, phase.round - (phase.number == 0))
            case TasksGranted() | TasksRecalled() | PhaseClosed():
                raise PeerError(f"coordinator: sent {type(order).__name__}, which no site gets: it has one client")
            case KeysListed() | SharesDelivered() | UnmaskAsked() if not self.aggregation.secure:
                raise PeerError(f"coordinator: sent {type(order).__name__}, expected none: updates are not masked")
            case _:
                self._check_phase(order.phase, passes)
                for client in order.kept if isinstance(order, PhaseDropped) else ():
                    _check("client", client, self.client, self.client)

    def _check_phase(self, phase: PhaseId, passes: int) -> None:
        _check("round", phase.round, 0, self.rounds - 1, shown=1)
        _check("attempt", phase.attempt, 0, self.attempts - 1, shown=1)
        _check("pass", phase.number, 0, passes - 1, shown=1)

    @property
    def _samples_of_a_site(self) -> tuple[int, int]:
        """The least and the most that one can say."""
        stated = self.aggregation.most_samples
        return (1, MOST_SAMPLES) if stated is None else (stated, stated)


def _check(what: str, got: int, least: int, most: int, shown: int = 0) -> None:
    """Its message counts numbers from `shown` on."""
    if not least <= got <= most:
        expected = f"{least + shown}" + ("" if least == most else f" to {most + shown}")
        raise PeerError(f"coordinator: asked for {what} {got + shown} of the run, expected {expected}")


class Approval(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whether a run that the file allows goes on at this site. Every rule must hold."""

    ask: bool = False  # A person says yes or no, once for each run: `isthmus site yes`, `isthmus site no`.
    secure: bool = False  # Updates leave this site under masks only.
    max_epsilon: Annotated[float, Meta(gt=0)] | None = None
    """The most epsilon of the whole run; a run without such a promise is refused."""
    max_rounds: Annotated[int, Meta(ge=1)] | None = None  # The most rounds of the whole run.
    min_sites: Annotated[int, Meta(ge=1)] = 1  # Sites that may take part, this one among them.
    sites: tuple[str, ...] = ()
    """The only sites that may take part, this one among them; none: any. `NAME`, or `NAME:ID` with the whole id of its
    device: under secure aggregation no other device is a neighbour of that name."""


class SiteConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A site's own file: what may run there, and its data, which stay."""

    job: str  # Name of the only job that may run here.
    algorithm: AlgorithmSpec  # The only algorithm that may run here, with its options.
    model: ModelSpec  # The only model that may be trained here, with its options.
    data: DataSpec  # This site's data. They are never sent.
    approval: Approval = Approval()  # Whether a run goes on here, by rule or by a person's word.
    metrics: tuple[str, ...] = ()
    """Metrics of its own data that this site reports in every round, with the loss: `accuracy`, `perplexity` or a
    function of its own. None: nothing. Under masks or noise they stay in this site's log."""
    threads: Annotated[int, Meta(ge=1)] = 1  # Torch threads.
    device: str = AUTO  # Where it trains: `auto` (an accelerator of this machine, else the CPU), `cpu`, `cuda:1`, ...
    pipeline: PipelineConfig | None = None  # For a site that is a fleet: its devices train its client together.
    slow_down: Annotated[float, Meta(ge=0)] = 0.0  # Emulation: the site sleeps so many times as long as it trained.

    def check(self, task_spec: TaskSpec) -> None:
        """UserError for an offer of anything else. Nothing of it has been loaded."""
        for field, got, expected in (
            ("job", task_spec.job, self.job),
            ("algorithm", _described(task_spec.algorithm), _described(self.algorithm)),
            ("model", _described(task_spec.model), _described(self.model)),
        ):
            if got != expected:
                raise UserError(f"{field}: this site allows {expected}, the coordinator asks for {got}")


def load_site(path: Path) -> SiteConfig:
    """Read and check a site's file, its algorithm included. UserError names the file and the field."""
    tables = read_toml(path, "site file")
    if not {"federated", "training"}.isdisjoint(tables):
        what = "is a coordinator's job, expected a site's file: which algorithm and model may run there, and its data"
        raise UserError(f"{path}: {what}")
    config, folder = convert(tables, SiteConfig, str(path)), folder_of(path)
    pipeline = config.pipeline and config.pipeline.counted_from(folder)
    data = config.data.counted_from(folder)
    data = data if config.metrics else data.training_alone()  # nothing is evaluated
    config = msgspec.structs.replace(config, data=data, pipeline=pipeline)
    try:
        refuse_description(config.data)
        algorithm = load_algorithm(config.algorithm)
        Metrics(config.metrics)
        if config.pipeline is not None:
            check_pipeline(config, config.pipeline, algorithm)
    except UserError as e:
        raise UserError(f"{path}: {e}") from None
    return config


def check_pipeline(config: SiteConfig, pipeline: PipelineConfig, algorithm: Algorithm) -> None:
    """UserError for a fleet, a planner, a plan or a device that does not exist, and for what does not go together with
    a pipeline."""
    fleet = resolve_fleet(pipeline.fleet)
    check_planner(pipeline.planner)
    if not 1 <= parse_duration(pipeline.timeout, "pipeline.timeout") < math.inf:
        raise UserError(f"pipeline.timeout: got {pipeline.timeout!r}, expected at least 1 s")
    if pipeline.plan and not Path(pipeline.plan).is_file():
        raise UserError(f"pipeline.plan: got {pipeline.plan!r}, expected a plan file, as `isthmus plan` writes it")
    for name in () if isinstance(pipeline.device, str) else pipeline.device:
        if name not in fleet.names:
            raise unknown_name("device in pipeline.device", name, fleet.names)
    check_descends(algorithm)
    if config.device != AUTO:
        raise UserError(f"device: got {config.device!r} beside [pipeline], expected pipeline.device")
    if config.slow_down:
        raise UserError(f"slow_down: got {config.slow_down:g} beside [pipeline], expected pipeline.emulate = true")


def _described(spec: AlgorithmSpec | ModelSpec) -> str:
    """On one line; equal for equal specs."""
    options = msgspec.json.encode(spec.options, order="sorted").decode()
    text = spec.name if options == "{}" else f"{spec.name} {options}"
    if isinstance(spec, ModelSpec) and spec.lora is not None:
        text += f" with lora {msgspec.json.encode(spec.lora, order='sorted').decode()}"
    return text


def digest_of(task_spec: TaskSpec) -> str:
    """Digest all that an answer holds for. The epsilon spent before the request is not part of it."""
    fixed = msgspec.structs.replace(task_spec, epsilon_so_far=None)
    return hashlib.sha256(msgspec.json.encode(fixed, order="sorted")).hexdigest()[:16]


def refusal(rules: Approval, task_spec: TaskSpec) -> str | None:
    """The rule that a request breaks, in words; None where it breaks none."""
    if rules.secure and not task_spec.aggregation.secure:
        return "approval.secure: this site sends masked updates only, the coordinator asks for plain ones"
    if rules.max_epsilon is not None:
        got = "none is promised" if task_spec.epsilon is None else f"{task_spec.epsilon:.3g}"
        if task_spec.epsilon is None or task_spec.epsilon > rules.max_epsilon:
            return f"approval.max_epsilon: this site allows {rules.max_epsilon:g}, the coordinator asks for: {got}"
    if rules.max_rounds is not None and task_spec.rounds > rules.max_rounds:
        return f"approval.max_rounds: this site allows {rules.max_rounds}, the coordinator asks for {task_spec.rounds}"
    if len(task_spec.sites) < rules.min_sites:
        return f"approval.min_sites: this site wants {rules.min_sites}, the run has {len(task_spec.sites)}"
    allowed = {entry.partition(":")[0] for entry in rules.sites}
    if rules.sites and (others := sorted(set(task_spec.sites) - allowed)):
        return f"approval.sites: {', '.join(others)} takes part, this site allows {', '.join(rules.sites)}"
    return None


def allowed_devices(rules: Approval) -> dict[str, str]:
    """Return the ids of the devices of those sites that `approval.sites` names with one."""
    pairs = (entry.partition(":") for entry in rules.sites)
    return {name: device for name, _, device in pairs if device}


def described(task_spec: TaskSpec, figures: Sequence[str] = ()) -> str:
    """Describe the coordinator's request on a few lines. `figures` are those that the site sends of its data."""
    local, aggregation, privacy = task_spec.local, task_spec.aggregation, task_spec.privacy
    most = aggregation.most_samples
    samples = "how many there are" if most is None else f"a bound of {most}"
    lines = [
        f"job: {task_spec.job}, {task_spec.rounds} rounds",
        f"algorithm: {task_spec.algorithm.name} {_options(task_spec.algorithm.options)}".rstrip(),
        f"model: {task_spec.model.name} {_options(task_spec.model.options)}".rstrip(),
        f"steps: {local.epochs} epochs of batches of {local.batch_size}, {_steps(local)}",
        f"sites: {', '.join(task_spec.sites)}",
        "the coordinator sees: "
        + ("the sum of all updates" if aggregation.secure else "this site's update")
        + ", ".join([f", and of its samples {samples}", *figures]),
    ]
    if privacy is None:
        lines.append("privacy: no noise, no promise")
    else:
        who = "each site" if privacy.noise == "sites" else "the server"
        lines.append(f"privacy: clip {privacy.clip:g}, noise {privacy.noise_multiplier:g} x clip by {who}")
        if task_spec.epsilon is not None:
            spent = f", so far {task_spec.epsilon_so_far or 0.0:.3g}"
            lines.append(f"epsilon: {task_spec.epsilon:.3g} at delta {privacy.delta:g} after the run{spent}")
    return "\n".join(lines)


def _steps(local: LocalConfig) -> str:
    rate = local.learning_rate
    if local.optimizer:
        text = ", ".join(f"{one.called} with learning rate {one.lr:g}" for one in local.optimizer)
    else:
        text = f"learning rate {RATE if rate is None or isinstance(rate, LearningRate) else rate:g}"
    by_round = " times a factor by round" if isinstance(rate, LearningRate) else ""
    clipped = f", gradients clipped to a norm of {local.clip_norm:g}" if local.clip_norm else ""
    return text + by_round + clipped


def _options(options: object) -> str:
    text = msgspec.json.encode(options, order="sorted").decode()
    return "" if text == "{}" else text


SITE_LOG = "site-log.jsonl"
SiteEvent = Literal["asked", "allowed", "refused", "sent"]


class SiteLogLine(msgspec.Struct, frozen=True, kw_only=True):
    time_s: float  # since 1970, by the site's clock
    event: SiteEvent
    """`asked`: a coordinator asks for a run. `allowed`, `refused`: the answer. `sent`: something left the site."""
    job: str
    run: str  # name under which the site keeps its client's states
    text: str  # in words: what is asked for, who answered, what was sent
    request: str = ""
    """Digest of what the owner is asked, of which this is the question or the answer; empty where rules decide."""
    round: int | None = None  # from 1 on, of what was sent
    pass_: int = msgspec.field(default=1, name="pass")  # the pass of that round, from 1 on
    size_bytes: int = 0
    summed: tuple[str, ...] = ()
    """The sites in a sum of which shares were revealed: those whose updates are in the sum, others than this one with
    the ids of their devices, `NAME:ID`."""
    of: tuple[str, ...] = ()  # digests of the model that this site trained from, and of its update


class SiteLog(LinesFile[SiteLogLine]):
    """Two processes may add lines: the site's, and the owner's command."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / SITE_LOG, SiteLogLine, "site log")

    def note(
        self,
        event: SiteEvent,
        job: str,
        run: str,
        text: str,
        *,
        request: str = "",
    ) -> None:
        """Add a question or an answer of now. UserError when it cannot be written."""
        self.add(SiteLogLine(time_s=time.time(), event=event, job=job, run=run, text=text, request=request))

    def answer(self, request: str) -> bool | None:
        """The last answer to a request; None where there is none."""
        answers = [line for line in self.lines() if line.request == request and line.event in ("allowed", "refused")]
        return answers[-1].event == "allowed" if answers else None

    def revealed(self, run: str) -> dict[str, frozenset[str]]:
        """The sites of the sum for which this one revealed shares: by rounds of this run, and by what they revealed of
        in any."""
        found: dict[str, frozenset[str]] = {}
        for line in (line for line in self.lines() if line.summed and line.round is not None):
            assert line.round is not None, "it is a line of a round"
            rounds = (round_key(PhaseId(line.round - 1, number=line.pass_ - 1)),) if line.run == run else ()
            found |= dict.fromkeys((*rounds, *line.of), frozenset(line.summed))
        return found

    def last_request(self) -> SiteLogLine | None:
        """Return the last request to the owner, answered or not."""
        asked = [line for line in self.lines() if line.event == "asked" and line.request]
        return asked[-1] if asked else None
