"""The job file: the tables that every program has, and the one way to read it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Generic, Literal, TypeVar

import msgspec
from msgspec import Meta

from isthmus.callbacks import CallbackConfig
from isthmus.documents import JOB_NAME, check_is_local, convert, folder_of, read_toml
from isthmus.errors import UserError
from isthmus.graph.metrics import Metrics
from isthmus.models import ModelSpec
from isthmus.overrides import counted_from, overridden, overridden_struct
from isthmus.stores import StoreConfig
from isthmus.trackers import Track, check_trackers


class JobDocument(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The part of a job file that every program has."""

    LENGTH: ClassVar[str]  # the key with the length of the run, in steps or rounds
    name: Annotated[str, Meta(pattern=JOB_NAME)]  # The run's name: its folder is RUN_DIR/NAME.
    model: ModelSpec  # Which model to train.
    metrics: tuple[str, ...] = ()
    """Figures of evaluations beside the loss: `accuracy`, `perplexity`, or `package.module:function` of your own."""
    run_dir: str = "runs"  # Where run folders are made.
    callback: tuple[CallbackConfig, ...] = ()  # One table [[callback]] per callback of your own.
    track: Track = Track()  # Which trackers get the run's figures.
    store: StoreConfig | None = None  # Where the run is kept besides its folder; without this table nowhere.

    @property
    def kind(self) -> Literal["pipeline", "federated"]:
        """Its program."""
        raise NotImplementedError

    @property
    def length(self) -> int:
        """Optimizer steps, or rounds, of the whole run."""
        raise NotImplementedError

    @property
    def has_sites(self) -> bool:
        """Whether it trains where data are kept by their owners."""
        return False

    def unset_by(self, overrides: Mapping[str, object]) -> dict[str, object]:
        """Overrides of defaults in whose place others stand."""
        return {}

    def check_metrics(self) -> None:
        """UserError for names that mean nothing."""
        _ = Metrics(self.metrics)

    def check_common(self) -> None:
        """UserError for values of these tables that cannot be."""
        check_is_local("run_dir", self.run_dir)
        check_trackers(self.track)
        self.check_metrics()


AnyJob = TypeVar("AnyJob", bound=JobDocument)


@dataclass(frozen=True)
class JobReader(Generic[AnyJob]):
    """How a program's job is read."""

    struct: type[AnyJob]
    located: Callable[[AnyJob, str], AnyJob]  # with paths that count from a folder
    checked: Callable[[AnyJob], AnyJob]  # UserError for settings that do not go together

    def load(self, path: Path, overrides: Mapping[str, object] = {}) -> AnyJob:
        """Read and check a job file; UserError names the file, the field, what was got and what was expected."""
        folder = folder_of(path)
        given = counted_from(overrides, os.getcwd()) if folder else overrides
        job = convert(overridden(read_toml(path, "job file"), given, str(path)), self.struct, str(path))
        job = self.located(job, folder)
        try:
            return self.checked(job)
        except UserError as e:
            raise type(e)(f"{path}: {e}") from None

    def overridden(self, job: AnyJob, overrides: Mapping[str, object], source: str = "job") -> AnyJob:
        """A job from Python, checked too. UserError."""
        return self.checked(overridden_struct(job, {**job.unset_by(overrides), **overrides}, source))
