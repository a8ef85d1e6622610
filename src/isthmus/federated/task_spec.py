"""What a coordinator asks of a site, and what the site's owner allows: both must match before anything runs.

Code does not travel: the offer names an algorithm and a model, and the site loads its own if its owner's file names
the same. The coordinator says how to train (steps, learning rate, seed), as in a simulation.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from isthmus.accelerators import AUTO
from isthmus.data import DataSpec
from isthmus.data.description import refuse_description
from isthmus.documents import convert, read_toml
from isthmus.errors import UserError, unknown_name
from isthmus.federated.admission import AdmissionRules
from isthmus.federated.algorithms import Algorithm, AlgorithmSpec, load_algorithm
from isthmus.federated.local import LocalConfig
from isthmus.federated.pipeline import PipelineConfig, check_descends
from isthmus.federated.privacy import Privacy, Private
from isthmus.federated.robust import Aggregation
from isthmus.federated.secure.rules import secure_rules
from isthmus.fleet import resolve_fleet
from isthmus.models import ModelSpec
from isthmus.planners import check_planner
from isthmus.protocol.federated_rules import SecureRules
from isthmus.units import parse_duration

RUN_NAME = "^[0-9a-f]{32}$"
"""What a run is called at its sites."""


class TaskSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The work, and which client the site is."""

    job: str
    run: Annotated[str, Meta(pattern=RUN_NAME)]
    """The same after a restart: the site keeps its client's states under it."""
    algorithm: AlgorithmSpec
    model: ModelSpec
    local: LocalConfig
    seed: Annotated[int, Meta(ge=0)]
    client: Annotated[int, Meta(ge=0)]
    aggregation: Aggregation = Aggregation()
    """Whether updates are masked, and the most samples of a site."""
    admission: AdmissionRules = AdmissionRules()
    """By which a site clips its update where they are masked."""
    privacy: Privacy | None = None
    """What the updates are covered with."""
    minimum: Annotated[int, Meta(ge=1)] = 1
    """Updates in a sum."""
    rounds: Annotated[int, Meta(ge=0)] = 0
    """Of the whole run."""
    sites: tuple[str, ...] = ()
    """Who may take part."""
    epsilon: float | None = None
    """Of the whole run, as the coordinator accounts it; None: no promise."""
    epsilon_so_far: float | None = None
    """Of the rounds that were committed before."""

    @property
    def secure_rules(self) -> SecureRules | None:
        """None where updates are not masked."""
        return secure_rules(self.aggregation, self.minimum)

    @property
    def bounds(self) -> AdmissionRules:
        """By which a site clips its update, where it does so itself."""
        return self.admission if self.privacy is None else self.privacy.bounds

    def around(self, algorithm: Algorithm) -> Algorithm:
        """With what the job puts around it, where the site makes the sum of its update itself."""
        if self.privacy is None or not self.aggregation.secure:
            return algorithm
        return Private(inner=algorithm, privacy=self.privacy, expected=1.0)

    def check_samples(self, samples: int) -> None:
        """UserError for more than the coordinator counts on."""
        most = self.aggregation.most_samples
        if most is not None and samples > most:
            raise UserError(f"data: this site has {samples} samples, the coordinator counts on at most {most}")


class Approval(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whether a run that the file allows goes on at this site. Every rule must hold."""

    ask: bool = False
    """A person says yes or no, once for each run: `isthmus site yes`, `isthmus site no`."""
    secure: bool = False
    """Updates leave this site under masks only."""
    max_epsilon: Annotated[float, Meta(gt=0)] | None = None
    """Of the whole run; a run without such a promise is refused."""
    max_rounds: Annotated[int, Meta(ge=1)] | None = None
    """Of the whole run."""
    min_sites: Annotated[int, Meta(ge=1)] = 1
    """Sites that may take part, this one among them."""
    sites: tuple[str, ...] = ()
    """The only sites that may take part, this one among them; none: any."""


class SiteConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A site's own file: what may run there, and its data, which stay."""

    job: str
    """Name of the only job that may run here."""
    algorithm: AlgorithmSpec
    """The only algorithm that may run here, with its options."""
    model: ModelSpec
    """The only model that may be trained here, with its options."""
    data: DataSpec
    """This site's data. They are never sent."""
    approval: Approval = Approval()
    """Whether a run goes on here, by rule or by a person's word."""
    threads: Annotated[int, Meta(ge=1)] = 1
    """Torch threads."""
    device: str = AUTO
    """Where it trains: `auto` (an accelerator of this machine, else the CPU), `cpu`, `cuda:1`, ..."""
    pipeline: PipelineConfig | None = None
    """Of a site that is a fleet: its devices train its client together."""
    slow_down: Annotated[float, Meta(ge=0)] = 0.0
    """Emulation: the site sleeps so many times as long as it trained."""

    def check(self, task_spec: TaskSpec) -> None:
        """UserError for an offer of anything else. Nothing of it has been loaded."""
        for field, got, expected in (
            ("job", task_spec.job, self.job),
            ("algorithm", _described(task_spec.algorithm), _described(self.algorithm)),
            ("model", _described(task_spec.model), _described(self.model)),
        ):
            if got != expected:
                raise UserError(f"{field}: this site allows {expected}, the coordinator asks for {got}")


def is_site_file(path: Path) -> bool:
    """Whether this is a site's file and no job."""
    return {"job", "algorithm"} <= read_toml(path, "job file").keys()


def load_site(path: Path) -> SiteConfig:
    """Read and check a site's file, its algorithm included. UserError names the file and the field."""
    tables = read_toml(path, "site file")
    if not {"federated", "training"}.isdisjoint(tables):
        what = "is a coordinator's job, expected a site's file: which algorithm and model may run there, and its data"
        raise UserError(f"{path}: {what}")
    config = convert(tables, SiteConfig, str(path))
    try:
        refuse_description(config.data)
        algorithm = load_algorithm(config.algorithm)
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
