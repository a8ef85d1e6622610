"""A sweep: one job under several settings, each with several seeds. One TOML file."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, cast

import msgspec

from isthmus.documents import JOB_NAME, check_is_local, convert, read_toml
from isthmus.errors import UserError
from isthmus.old_spelling import new_key

NotNegative = Annotated[int, msgspec.Meta(ge=0)]


class SweepEngine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The cluster on which every run of a sweep is started, as by `isthmus up`."""

    on: str  # The engine: local, ssh, ray, slurm, kubernetes, skypilot, or one of another package.
    nodes: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Nodes of each run; by default those of the job's fleet file, or all that the engine has."""
    options: dict[str, object] = {}  # Options of the backend, as --on-option of `isthmus up`.


class SweepFile(msgspec.Struct, frozen=True, kw_only=True):
    """The file of a sweep. Settings are keys of the job with their tables, as "training.batch_size"."""

    name: Annotated[str, msgspec.Meta(pattern=JOB_NAME)]  # The name of its folder.
    job: str  # The job's file. A relative path counts from the sweep's file.
    run_dir: str = "runs"  # The sweep's folder is made in this one.
    grid: dict[str, object] = {}  # A list of values for each setting. Every combination is a point of the sweep.
    points: list[dict[str, object]] = []
    """Single points, each a table of settings. With a grid, each is combined with each of the grid's."""
    seeds: tuple[NotNegative, ...] = ()  # Each point is trained once with each of them; none: with the job's own.
    at_once: NotNegative = 0
    """So many runs at the same time; 0: as this machine's memory and cores allow; with an engine, one."""
    engine: SweepEngine | None = None  # Where each run is started; by default on this machine.


class SweepRun(msgspec.Struct, frozen=True, kw_only=True):
    point: dict[str, object]  # its settings, the seed left out
    seed: int | None  # None: the job's own

    @property
    def folder(self) -> str:
        """Its name in the sweep's folder. It follows from the settings alone: a sweep that grows keeps its runs."""
        said = [f"{key.rpartition('.')[2]}={value}" for key, value in self.point.items()]
        seed = [] if self.seed is None else [f"seed={self.seed}"]
        readable = re.sub(r"[^A-Za-z0-9=.,_-]+", "_", ",".join([*said, *seed]))[:80].strip("._-,")
        digest = hashlib.sha256(msgspec.json.encode((self.point, self.seed), order="sorted")).hexdigest()[:8]
        return f"{readable}-{digest}" if readable else digest

    def overrides(self) -> dict[str, object]:
        """Return the values in place of the job's."""
        return dict(self.point) if self.seed is None else {**self.point, "training.seed": self.seed}


def load_sweep(path: Path) -> SweepFile:
    """Read and check a sweep's file. UserError names the file, the field, what was got and what was expected."""
    tables = read_toml(path, "sweep file")
    if "model" in tables:
        raise UserError(f"{path}: is a job: `isthmus train {path}` trains it; a sweep's file names it")
    sweep = convert(tables, SweepFile, str(path))
    try:
        check_is_local("run_dir", sweep.run_dir)
        runs_of(sweep)
    except UserError as e:
        raise UserError(f"{path}: {e}") from None
    return sweep


def runs_of(sweep: SweepFile) -> tuple[SweepRun, ...]:
    """Every run, the seeds of a point one after another. UserError for values that are none, and for a run given
    twice."""
    points = list(_points(sweep))
    if "training.seed" in map(new_key, points[0]):
        raise UserError("grid: got a seed, expected it in seeds = [...]: the table averages over seeds")
    runs = [SweepRun(point=point, seed=seed) for point in points for seed in sweep.seeds or (None,)]
    found: set[str] = set()
    for run in runs:
        if run.folder in found:
            raise UserError(f"points: got {run.point} with seed {run.seed} twice, expected each once")
        found.add(run.folder)
    return tuple(runs)


def _points(sweep: SweepFile) -> Iterator[dict[str, object]]:
    axes = {key: _values(key, values) for key, values in _flat(sweep.grid).items()}
    for single in sweep.points or [{}]:
        for chosen in itertools.product(*axes.values()):
            yield {**_flat(single), **dict(zip(axes, chosen, strict=True))}


def _values(key: str, values: object) -> list[object]:
    if not isinstance(values, list) or not values:
        raise UserError(f"grid.{key}: got {values!r}, expected a list of values")
    return cast("list[object]", values)


def _flat(tables: Mapping[str, object], path: str = "") -> dict[str, object]:
    """`training.batch_size` without quotes is a table in TOML: it means the same here."""
    found: dict[str, object] = {}
    for key, value in tables.items():
        if isinstance(value, dict):
            found |= _flat(cast("dict[str, object]", value), f"{path}{key}.")
        else:
            found[f"{path}{key}"] = value
    return found
