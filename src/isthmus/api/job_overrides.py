"""The job that a call adds up to: a file or a struct, and what is given in place of what it says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from isthmus.combinations import refused
from isthmus.documents import read_toml
from isthmus.errors import UserError
from isthmus.federated.job import FEDERATED, FederatedJob, kind_of
from isthmus.job import PIPELINE, Job, JobDocument, JobReader
from isthmus.plans import Objective
from isthmus.units import parse_duration

READERS: Mapping[str, JobReader[Any]] = {"pipeline": PIPELINE, "federated": FEDERATED}  # readers by the job's kind
Config = TypeVar("Config", bound=msgspec.Struct)
AnyJob = TypeVar("AnyJob", bound=JobDocument)


def job_of(job: Job | str | Path, overrides: Mapping[str, object] = {}, *, command: str = "isthmus plan") -> Job:
    """The job with overrides, as `training.steps`. UserError for a file that is no pipeline's job, by what the command
    does with one."""
    return _job(job, overrides, PIPELINE, command)


def federated_job_of(job: FederatedJob | str | Path, overrides: Mapping[str, object] = {}) -> FederatedJob:
    return _job(job, overrides, FEDERATED)


def any_job_of(job: Job | FederatedJob | str | Path, overrides: Mapping[str, object] = {}) -> Job | FederatedJob:
    """Return the same as `job_of`, of either program."""
    kind = kind_of_file(Path(job)) if isinstance(job, str | Path) else getattr(job, "kind", "pipeline")
    return _job(job, overrides, READERS[kind])


def kind_of_file(path: Path) -> Literal["pipeline", "federated"]:
    """Return the program of a job file. UserError for none."""
    return kind_of(read_toml(path, "job file"), str(path))


def _job(
    job: AnyJob | str | Path, overrides: Mapping[str, object], reader: JobReader[AnyJob], command: str = ""
) -> AnyJob:
    if isinstance(job, reader.struct):
        return reader.overridden(job, overrides)
    if not isinstance(job, str | Path):
        raise UserError(f"job: got {job!r:.80}, expected a {reader.struct.__name__} or a job file")
    path = Path(job)
    if reader is PIPELINE:
        if kind_of_file(path) != "pipeline":
            raise refused(command, "a federated job", field=str(path))
        refuse_other_file(path)
    return reader.load(path, overrides)


def refuse_other_file(path: Path) -> None:
    """UserError for the file of a site, a fleet or a sweep."""
    keys = read_toml(path, "job file").keys()
    if {"job", "algorithm"} <= keys:
        raise UserError(f"{path}: is a site's file: `isthmus join --site {path}` takes part with it")
    if "device" in keys:
        raise UserError(f"{path}: is a fleet's file: a job names it, or `--fleet {path}`")
    if "job" in keys:
        raise UserError(f"{path}: is a sweep's file: `isthmus sweep {path}` trains its jobs")


class Changes(msgspec.Struct, frozen=True, kw_only=True):
    """Options in place of what a job says; None: as it says."""

    fleet: str | None = None
    planner: str | None = None
    devices: int | None = None
    steps: int | None = None
    rounds: int | None = None
    objective: Objective | None = None
    max_step: str | None = None
    max_price: float | None = None

    def of(self, job: Job) -> Job:
        """UserError for a limit that is none, and for rounds."""
        if self.rounds is not None:
            raise refused("options of rounds", "pipeline", self.rounds, "--rounds")
        if self.max_step is not None:
            parse_duration(self.max_step, "--max-step")
        if self.max_price is not None and not 0 < self.max_price < float("inf"):
            raise UserError(f"--max-price: got {self.max_price:g}, expected a finite number above 0")
        plan = {"objective": self.objective, "max_step": self.max_step, "max_price": self.max_price}
        job = _replaced(job, {"fleet": self.fleet, "planner": self.planner, "devices": self.devices})
        return msgspec.structs.replace(
            job, plan=_replaced(job.plan, plan), training=_replaced(job.training, {"steps": self.steps})
        )


class FederatedChanges(msgspec.Struct, frozen=True, kw_only=True):
    """Options in place of what a federated job says; None: as it says."""

    scheme: str | None = None
    executors: int | None = None

    def of(self, job: FederatedJob, rounds: int | None) -> FederatedJob:
        """UserError for a job that cannot be run with them."""
        runtime = _replaced(job.runtime, {"scheme": self.scheme, "executors": self.executors})
        federated = _replaced(job.federated, {"rounds": rounds})
        return FEDERATED.checked(msgspec.structs.replace(job, runtime=runtime, federated=federated))


def read_job(
    path: Path,
    changes: Changes,
    federated: FederatedChanges | None = None,
    overrides: Mapping[str, object] = {},
    *,
    others: Mapping[str, object] = {},
) -> Job | FederatedJob:
    """The job of a file, with options and overrides in place of what it says.

    UserError for an option that the kind of job does not have. `others` are further options, by name, that a federated
    job does not have; None: not given.
    """
    federated = federated or FederatedChanges()
    if kind_of_file(path) == "pipeline":
        for option, value in _options(federated).items():
            if value is not None:
                raise refused("options of rounds", "pipeline", str(value), option)
        return changes.of(job_of(path, overrides))
    for option, value in {**_options(msgspec.structs.replace(changes, rounds=None)), **others}.items():
        if value is not None and option == "--steps":
            raise refused("steps", "federated", str(value), option)
        if value is not None:
            raise refused("options of plans", "federated", str(value), option)
    return federated.of(federated_job_of(path, overrides), changes.rounds)


def _options(given: Changes | FederatedChanges) -> dict[str, object]:
    """Return the changes by their names on the command line."""
    return {f"--{name.replace('_', '-')}": value for name, value in msgspec.structs.asdict(given).items()}


def _replaced(config: Config, given: Mapping[str, object]) -> Config:
    return msgspec.structs.replace(config, **{name: value for name, value in given.items() if value is not None})
