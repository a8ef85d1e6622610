"""Slurm: one allocation of as many nodes as there are agents, one task per node, submitted through submitit.

A preempted job is requeued, by Slurm or by its first task, and its agents go on as the same members of the fleet. An
agent that was lost alone is started again by a job of one node.

submitit submits a command here, not a function: it would pickle that.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from secrets import token_hex
from types import ModuleType
from typing import Literal, Protocol

import msgspec

from isthmus.atomic_write import atomic_write
from isthmus.errors import PeerError, UserError, unknown_name
from isthmus.extensions import import_extra, to_install
from isthmus.runtime.launchers.launcher import AgentSpec, AgentState
from isthmus.runtime.launchers.slurm_task import AgentFolder, AgentStatus, Placed, SharedFolder
from isthmus.units import parse_duration

OWNER = "isthmus up --on slurm"
LEAST_SUBMITIT = (1, 5)
PROGRAMS = ("sbatch", "srun", "squeue", "scancel", "sinfo")
ASK_S = 10.0  # how often Slurm's controller is asked for a job: it serves all users of the cluster
END_S = 120.0  # how long a cancelled job may take to end
COMMAND_S = 60.0
MODULE = "isthmus.runtime.launchers.slurm_task"

_AUTHENTICATION = re.compile("munge|authenticat|credential", re.IGNORECASE)
"""In what Slurm's programs print where its authentication fails; a controller that is down has none of it."""

JobState = Literal["waiting", "running", "over"]
_WAITING = frozenset({"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD"})
_RUNNING = frozenset({"RUNNING", "COMPLETING", "SUSPENDED", "RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED"})


def _submitit() -> ModuleType:
    """Without its configuration of logging, which closes all handlers that this process has."""
    os.environ.setdefault("SUBMITIT_LOG_LEVEL", "NOCONFIG")
    return import_extra("submitit", OWNER)


class SlurmOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How nodes are asked for."""

    partition: str = ""
    account: str = ""
    qos: str = ""
    time: str = "1 h"  # limit of the job. One that reaches it is requeued.
    gpus_per_node: int = 0
    cpus_per_task: int = 0  # CPUs of each node's agent; by default as the partition has it
    warning: str = "90 s"  # so long before the limit agents are asked to leave
    folder: str = ""  # on a file system that all nodes share; by default the run's
    parameters: Mapping[str, str | int | bool] = {}
    """Further options of sbatch, as {constraint = "a100", exclusive = true}."""
    cluster: Literal["slurm", "local"] = "slurm"
    """`local`: submitit's own executor, which starts the tasks as processes here."""


class _Job(Protocol):
    """A job of submitit, as much as is used of it."""

    job_id: str

    @property
    def state(self) -> str: ...

    def cancel(self, check: bool = True) -> None: ...


class SlurmLauncher:
    restarts = True

    def __init__(self, options: SlurmOptions) -> None:
        self._options = options
        self._folder = Path()
        self._jobs: dict[str, _Job] = {}  # of each agent, the newest
        self._attempts: dict[str, int] = {}
        self._known: dict[str, tuple[float, JobState]] = {}
        self._logs: LogFiles | None = None
        self._shared: SharedFolder | None = None
        self._submitted = 0

    @property
    def head(self) -> str:
        if self._options.cluster == "local":
            return ""
        nodes = _command("sinfo", "--noheader", "--Node", "--format=%o", *self._of_partition())
        return next(iter(nodes.stdout.split()), "")

    def check(self) -> None:
        version = str(_submitit().__version__)
        if tuple(int(part) for part in version.split(".")[:2]) < LEAST_SUBMITIT:
            least = ".".join(map(str, LEAST_SUBMITIT))
            raise UserError(f"{OWNER} needs submitit {least}, got {version}: {to_install('submitit')}")
        _minutes(self._options)
        if self._options.cluster == "local":
            return
        for program in PROGRAMS:
            if shutil.which(program) is None:
                raise UserError(f"{OWNER} needs Slurm, got no {program} here: start it on a login node of the cluster")
        done = _command("sinfo", "--noheader", "--format=%R")
        if done.returncode:
            reason = _last_line(done.stderr)
            if _AUTHENTICATION.search(done.stderr):
                raise UserError(
                    f"{OWNER}: Slurm does not know who asks ({reason}): start munged, with the cluster's key"
                )
            raise UserError(f"{OWNER}: Slurm's controller does not answer ({reason}): start slurmctld")
        if self._options.partition and self._options.partition not in done.stdout.split():
            raise unknown_name("partition", self._options.partition, set(done.stdout.split()))

    def nodes(self) -> int | None:
        return None

    def render(self, agents: Sequence[AgentSpec], folder: Path) -> str:
        """See `Renders`."""
        at = self._place(folder)
        made = _submitit().slurm.slurm._make_sbatch_string
        command = _task_command(SharedFolder(at).tasks(1))
        return str(made(command=command, folder=at, **_script(self._options, len(agents))))

    def start(self, agents: Sequence[AgentSpec], folder: Path, log: Callable[[str, str], None]) -> None:
        self._folder = self._place(folder)
        self._folder.mkdir(mode=0o700, parents=True)
        self._logs, self._shared = LogFiles(log), SharedFolder(self._folder)
        self._submit(agents, self._logs)

    def states(self) -> Mapping[str, AgentState]:
        if self._shared is not None:
            self._shared.beat()
        return {name: self._state(name, job) for name, job in self._jobs.items()}

    def restart(self, agent: AgentSpec) -> None:
        assert self._logs is not None, "started before"
        self._submit([agent], self._logs)

    def stop(self) -> None:
        jobs = {job.job_id: job for job in self._jobs.values()}
        for job in jobs.values():
            self._cancel(job)
        deadline_s = time.monotonic() + END_S
        while left := [number for number, job in jobs.items() if self._job_state(job, 1.0) != "over"]:
            if time.monotonic() > deadline_s:
                raise PeerError(f"slurm: job {left[0]} was cancelled and has not ended: `scancel {left[0]}`")
            time.sleep(0.1)
        if self._logs is not None:
            self._logs.close()
            shutil.rmtree(self._folder)
        self._jobs.clear()
        self._logs = self._shared = None

    def _cancel(self, job: _Job) -> None:
        if self._options.cluster == "slurm":
            job.cancel(check=False)
        elif self._job_state(job, 0.0) != "over":  # its own `cancel` kills tasks after a second
            os.kill(int(job.job_id), signal.SIGTERM)

    def _place(self, folder: Path) -> Path:
        base = Path(self._options.folder).expanduser() if self._options.folder else folder
        return base.absolute() / f"slurm-{token_hex(4)}"

    def _of_partition(self) -> tuple[str, ...]:
        return (f"--partition={self._options.partition}",) if self._options.partition else ()

    def _submit(self, agents: Sequence[AgentSpec], logs: LogFiles) -> None:
        submitit = _submitit()
        placed: list[Placed] = []
        for agent in agents:
            attempt = self._attempts[agent.name] = self._attempts.get(agent.name, 0) + 1
            AgentFolder(self._folder, agent.name).prepare(agent.ticket, attempt)
            placed.append(Placed(agent.name, agent.arguments, agent.island, attempt))
        self._submitted += 1
        tasks = SharedFolder(self._folder).tasks(self._submitted)
        atomic_write(tasks, msgspec.json.encode(placed))
        if self._options.cluster == "local":
            executor = submitit.LocalExecutor(self._folder)
            executor.update_parameters(**_processes(self._options, len(agents)))
        else:
            executor = submitit.SlurmExecutor(self._folder)
            executor.update_parameters(**_script(self._options, len(agents)))
        try:
            job: _Job = executor._submit_command(_task_command(tasks))
        except (submitit.core.utils.UncompletedJobError, submitit.core.utils.FailedSubmissionError, OSError) as e:
            raise PeerError(f"slurm: the job was refused: {_last_line(str(e))}") from None
        for number, agent in enumerate(agents):
            self._jobs[agent.name] = job
            logs.follow(agent.name, submitit.core.utils.JobPaths(self._folder, job.job_id, number).stdout)

    def _state(self, name: str, job: _Job) -> AgentState:
        status, of_job = AgentFolder(self._folder, name).status(), self._job_state(job, ASK_S)
        if status in (AgentStatus.ENDED, AgentStatus.LOST):
            return AgentState.ENDED if status is AgentStatus.ENDED else AgentState.LOST
        if of_job == "over":
            return AgentState.LOST
        if of_job == "waiting":
            return AgentState.QUEUED
        return AgentState.RUNNING if status is AgentStatus.RUNNING else AgentState.STARTING

    def _job_state(self, job: _Job, within_s: float) -> JobState:
        """Return the state as Slurm had it at most `within_s` ago; as it was known where Slurm's controller does not
        answer."""
        if self._options.cluster == "local":
            return "running" if job.state == "RUNNING" else "over"
        asked_s, known = self._known.get(job.job_id, (float("-inf"), "waiting"))
        if known != "over" and time.monotonic() - asked_s > within_s:
            # squeue, as sacct needs a database that not every cluster has.
            done = _command("squeue", "--noheader", f"--jobs={job.job_id}", "--format=%T")
            if done.returncode == 0:
                known = _job_state_of(done.stdout.strip())
            elif "Invalid job id" in done.stderr:
                known = "over"
            self._known[job.job_id] = (time.monotonic(), known)
        return known


def _task_command(tasks: Path) -> str:
    """Return the command of each node."""
    return shlex.join([sys.executable, "-u", "-m", MODULE, str(tasks)])


def _job_state_of(text: str) -> JobState:
    """Nothing of a job that has ended a while ago."""
    if text in _WAITING:
        return "waiting"
    return "running" if text in _RUNNING else "over"


def _minutes(options: SlurmOptions) -> int:
    """Slurm counts whole minutes. UserError."""
    found = parse_duration(options.time, "time")
    if found < 60:
        raise UserError(f"time: got {options.time!r}, expected at least a minute")
    return round(found / 60)


def _script(options: SlurmOptions, nodes: int) -> dict[str, object]:
    """For submitit: the options of sbatch."""
    asked = ("partition", "account", "qos", "gpus_per_node", "cpus_per_task")
    return {
        **{name: value for name in asked if (value := getattr(options, name))},
        "job_name": "isthmus",
        "time": _minutes(options),
        "nodes": nodes,
        "ntasks_per_node": 1,
        "signal_delay_s": round(parse_duration(options.warning, "warning")),
        "stderr_to_stdout": True,
        "wckey": None,
        "additional_parameters": {"requeue": True, **options.parameters},
    }


def _processes(options: SlurmOptions, tasks: int) -> dict[str, object]:
    """For submitit's executor of this machine, which has one node."""
    return {
        "timeout_min": _minutes(options),
        "tasks_per_node": tasks,
        "gpus_per_node": options.gpus_per_node,
        "signal_delay_s": round(parse_duration(options.warning, "warning")),
        "stderr_to_stdout": True,
    }


def _command(*words: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=COMMAND_S, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(words, 1, "", f"{words[0]} gave no answer within {COMMAND_S:g} s")


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no reason given"])[-1]


LOOK_S = 0.5


class LogFiles:
    """A thread that reads the files from their beginnings, also those that are made later."""

    def __init__(self, log: Callable[[str, str], None]) -> None:
        self._log = log
        self._files: list[_LogFile] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._read, name="log files", daemon=True)
        self._thread.start()

    def follow(self, name: str, path: Path) -> None:
        self._files.append(_LogFile(name, path))

    def close(self) -> None:
        """After the lines that are there. Again is no error."""
        self._stopped.set()
        self._thread.join()

    def _read(self) -> None:
        while not self._stopped.wait(LOOK_S):
            self._give(self._files)
        self._give(self._files)

    def _give(self, files: Collection[_LogFile]) -> None:
        for file in tuple(files):
            for line in file.lines():
                self._log(file.name, line)


class _LogFile:
    def __init__(self, name: str, path: Path) -> None:
        self.name, self._path = name, path
        self._read_bytes = 0

    def lines(self) -> list[str]:
        """Those that are whole and were not given before."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._read_bytes)
                whole, newline, _ = file.read().rpartition(b"\n")
        except OSError:  # not made yet
            return []
        self._read_bytes += len(whole) + len(newline)
        return whole.decode(errors="replace").splitlines()
