"""A run's folder: what is in it and how it is read back.

runs/NAME/
  job.json  fleet.json  plan.json  graph.json     what was run
  described.json                                  what devices said of their data: columns, counts, keyed digests
  captured.safetensors                            for a coordinator that is started again: it need not capture
  trace.jsonl  predicted.jsonl                    what happened, and what the simulator said would
  fitted.json                                     the fleet as its first steps showed it
  plans.json                                      each plan that was in force, and since when
  privacy.json                                    of a run whose values leave under noise: how much they disclosed of
  samples
  losses.jsonl                                    one line per step and per evaluation
  fingerprints.jsonl                              what devices reported of each step, for `isthmus audit`
  events.jsonl                                    what happened, with times: who watches the run reads it
  spans.jsonl                                     the trace so far, while the run works
  plan.png  timeline.png  loss.png  metrics.png  summary.json
  stopped.txt                                     of a run that a callback ended: which one, and why
  given/                                          of Python objects: the samples as arrays, and the fleet
  logs/DEVICE.log                                 what each device's process wrote to standard error
  agents.log  probed.toml                         of `isthmus up`: what agents printed, and the fleet as it was measured
  coordinator/                                    of `isthmus up`, while it runs: keys, removed at the end
  checkpoints/
  sessions/1/                                     of a resumed run: plan, losses and traces of the sessions before
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from isthmus.api.job_overrides import READERS
from isthmus.api.run_entries import ENTRIES, SPANS, LossPoint, losses_file, run_entries, run_state
from isthmus.data.description import DataDescription
from isthmus.documents import read_lines
from isthmus.errors import UserError
from isthmus.federated.job import FederatedJob, kind_of
from isthmus.fleet import Fleet
from isthmus.graph import OpGraph
from isthmus.job import Job
from isthmus.locking import locked
from isthmus.plans import Plan, PlanPeriod, load_plan
from isthmus.reading import read_json
from isthmus.run_files import CHECKPOINTS, CLIENT_NAMES, JOB, LOSSES, keep_job, keep_stop, read_job, write_json
from isthmus.trace import Span, Trace, read_jsonl, write_jsonl

Decoded = TypeVar("Decoded")

FLEET, PLAN = "fleet.json", "plan.json"
MEASURED, PREDICTED, PERIODS = "trace.jsonl", "predicted.jsonl", "plans.json"
FITTED = "fitted.json"
GIVEN = "given"
AGENTS_LOG, COORDINATOR, PROBED = "agents.log", "coordinator", "probed.toml"
BESIDE = frozenset({GIVEN, CLIENT_NAMES, AGENTS_LOG, COORDINATOR, PROBED})
"""Files that may be in a folder before a run begins there."""


class RunFolder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / CHECKPOINTS
        self.timeline = path / "timeline.png"
        self.plan_picture = path / "plan.png"
        self.loss_picture = path / "loss.png"
        self.metrics_picture = path / "metrics.png"
        self.perfetto = path / "trace.perfetto.json"
        self.summary = path / "summary.json"
        self.graph = path / "graph.json"
        self.captured = path / "captured.safetensors"
        self._described = path / "described.json"
        self._losses = losses_file(path)
        self._made: list[Path] = []  # directories that are there for this run only, outermost first

    @classmethod
    def chosen(cls, parent: Path, name: str, *, resume: bool, run: Path | None) -> RunFolder:
        """Return the folder of the run to resume, or a new one; `run` is the user's choice. UserError."""
        if resume:
            return cls.newest(parent, name) if run is None else cls.existing(run)
        return cls.fresh(parent, name) if run is None else cls.empty(run)

    @classmethod
    def fresh(cls, parent: Path, name: str) -> RunFolder:
        """A new folder: `name`, or `name-2` and so on when that is taken. UserError when it cannot be made."""
        made = _make(parent)
        for path in _numbered(parent, name):
            try:
                path.mkdir()
            except FileExistsError:
                continue
            except OSError as e:
                raise UserError(f"run folder {path}: cannot be made: {e.strerror or e}") from None
            folder = cls(path)
            folder._made = [*made, path]
            return folder
        raise AssertionError("numbers do not end")

    @classmethod
    def empty(cls, path: Path) -> RunFolder:
        """A folder of the user's choice; UserError when something is in it."""
        if cls(path).begun:
            raise UserError(f"--run {path}: holds a run already; add --resume to continue it")
        if path.exists() and (not path.is_dir() or any(found.name not in BESIDE for found in path.iterdir())):
            raise UserError(f"--run {path}: exists and is not an empty directory")
        return cls(path)

    @classmethod
    def newest(cls, parent: Path, name: str) -> RunFolder:
        """Return the last folder that `fresh` made and `begin` filled whose run did not end, or else the last;
        UserError when there is none."""
        found = [path for path in itertools.takewhile(Path.exists, _numbered(parent, name)) if (path / JOB).is_file()]
        last = found[-1] if found else parent / name
        return cls.existing(next((path for path in reversed(found) if not cls(path).is_done), last))

    @classmethod
    def existing(cls, path: Path) -> RunFolder:
        if not cls(path).begun:
            raise UserError(f"run folder {path}: not found, or not a run (no {JOB})")
        return cls(path)

    @contextlib.contextmanager
    def claimed(self, timeout_s: float = 0.0) -> Generator[None]:
        """Nobody else runs in this folder meanwhile; UserError when somebody does, and has not left after `timeout_s`.
        What was made for it and stays empty is removed again."""
        self._made += _make(self.path)
        handle = os.open(self.path, os.O_RDONLY)
        try:
            deadline_s = time.monotonic() + timeout_s
            while not locked(handle):
                if time.monotonic() >= deadline_s:
                    raise UserError(f"run folder {self.path}: another process runs in it")
                time.sleep(0.02)
            yield
        finally:
            os.close(handle)
            self.leave()

    def remove(self) -> None:
        """The folder with all that is in it. UserError for what is no run, and where one works in it."""
        with self.existing(self.path).claimed():
            try:
                shutil.rmtree(self.path)
            except OSError as e:
                raise UserError(f"run folder {self.path}: cannot be removed: {e.strerror or e}") from None

    def leave(self) -> None:
        """Remove what was made for a run that wrote nothing."""
        for made in reversed(self._made):
            with contextlib.suppress(OSError):  # only an empty directory can be removed like this
                made.rmdir()

    def begin(
        self, job: Job, fleet: Fleet, plan: Plan | None, start_step: int, note: Callable[[str], None] = lambda _: None
    ) -> None:
        """A session of the run starts; `plan` is None where each replica has its own. An earlier session that left its
        traces, or losses after `start_step`, is kept under `sessions/`. Those losses are forgotten here, as they will
        be made again, and lines that cannot be read, of which `note` is called. UserError when the folder cannot be
        written."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._archive(start_step)
            if self.fitted(fleet) is None:
                (self.path / FITTED).unlink(missing_ok=True)
            write_json(self.path / FLEET, fleet)
            if plan is not None:
                write_json(self.path / PLAN, plan)
            self.forget_losses(start_step, note)
            keep_stop(self.path, "")
            keep_job(self.path, job, note)
        except OSError as e:
            raise UserError(f"run folder {self.path}: cannot be written: {e.strerror or e}") from None

    def forget_losses(self, step: int, note: Callable[[str], None] = lambda _: None) -> None:
        self._losses.keep_if(lambda point: point.step <= step, note)

    @property
    def begun(self) -> bool:
        """Return whether a session of a run has begun here."""
        return (self.path / JOB).is_file()

    def _archive(self, start_step: int) -> None:
        """The session folder is a run folder that `isthmus trace` reads."""
        if (self.path / SPANS).is_file() and (self.path / SPANS).stat().st_size:
            self.keep_spans()  # it was killed
        if not (self.path / MEASURED).is_file() and all(p.step <= start_step for p in self.losses()):
            return
        sessions = self.path / "sessions"
        sessions.mkdir(exist_ok=True)
        session = next(path for n in itertools.count(1) if not (path := sessions / str(n)).exists())
        session.mkdir()
        for name in (JOB, FLEET, PLAN, LOSSES, ENTRIES):
            if (self.path / name).exists():
                shutil.copy(self.path / name, session / name)
        pictures = self.plan_picture.name, self.timeline.name
        for name in (PREDICTED, PERIODS, *pictures, self.summary.name, self.perfetto.name, MEASURED):
            if (self.path / name).exists():
                (self.path / name).rename(session / name)

    def plan_to_keep(self, job: Job, fleet: Fleet) -> Path | None:
        """The plan of the run's last session, if this one is planned from the same: equal cuts give equal bits."""
        if not all((self.path / name).is_file() for name in (JOB, FLEET, PLAN)):
            return None
        before = self.job()
        same = all(getattr(before, field) == getattr(job, field) for field in ("model", "planner", "schedule", "plan"))
        same &= before.micro_batches in job.counts
        same &= all(getattr(before.training, f) == getattr(job.training, f) for f in ("batch_size", "precision"))
        return self.path / PLAN if same and self.fleet() == fleet else None

    @property
    def is_done(self) -> bool:
        """Return whether the run came to its end. Of one that cannot be read: no."""
        try:
            return run_state(run_entries(self.path)).outcome == "done"
        except UserError:
            return False

    @property
    def kind(self) -> Literal["pipeline", "federated"]:
        return kind_of(self.read(dict[str, object]), str(self.path))

    def check_kind(self, kind: str) -> None:
        """UserError where a run of another kind has begun here."""
        if self.begun and self.kind != kind:
            raise UserError(f"run folder {self.path}: holds a {self.kind} job, expected a {kind} job")

    def job(self) -> Job:
        return self.read(Job)

    def any_job(self) -> Job | FederatedJob:
        return self.read(READERS[self.kind].struct)

    def read(self, kind: type[Decoded]) -> Decoded:
        try:
            return read_job(self.path, kind, f"run folder {self.path}: {JOB}")
        except FileNotFoundError:
            raise UserError(f"run folder {self.path}: {JOB} is missing") from None

    def fleet(self) -> Fleet:
        return self._decode(FLEET, Fleet)

    def keep_described(self, described: Mapping[str, DataDescription]) -> None:
        write_json(self._described, described)

    def described(self) -> dict[str, DataDescription]:
        """Return the devices' descriptions of their data; empty where none were kept."""
        return self._decode(self._described.name, dict[str, DataDescription]) if self._described.is_file() else {}

    def keep_fitted(self, fleet: Fleet) -> None:
        write_json(self.path / FITTED, fleet)

    def fitted(self, stated: Fleet | None = None) -> Fleet | None:
        """The fleet as a session of the run measured it; None before that, or if another was `stated` then."""
        if not (self.path / FITTED).is_file() or (stated is not None and self.fleet() != stated):
            return None
        return self._decode(FITTED, Fleet)

    def captured_graph(self) -> OpGraph:
        """UserError where it is missing, or is none."""
        return self._decode(self.graph.name, OpGraph)

    @property
    def planned(self) -> bool:
        """Whether the run has one plan: decoupled replicas have none, or their own."""
        return (self.path / PLAN).is_file()

    def plan(self) -> Plan:
        return load_plan(self.path / PLAN)

    def _decode(self, name: str, kind: type[Decoded]) -> Decoded:
        try:
            return read_json(self.path / name, kind, f"run folder {self.path}: {name}")
        except FileNotFoundError:
            raise UserError(f"run folder {self.path}: {name} is missing") from None

    def write_traces(self, predicted: Trace, measured: Trace, periods: Sequence[PlanPeriod]) -> None:
        (self.path / PERIODS).write_bytes(msgspec.json.encode(periods))
        write_jsonl(predicted, self.path / PREDICTED)
        write_jsonl(measured, self.path / MEASURED)
        (self.path / SPANS).unlink(missing_ok=True)

    def keep_spans(self) -> None:
        """The spans that were written while the run worked become its trace, without a predicted one."""
        if (self.path / SPANS).is_file():
            write_jsonl(self._spans(), self.path / MEASURED)
            (self.path / SPANS).unlink()

    def measured(self) -> Trace:
        """The trace of the newest session: of one that works, or was killed, as far as it is. UserError of a run that
        has none."""
        if not (self.path / MEASURED).is_file() and (self.path / SPANS).is_file():
            return self._spans()
        return read_jsonl(self.path / MEASURED)

    def traced_sessions(self) -> list[RunFolder]:
        """The folders of the sessions that left a trace, in their order; this one is the last. UserError for none."""
        earlier = sorted((self.path / "sessions").glob("[0-9]*"), key=lambda path: int(path.name))
        found = [RunFolder(path) for path in earlier if (path / MEASURED).is_file()]
        if not found or any((self.path / name).is_file() for name in (MEASURED, SPANS)):
            self.measured()
            found.append(self)
        return found

    def traces(self) -> list[Trace]:
        """The newest session as it was predicted, where it was, and as it was measured."""
        measured = self.measured()
        return [self.predicted(), measured] if (self.path / PREDICTED).is_file() else [measured]

    def _spans(self) -> Trace:
        return Trace(source="runtime", run=self.path.name, spans=tuple(read_lines(self.path / SPANS, Span)))

    def predicted(self) -> Trace:
        """UserError of a run that has none, as decoupled replicas."""
        return read_jsonl(self.path / PREDICTED)

    def periods(self) -> tuple[PlanPeriod, ...]:
        """The plans of the newest session."""
        return self._decode(PERIODS, tuple[PlanPeriod, ...])

    def log(self, point: LossPoint) -> None:
        self._losses.add(point)

    def losses(self) -> list[LossPoint]:
        return self._losses.lines()


def _make(path: Path) -> list[Path]:
    """Make a directory; returns those that were missing, outermost first. UserError when it cannot be made."""
    missing = [p for p in (*reversed(path.parents), path) if not p.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(f"run folder {path}: cannot be made: {e.strerror or e}") from None
    return missing


def _numbered(parent: Path, name: str) -> Iterator[Path]:
    yield parent / name
    yield from (parent / f"{name}-{number}" for number in itertools.count(2))
