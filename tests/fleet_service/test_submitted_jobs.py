"""Jobs handed to a coordinator: the queue, what is done with it, and the commands."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import msgspec
import pytest

import isthmus as isthmus_package
from isthmus.api import serve as serving
from isthmus.api.observer import Observer
from isthmus.api.run_session import Choices
from isthmus.api.serve import run_queue
from isthmus.api.terminal import logged
from isthmus.callbacks import RunStarted
from isthmus.errors import UserError
from isthmus.extensions import import_object
from isthmus.federated.job import FederatedJob, load_federated_job
from isthmus.job import Job, fleet_of, load_job
from isthmus.runtime.coordinator.recovery_record import RecoveryRecord
from isthmus.runtime.identity import Ticket, decode_ticket
from isthmus.runtime.processes.signals import Stop
from isthmus.runtime.service.job_queue import JobQueue, job_log
from isthmus.runtime.service.status_file import CoordinatorStatus, DeviceStatus, write_status
from isthmus.simulator.options import Fault
from isthmus.simulator.queue import RunOfJob, simulate_queue
from tests.federated.sites import write_job as write_federated_job
from tests.federated.test_secure_jobs import AGGREGATION
from tests.runtime.commands import edited, isthmus, refused, start, wait_until, write_job

from .doors import family_of, listening, readable_by_others, refuses_unknown_peers
from .parties import Fleet
from .test_fleet_faults import FLEET
from .test_fleet_runs import Devices


def _submitted(fleet: Fleet, folder: Path, *names: str) -> JobQueue:
    """The fleet's queue, with jobs of these names."""
    for name in names:
        (folder / name).mkdir()
        job = edited(write_job(folder / name), ('"small"', f'"{name}"'))
        done = isthmus("submit", job, "--state", fleet.state.folder)
        assert done.code == 0, done
    return JobQueue(fleet.state.folder)


def _states(queue: JobQueue) -> list[str]:
    return [job.state for job in queue.jobs()]


class _Tickets:
    """Of a coordinator in another process."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.given: list[str] = []

    def ticket(self) -> Ticket:
        self.given.append(isthmus("ticket", "--state", self.home).out.strip())
        return decode_ticket(self.given[-1])


INTERRUPTED = 130
Carry = Callable[[Job, Choices, Observer, Stop], int]


def _served(fleet: Fleet, queue: JobQueue, carry: Carry) -> None:
    """Serve until Ctrl-C, with `carry` in place of training."""

    def run(job: Job, choices: Choices, observer: Observer, stop: Stop) -> SimpleNamespace:
        return SimpleNamespace(outcome="interrupted" if carry(job, choices, observer, stop) == INTERRUPTED else "done")

    with mock.patch.object(serving, "run_job", run), contextlib.suppress(KeyboardInterrupt):
        run_queue(fleet.service, queue, fleet.state.folder, fleet.said.append, logged)


def _ctrl_c() -> None:
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def test_one_after_another_and_a_failure_stops_nobody(fleet: Fleet, tmp_path: Path) -> None:
    queue = _submitted(fleet, tmp_path, "first", "second", "third")
    began: list[tuple[str, bool, Path]] = []

    def carry(job: Job, choices: Choices, observer: Observer, stop: Stop) -> int:
        began.append((job.name, choices.resume, Path.cwd()))
        observer.note(f"words of {job.name}")
        if job.name == "second":
            raise UserError("no such data")
        if job.name == "third":
            _ctrl_c()
            time.sleep(10)
        return 0

    _served(fleet, queue, carry)
    assert began == [("first", False, Path.cwd()), ("second", False, Path.cwd()), ("third", False, Path.cwd())]
    assert _states(queue) == ["done", "failed", "queued"], "what Ctrl-C ended waits for the next coordinator"
    assert queue.jobs()[1].detail == "no such data"
    assert "words of second" in job_log(fleet.state.folder, 2).read_text()
    assert "error: no such data" in isthmus("logs", "2", "--state", fleet.state.folder).out
    listed = json.loads(isthmus("jobs", "--state", fleet.state.folder, "--json").out)
    assert [(job["number"], job["state"]) for job in listed] == [(1, "done"), (2, "failed"), (3, "queued")]
    assert Path(listed[0]["folder"]).parent == tmp_path / "first" / "runs"


def test_a_job_finds_the_modules_beside_its_file_and_no_other_jobs(fleet: Fleet, tmp_path: Path) -> None:
    """`isthmus init` writes model.py there; the coordinator and `submit` are started elsewhere."""
    for name in ("first", "second", "third"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "beside_a_job.py").write_text(f"name = {name!r}")
        job = edited(write_job(tmp_path / name), ('"small"', f'"{name}"'))
        assert isthmus("submit", job, "--state", fleet.state.folder).code == 0
    (tmp_path / "third" / "beside_a_job.py").write_text("name = 'changed since'")
    found: list[object] = []

    def carry(job: Job, choices: Choices, observer: Observer, stop: Stop) -> int:
        found.append(import_object("model", "beside_a_job:name"))
        if job.name == "third":
            _ctrl_c()
            time.sleep(10)
        return 0

    path = list(sys.path)
    _served(fleet, JobQueue(fleet.state.folder), carry)
    assert found == ["first", "second", "changed since"]
    assert sys.path == path
    assert "beside_a_job" not in sys.modules


def test_submit_says_which_devices_are_not_connected(fleet: Fleet, tmp_path: Path) -> None:
    job, state = write_job(tmp_path), fleet.state.folder
    names = fleet_of(load_job(job)).names
    for here in (names[1:], names):
        devices = tuple(DeviceStatus(name=name, id=name, working=False) for name in here)
        write_status(state, CoordinatorStatus(at_s=time.time(), port=1, devices=devices))
        done = isthmus("submit", job, "--state", state)
        assert done.code == 0
        assert (f"not connected now: {names[0]}; the job waits for those" in done.err) == (here != names), done.err


def test_ctrl_c_is_not_lost_on_a_job_that_fails_meanwhile(fleet: Fleet, tmp_path: Path) -> None:
    queue = _submitted(fleet, tmp_path, "first", "second")

    def carry(job: Job, choices: Choices, observer: Observer, stop: Stop) -> int:
        with stop.calls(heard.set):
            _ctrl_c()
            assert heard.wait(60)
        raise UserError("its devices did not come")

    heard = threading.Event()
    _served(fleet, queue, carry)
    assert _states(queue) == ["failed", "queued"]


def test_a_job_that_is_stopping_is_resumed_once_it_has_stopped(tmp_path: Path) -> None:
    """Not the one that was stopped before it."""
    queue = JobQueue(tmp_path)
    for name in ("old", "new"):
        queue.submit(name, "pipeline", b"", tmp_path)
    queue.stop(1)
    assert queue.begin() is not None
    with pytest.raises(UserError, match="job 2: is running"):
        queue.resume(2)
    queue.stop(2)
    found = queue.stopping()
    assert found is not None and found.number == 2
    queue.resume(found.number)
    assert queue.is_unwanted(2) and queue.stopping() is None
    queue.end(2, "stopped")
    assert _states(queue) == ["stopped", "queued"]
    assert queue.begin() is not None and not queue.is_unwanted(2)
    queue.stop(2)
    queue.end(2, "stopped")
    assert _states(queue) == ["stopped", "stopped"]
    queue.close()


def test_a_job_whose_devices_are_absent_is_queued_as_in_a_simulation(fleet: Fleet, tmp_path: Path) -> None:
    """It says which it waits for, is the one that `isthmus stop` stops, and runs once they are there."""
    queue = _submitted(fleet, tmp_path, "first", "second", "third")
    state, seen = ("--state", fleet.state.folder), list[list[tuple[str, str]]]()

    def shown() -> list[tuple[str, str]]:
        return [(job.state, job.detail) for job in queue.jobs()]

    def carry(job: Job, choices: Choices, observer: Observer, stop: Stop) -> int:
        if job.name == "third":
            _ctrl_c()
            time.sleep(10)
        with fleet.service.deciding() as membership:
            membership.begin_wait(-1, ["absent"], every=True)
        wait_until(lambda: queue.jobs()[job.name == "second"].detail != "")
        seen.append(shown())
        if job.name == "second":
            assert isthmus("stop", *state).code == 0
            ended = threading.Event()
            with stop.calls(ended.set):
                assert ended.wait(60)
            return INTERRUPTED
        with fleet.service.deciding() as membership:
            membership.stop_wait(-1)
        choices.callbacks[0].start(RunStarted(run=tmp_path, kind="pipeline", steps=1))
        wait_until(lambda: queue.jobs()[0].state == "running")
        seen.append(shown())
        return 0

    _served(fleet, queue, carry)
    behind = ("queued", "")
    assert seen[0] == [("queued", "waits for absent"), behind, behind]
    assert seen[1] == [("running", ""), behind, behind]
    assert seen[2] == [("done", ""), ("queued", "waits for absent"), behind]
    assert shown() == [("done", ""), ("stopped", ""), behind]
    away = simulate_queue(
        ["first", "second"], lambda number, _: RunOfJob(1.0, needed=("absent",)), [Fault(device="absent", time_s=0.0)]
    ).jobs
    assert [(job.state, job.detail) for job in away] == [("done", ""), ("queued", "waits for absent")]


def test_a_job_is_stopped_and_goes_on_where_it_was(fleet: Fleet, tmp_path: Path) -> None:
    queue = _submitted(fleet, tmp_path, "first", "second")
    state = ("--state", fleet.state.folder)
    asked: list[tuple[str, bool, Path | None]] = []

    def carry(job: Job, choices: Choices, observer: Observer, stop: Stop) -> int:
        asked.append((job.name, choices.resume, choices.run))
        assert choices.run is not None
        (choices.run / "job.json").write_text("{}")  # a session has begun
        if len(asked) == 1:
            assert isthmus("stop", *state).code == 0
            ended = threading.Event()
            with stop.calls(ended.set):
                assert ended.wait(60)
            assert isthmus("resume", "second", *state).code != 0, "it waits already"
            return INTERRUPTED
        if len(asked) == 2:
            assert _states(queue) == ["stopped", "running"]
            assert isthmus("resume", *state).code == 0, "what was stopped last, not what runs"
        if len(asked) == 3:
            _ctrl_c()
            time.sleep(10)
        return 0

    _served(fleet, queue, carry)
    runs = [tmp_path / name / "runs" / name for name in ("first", "second")]
    assert asked == [("first", False, runs[0]), ("second", False, runs[1]), ("first", True, runs[0])]
    assert _states(queue) == ["queued", "done"]
    assert isthmus("stop", "first", *state).code == 0 and _states(queue) == ["stopped", "done"]
    refused(isthmus("stop", "second", *state), 2, "job 2", "is done")
    refused(isthmus("resume", "second", *state), 2, "job 2", "is done")
    refused(isthmus("logs", "fourth", *state), 2, "fourth", "isthmus jobs")


def test_a_job_whose_folder_or_log_is_gone_ends_nobody_else(fleet: Fleet, tmp_path: Path) -> None:
    queue = JobQueue(fleet.state.folder)
    for name in ("gone", "mute"):
        queue.submit(name, "pipeline", b"{}", tmp_path / name)
    with contextlib.closing(_submitted(fleet, tmp_path, "last")):
        job_log(fleet.state.folder, 2).mkdir(parents=True)
        _served(fleet, queue, lambda *_: _ctrl_c() or time.sleep(10) or 0)
    assert _states(queue) == ["failed", "failed", "queued"]
    assert "submitted from" in queue.jobs()[0].detail and "No such file" in queue.jobs()[0].detail
    assert queue.jobs()[1].detail == "its log cannot be written: Is a directory"
    queue.close()


def test_what_a_killed_coordinator_ran_goes_first(fleet: Fleet, tmp_path: Path) -> None:
    queue = _submitted(fleet, tmp_path, "first", "second")
    begun = queue.begin()
    assert begun is not None and begun.name == "first"
    other = JobQueue(fleet.state.folder)
    with other.served():
        assert _states(other) == ["queued", "queued"]
        again = other.begin()
        assert again is not None and again.name == "first"
        queue.stop(again.number)
        with pytest.raises(UserError, match="another coordinator"), queue.served():
            pass
    with queue.served():
        assert _states(queue) == ["stopped", "queued"], "killed before it could do so"


@pytest.mark.parametrize("table", ["[runtime]", AGGREGATION], ids=["open", "secure"])
def test_a_federated_job_is_deployed(table: str, fleet: Fleet, tmp_path: Path) -> None:
    """Whether a site is a fleet, its own file says alone."""
    job = edited(write_federated_job(tmp_path, ("a", "b")), ("[runtime]", table))
    assert isthmus("submit", job, "--state", fleet.state.folder).code == 0
    deployed: list[object] = []

    def run_job(job: FederatedJob, choices: Choices, *_: object) -> None:
        deployed.append((job, choices.resume, choices.backend))
        _ctrl_c()
        time.sleep(10)

    queue = JobQueue(fleet.state.folder)
    with mock.patch.object(serving, "run_job", run_job):
        run_queue(fleet.service, queue, fleet.state.folder, fleet.said.append, logged)
    assert deployed == [(load_federated_job(job), False, fleet.service)]
    assert _states(queue) == ["queued"]


def test_only_what_could_run_is_taken(fleet: Fleet, tmp_path: Path) -> None:
    state = ("--state", fleet.state.folder)
    refused(isthmus("submit", edited(write_job(tmp_path), ('"laptop"', '"laptpo"')), *state), 2, "laptpo")
    refused(isthmus("submit", edited(write_job(tmp_path), ('"gpt"', '"gtp"')), *state), 2, "did you mean 'gpt'")
    elsewhere = edited(write_job(tmp_path), ('"stdlib"', '["/etc/passwd"]'))
    refused(isthmus("submit", elsewhere, *state), 2, "expected a relative path")
    refused(isthmus("submit", write_job(tmp_path), "--state", tmp_path / "none"), 2, "no fleet was served")
    assert JobQueue(fleet.state.folder).jobs() == []


def test_a_polite_end_is_a_ctrl_c(fleet: Fleet, tmp_path: Path) -> None:
    number = JobQueue(fleet.state.folder).submit("waits", "pipeline", b"{}", tmp_path)
    job_log(fleet.state.folder, number).parent.mkdir()
    job_log(fleet.state.folder, number).write_text("words\n")
    process = start("logs", "--follow", "--state", fleet.state.folder)
    assert process.stdout is not None and process.stdout.readline() == "words\n"
    process.terminate()
    assert (*process.communicate(timeout=30), process.returncode) == ("", "", INTERRUPTED)


def test_others_cannot_command(fleet: Fleet, tmp_path: Path) -> None:
    fleet.state.folder.chmod(0o755)
    refused(isthmus("submit", write_job(tmp_path), "--state", fleet.state.folder), 2, "0700", "other users")


def _doors_are_shut(coordinator: int) -> None:
    """Of every listener of every process of the fleet: the coordinator and, started from here, two devices at work."""
    doors = {pid: listening(pid) for pid in family_of(os.getpid()) if pid != os.getpid()}
    open_doors = [address for found in doors.values() for address in found]
    assert len(doors[coordinator]) == 1 and len(open_doors) == 3, doors
    for address in open_doors:
        assert address[0] == "127.0.0.1", "nobody asked for more"
        refuses_unknown_peers(address)


def _no_secret_is_in_the_open(tickets: _Tickets, run: Path, coordinator: int) -> None:
    """Neither in command lines, nor in the run's folder as far as others may read it, nor in what was told."""
    record = msgspec.json.decode((run / "record.json").read_bytes(), type=RecoveryRecord)
    secrets = [record.run, *tickets.given, *(decode_ticket(ticket).secret.hex() for ticket in tickets.given)]
    pids = (*family_of(coordinator), *family_of(os.getpid()))
    told = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids]
    told += readable_by_others(run)
    told.append(isthmus("logs", "--state", tickets.home, "--all").out.encode())
    told.append(isthmus("status", "--state", tickets.home, "--json").out.encode())
    assert len(told) > 6 and any(b"isthmus device" in words for words in told)
    assert not any(secret.encode() in words for secret in secrets for words in told)


def test_nothing_else_listens() -> None:
    """Every listener is made in one place, and the queue of HTTP's is set anew in another. Devices that connect to each
    other at the same time listen for those seconds at ports that they have."""
    source = Path(isthmus_package.__file__).parent
    words = re.compile(r"create_server\(|\.listen\(|HTTPServer|start_server\(|TCPStore\(")
    found = {str(path.relative_to(source)) for path in source.rglob("*.py") if words.search(path.read_text())}
    assert found == {
        "listening.py",
        "private_http.py",
        "runtime/transport/rendezvous.py",
    }


def _at_work(home: Path) -> int:
    """Devices that work, once the run has done more than three steps."""
    status = json.loads(isthmus("status", "--state", home, "--json").out)
    if status["running"]["done"] <= 3:
        return 0
    return sum(device["working"] for device in status["coordinator"]["devices"])


def test_submitted_to_a_coordinator_that_serves(tmp_path: Path) -> None:
    """Real processes, from the command line alone."""
    home = tmp_path / "fleet"
    (tmp_path / "two.toml").write_text(FLEET)
    job = edited(write_job(tmp_path, steps=100_000, fleet=str(tmp_path / "two.toml")), ("eval_every = 5\n", ""))
    process = start("serve", "--state", home, "--port", "0", "--tickets", "0")
    try:
        wait_until(lambda: (home / "status.json").exists(), process)
        tickets = _Tickets(home)
        devices = Devices(tickets, tmp_path, ("d0", "d1"))
        assert isthmus("submit", job, "--state", home).out == "1\n"

        run = tmp_path / "runs" / "small" / "losses.jsonl"
        wait_until(lambda: run.exists() and run.read_bytes().count(b"\n") > 3, process)
        wait_until(lambda: _at_work(home) == 2, process)  # told once a second
        assert "job 1 (small)" in isthmus("status", "--state", home).out
        wait_until(lambda: "at work" in isthmus("status", "--state", home).out, process)
        wait_until(lambda: "direct" in isthmus("status", "--state", home).out, process)
        _doors_are_shut(process.pid)
        _no_secret_is_in_the_open(tickets, run.parent, process.pid)
        assert isthmus("stop", "--state", home).code == 0
        assert "to go on: isthmus resume 1" in isthmus("logs", "--state", home, "--follow", "--all").out
        (stopped,) = JobQueue(home).jobs()
        assert stopped.state == "stopped" and any((Path(stopped.folder) / "checkpoints").iterdir())
        devices.stop()
    finally:
        process.terminate()  # as a supervisor does
        process.communicate(timeout=30)
    assert process.returncode == INTERRUPTED
    assert "no coordinator" in isthmus("status", "--state", home).out
