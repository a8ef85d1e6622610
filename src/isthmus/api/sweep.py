"""`isthmus.sweep`: one job under several settings and seeds, several runs at once, in one folder.

runs/NAME/
  sweep.json              every run: its settings, outcome and metrics
  SETTINGS-DIGEST/        the folder of a run
  logs/SETTINGS-DIGEST.log
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path

import msgspec

from isthmus.accelerators import accelerator_names
from isthmus.api.folder import RunFolder
from isthmus.api.job_overrides import any_job_of
from isthmus.api.notebook import table_of
from isthmus.api.run import Run
from isthmus.api.run_job import program_of
from isthmus.api.terminal import logged
from isthmus.api.training import train
from isthmus.api.up import HowUp, up
from isthmus.copies import end_with_parent
from isthmus.documents import folder_of
from isthmus.errors import Interrupted, IsthmusError, UserError
from isthmus.federated.job import FederatedJob
from isthmus.free_memory import available_bytes
from isthmus.job import Job
from isthmus.job.sweep import SweepEngine, SweepFile, SweepRun, load_sweep, runs_of
from isthmus.locking import claimed
from isthmus.overrides import counted_from
from isthmus.report.comparison import SECONDS, RunOutcome, RunResult, SweepRow, sweep_rows
from isthmus.report.rounds_table import summarized
from isthmus.run_files import LOSSES, ROUND_LINES, read_json, write_json
from isthmus.runtime.launchers.launcher import open_launcher
from isthmus.runtime.processes.forked import HALT_S, how_it_ended
from isthmus.runtime.processes.memory import family_bytes
from isthmus.runtime.processes.signals import Stop, terminable
from isthmus.units import format_duration


class Task(msgspec.Struct, frozen=True, kw_only=True):
    job: str  # path of its file
    folder: str  # the run's
    overrides: dict[str, object]
    resume: bool
    engine: SweepEngine | None = None  # None: this machine


class SweepProcess:
    """`python -m isthmus.api.sweep`, which ends with this one even if that is killed: then its standard input
    closes. It has a session of its own: Ctrl-C reaches it by `interrupt` alone."""

    def __init__(self, task: Task, log: Path) -> None:
        self.task = task
        self.peak_bytes = 0
        self._log = log
        with log.open("ab") as output:
            self._start = output.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "isthmus.api.sweep"],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        assert self._process.stdin is not None, "it is a pipe"
        self._stdin = self._process.stdin
        with contextlib.suppress(BrokenPipeError):  # it has ended: `poll` tells
            self._stdin.write(msgspec.json.encode(task) + b"\n")
            self._stdin.flush()

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    def memory(self) -> int:
        """Bytes that it and its processes use now."""
        now = family_bytes(self._process.pid)
        self.peak_bytes = max(self.peak_bytes, now)
        return now

    @property
    def trains(self) -> bool:
        """Return whether its first step or round is done: by then it has taken most of its memory."""
        folder = Path(self.task.folder)
        return any(path.is_file() and path.stat().st_size for path in (folder / LOSSES, folder / ROUND_LINES))

    def interrupt(self) -> None:
        """It saves what it has, and ends."""
        if self.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def end(self) -> None:
        """At once, where it still runs."""
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()
        try:
            self._process.wait(HALT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def reason(self, code: int) -> str:
        """Return why it failed: its last line that says so, or how it ended."""
        with self._log.open("rb") as log:
            log.seek(self._start)
            lines = log.read().decode(errors="replace").splitlines()
        said = [line.partition("error: ")[2] for line in lines if line.startswith("error: ")]
        return said[-1] if said else how_it_ended(code, self._log)


RECORD = "sweep.json"
_CLAIM = "sweep.claim"
LOOK_S = 0.2
MARGIN = 1.1  # so much more than the largest run took is free before another begins


class SweepRecord(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    job: str  # absolute path
    job_digest: str  # SHA-256 of the job's file: runs of another one would not belong together
    results: tuple[RunResult, ...]


class Sweep:
    """A sweep: its runs and what they came to. UserError for a folder that holds none.

    >>> isthmus.Sweep("runs/rates").rows[0].metrics["loss"].deviation  # doctest: +SKIP
    0.0213
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._record = _read(self._path)

    @property
    def path(self) -> Path:
        """The sweep's folder."""
        return self._path

    @property
    def name(self) -> str:
        """Return the name as its file says."""
        return self._record.name

    @property
    def results(self) -> list[RunResult]:
        """A result per run, in the order of the sweep's file."""
        return list(self._record.results)

    @property
    def rows(self) -> list[SweepRow]:
        """A row per point, with mean and deviation over its seeds."""
        return sweep_rows(self._record.results)

    @property
    def outcome(self) -> RunOutcome:
        """`done`; or, of runs that are not, `interrupted` before `failed`."""
        outcomes = {result.outcome for result in self._record.results}
        if outcomes & {"waiting", "interrupted"}:
            return "interrupted"
        return "failed" if "failed" in outcomes else "done"

    def run(self, result: RunResult) -> Run:
        """One of its runs. UserError for one that has not begun."""
        folder = self.path / result.folder
        return Run(folder)

    def __repr__(self) -> str:
        return f"Sweep({str(self.path)!r})"

    def _repr_html_(self) -> str:
        done = sum(result.outcome == "done" for result in self._record.results)
        return table_of({"sweep": str(self.path), "done": f"{done} of {len(self._record.results)} runs"})


def sweep(
    file: str | Path,
    *,
    resume: bool = False,
    run: str | Path | None = None,
    at_once: int | None = None,
    note: Callable[[str], None] = lambda _: None,
    stop: Stop | None = None,
) -> Sweep:
    """Train the job of a sweep's file once for each of its points and seeds. Each run is a process and has a folder of
    its own in the sweep's folder, which `run` names.

    Several run at once, as many as `at_once`, or the file, says; by default as many as this machine has cores and
    memory for, one where it has accelerators or the file names an engine. The first run shows how much memory the
    others need. With `resume` runs that are done stay, those that were begun continue from their newest checkpoint, and
    failed ones are tried again; points and seeds may have been added to the file. A run that fails does not stop the
    others. Ctrl-C, or `stop.request()`, saves every run and ends the sweep.

    `note` gets one line for whatever a person may want to know. UserError for what is wrong with the file, or with the
    job under any of the settings: then nothing is started.

    >>> found = isthmus.sweep("sweep.toml", at_once=2)  # doctest: +SKIP
    >>> [(row.point, row.metrics["loss"].mean) for row in found.rows]  # doctest: +SKIP
    """
    path, stop = Path(file), stop or Stop()
    if at_once is not None and at_once < 1:
        raise UserError(f"at_once: got {at_once}, expected at least 1")
    said = load_sweep(path)
    job = _job_file(said, path)
    if said.engine is not None:
        open_launcher(said.engine.on, said.engine.options)
    runs, tasks = runs_of(said), dict[str, Task]()
    folder = Path(run) if run is not None else Path(said.run_dir) / said.name
    here = folder_of(path) or os.getcwd()
    for one in runs:
        overrides = counted_from(one.overrides(), here)
        made = _check(job, overrides, on_fleet=said.engine is not None)
        if made.track.names and not made.track.group:
            overrides |= {"track.group": said.name}
        if made.store is not None:
            overrides |= {"store.url": f"{made.store.url.rstrip('/')}/{one.folder}"}
        tasks[one.folder] = Task(
            job=str(job),
            folder=str(folder / one.folder),
            overrides=overrides,
            resume=False,
            engine=said.engine,
        )
    with _opened(folder, resume=resume):
        record = _begun(said, job, runs, folder)
        limit = (said.at_once if at_once is None else at_once) or (0 if said.engine is None else 1)
        _Runner(folder, record, tasks, limit, note).run(stop)
    return Sweep(folder)


def may_start(running: Sequence[int], need: int | None, available: int | None, limit: int) -> bool:
    """Return whether another run may begin beside those that use `running` bytes each. `need` is the most that one
    took; None while nobody knows: then the first goes on alone. `available` is what is free; None where memory is no
    matter."""
    if len(running) >= limit:
        return False
    if not running or available is None:
        return True
    if need is None:
        return False
    growing = sum(max(0, need - now) for now in running)
    return available - growing >= MARGIN * need


class _Runner:
    def __init__(
        self, folder: Path, record: SweepRecord, tasks: dict[str, Task], limit: int, note: Callable[[str], None]
    ) -> None:
        self._folder = folder
        self._record = record
        self._tasks = tasks
        self._automatic = limit == 0
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._limit = limit or (1 if accelerator_names() else cores)
        self._note = note
        self._need: int | None = None
        self._running: dict[str, SweepProcess] = {}

    def run(self, stop: Stop) -> None:
        waiting = [result.folder for result in self._record.results if result.outcome != "done"]
        kept = len(self._record.results) - len(waiting)
        if kept:
            self._note(f"{kept} of {len(self._record.results)} runs are done already")
        try:
            with stop.calls(self._interrupt):
                while self._running or (waiting and not stop.requested):
                    if waiting and not stop.requested and self._has_room():
                        self._start(waiting.pop(0))
                    else:
                        time.sleep(LOOK_S)
                    self._look()
        finally:
            for process in self._running.values():
                process.end()

    def _interrupt(self) -> None:
        self._note("interrupted: runs save what they have; again to end them at once")
        for process in list(self._running.values()):
            process.interrupt()

    def _has_room(self) -> bool:
        used = [process.memory() for process in self._running.values()]
        for process in self._running.values():
            self._learn(process)
        return may_start(used, self._need, available_bytes() if self._automatic else None, self._limit)

    def _learn(self, process: SweepProcess) -> None:
        """Learn how much a run needs, from one that trains or did."""
        if process.trains:
            self._need = max(self._need or 0, process.peak_bytes)

    def _start(self, folder: str) -> None:
        task = self._tasks[folder]
        begun = RunFolder(Path(task.folder)).begun
        log = self._folder / "logs" / f"{folder}.log"
        self._note(f"{folder}: {'continues' if begun else 'begins'}")
        self._running[folder] = SweepProcess(msgspec.structs.replace(task, resume=begun), log)

    def _look(self) -> None:
        for folder, process in list(self._running.items()):
            code = process.poll()
            if code is None:
                continue
            del self._running[folder]
            process.end()
            self._learn(process)
            self._keep(folder, process, code)

    def _keep(self, folder: str, process: SweepProcess, code: int) -> None:
        outcome: RunOutcome = {0: "done", 130: "interrupted"}.get(code, "failed")  # pyright: ignore[reportAssignmentType]
        reason = process.reason(code) if outcome == "failed" else ""
        metrics = _metrics(self._folder / folder) if outcome == "done" else {}
        results = tuple(
            msgspec.structs.replace(result, outcome=outcome, reason=reason, metrics=metrics)
            if result.folder == folder
            else result
            for result in self._record.results
        )
        self._record = msgspec.structs.replace(self._record, results=results)
        _write(self._folder, self._record)
        done = sum(result.outcome == "done" for result in results)
        said = ", ".join(
            f"{name} {format_duration(value) if name == SECONDS else f'{value:.4f}'}" for name, value in metrics.items()
        )
        self._note(
            f"{folder}: {outcome}{': ' if reason or said else ''}{reason or said} ({done} of {len(results)} done)"
        )


def _metrics(folder: Path) -> dict[str, float]:
    """Return the metrics of a finished run. One that is missing, or is no number, is left out."""
    run = Run(folder)
    found = {
        "loss": run.losses[-1].loss if run.losses else None,
        **summarized(run.evaluation),
        SECONDS: run.comparison.measured_step_s if run.comparison is not None else None,
    }
    return {name: value for name, value in found.items() if value is not None and math.isfinite(value)}


def _job_file(sweep: SweepFile, path: Path) -> Path:
    """UserError where it is missing."""
    job = (path.parent / sweep.job).absolute()
    if not job.is_file():
        raise UserError(f"{path}: job: got {sweep.job!r}, expected a job file; {job} is not there")
    return job


def _check(job: Path, overrides: dict[str, object], *, on_fleet: bool) -> Job | FederatedJob:
    """The job. UserError for settings under which it is none."""
    try:
        made = any_job_of(job, overrides)
        program_of(made).check(on_fleet=on_fleet)
        return made
    except UserError as e:
        raise UserError(f"{e} (with {', '.join(f'{key}={value}' for key, value in overrides.items())})") from None


@contextlib.contextmanager
def _opened(folder: Path, *, resume: bool) -> Generator[None]:
    """The sweep's folder, for this process alone. UserError."""
    begun = (folder / RECORD).is_file()
    if begun and not resume:
        raise UserError(f"--run {folder}: holds a sweep already; add --resume to continue it")
    if resume and not begun:
        raise UserError(f"sweep folder {folder}: not found, or no sweep (no {RECORD})")
    if folder.exists() and not begun and (not folder.is_dir() or any(p.name != _CLAIM for p in folder.iterdir())):
        raise UserError(f"--run {folder}: exists and is not an empty directory")
    try:
        (folder / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(f"sweep folder {folder}: cannot be made: {e.strerror or e}") from None
    with claimed(folder / _CLAIM, f"sweep folder {folder}: another process runs in it"):
        yield


def _begun(sweep: SweepFile, job: Path, runs: Sequence[SweepRun], folder: Path) -> SweepRecord:
    """The record, with what an earlier session of it has done. UserError where the job has changed since."""
    digest = hashlib.sha256(job.read_bytes()).hexdigest()
    known: dict[str, RunResult] = {}
    if (folder / RECORD).is_file():
        before = _read(folder)
        if before.job_digest != digest:
            raise UserError(
                f"{job}: has changed since the sweep in {folder} began, expected the same: begin another with --run"
            )
        known = {result.folder: result for result in before.results}
    results = [known.pop(r.folder, RunResult(point=r.point, seed=r.seed, folder=r.folder)) for r in runs]
    record = SweepRecord(name=sweep.name, job=str(job), job_digest=digest, results=(*results, *_done(known.values())))
    _write(folder, record)
    return record


def _done(results: Iterable[RunResult]) -> list[RunResult]:
    """Return the finished ones of runs that the file does not ask for any more: they stay in the table."""
    return [result for result in results if result.outcome == "done"]


def _read(folder: Path) -> SweepRecord:
    found = read_json(folder / RECORD, SweepRecord)
    if found is None:
        raise UserError(f"sweep folder {folder}: not found, or no sweep (no {RECORD})")
    return found


def _write(folder: Path, record: SweepRecord) -> None:
    write_json(folder / RECORD, record)


def carry_out(task: Task) -> str:
    """The run's outcome: done, or interrupted with what it has saved."""
    folder, observer = Path(task.folder), logged(sys.stdout)
    engine = task.engine
    if engine is not None:
        how = HowUp(options=engine.options)
        if engine.nodes is not None:
            how["nodes"] = engine.nodes
        run = up(
            task.job, engine.on, run=folder, resume=task.resume, overrides=task.overrides, observer=observer, **how
        )
    else:
        run = train(task.job, run=folder, resume=task.resume, overrides=task.overrides, observer=observer)
    return run.outcome


def main() -> int:
    """One run of a sweep, as a process that ends when its standard input closes: what it is to do comes there as one
    line of JSON, and its progress goes to standard output. The exit code: 0, 130 for an interrupted run, or that of the
    error."""
    with open(0, "rb", buffering=0, closefd=False) as pipe:  # no buffer: the thread reads on from there
        task = msgspec.json.decode(pipe.readline(), type=Task)
    threading.Thread(target=end_with_parent, args=(0,), name="parent_pipe", daemon=True).start()
    try:
        with terminable():
            return 130 if carry_out(task) == "interrupted" else 0
    except (Interrupted, KeyboardInterrupt) as e:
        print(e or "interrupted")
        return 130
    except IsthmusError as e:
        print(f"error: {e}")
        return e.exit_code


if __name__ == "__main__":
    sys.exit(main())
