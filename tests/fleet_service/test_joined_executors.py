"""A federated run on devices that joined: one is killed, one comes later, and the bits are those of one process."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

import isthmus
from isthmus.api.job_overrides import federated_job_of
from isthmus.api.observer import Observer
from isthmus.api.run import Run
from isthmus.api.run_job import program_of, run_job
from isthmus.api.run_session import Choices
from isthmus.errors import UserError
from isthmus.federated.evaluation import RoundHistory, RoundLine
from isthmus.federated.job import FederatedJob
from isthmus.runtime.device.peer_connections import Endpoint
from isthmus.runtime.federated.executor import _allowed, check_code
from isthmus.runtime.identity import Identity, Ticket, decode_ticket
from isthmus.runtime.processes.signals import Stop
from isthmus.scaffold import FirstJob, write_first_job
from tests.federated.test_federated_runs import model, write
from tests.runtime.commands import isthmus as isthmus_command
from tests.runtime.commands import start, wait_until

from .parties import Fleet, outcomes, soon
from .test_fleet_runs import Devices


def _job(folder: Path, **overrides: object) -> FederatedJob:
    """Its clients keep states."""
    return federated_job_of(write(folder), {"runtime.timeout": "10 s", **overrides})


class Silent(Observer):
    """Prints nothing."""


class _Running:
    """The job on the devices of a fleet, in a thread."""

    def __init__(self, fleet: Fleet, job: FederatedJob, folder: Path, *, resume: bool = False) -> None:
        self.folder, self.notes, self.stop = folder, list[str](), Stop()
        self.ended: list[Run | Exception] = []
        choices = Choices(run=folder, resume=resume, backend=fleet.service)

        class Notes(Silent):
            def note(_, text: str) -> None:
                self.notes.append(text)

        def run() -> None:
            self.ended += outcomes(lambda: run_job(job, choices, Notes(), self.stop))

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    @property
    def lines(self) -> list[RoundLine]:
        return list(RoundHistory.of(self.folder).lines()) if self.folder.is_dir() else []

    @property
    def trainers(self) -> set[str]:
        return {name for line in self.lines for name, timed in line.record.trained.items() if timed}

    def said(self, text: str) -> bool:
        return any(text in note for note in self.notes)

    def outcome(self) -> str:
        self._thread.join(180)
        assert not self._thread.is_alive(), self.notes
        (ended,) = self.ended
        assert isinstance(ended, Run), ended
        return ended.outcome


def _in_one_process(job: FederatedJob, folder: Path) -> bytes:
    alone = federated_job_of(job, {"runtime.executors": 1})
    assert run_job(alone, Choices(run=folder), Silent(), Stop()).outcome == "done"
    return model(folder)


def test_two_devices_give_the_bits_of_one_process(fleet: Fleet, tmp_path: Path) -> None:
    job = _job(tmp_path)
    devices = Devices(fleet, tmp_path, ("a", "b"))
    run = _Running(fleet, job, tmp_path / "run")
    assert run.outcome() == "done"
    assert run.trainers == {"a", "b"}
    assert model(tmp_path / "run") == _in_one_process(job, tmp_path / "alone")
    devices.stop()


class _Tickets:
    """Of a coordinator in this process."""

    def __init__(self) -> None:
        self.given: list[str] = []

    def ticket(self) -> Ticket:
        soon(lambda: self.given)
        return decode_ticket(self.given.pop())


@pytest.mark.long
def test_a_served_job_gives_the_bits_of_one_process(tmp_path: Path) -> None:
    own = {"federated.participation.select": "tests.federated.test_selection:largest"}
    job, tickets, ended = _job(tmp_path, **own), _Tickets(), list[object]()
    where = {"state": tmp_path / "fleet", "port": 0, "tickets": 2, "ticket": tickets.given.append}

    def serve() -> None:
        ended.extend(outcomes(lambda: isthmus.serve(job, run=tmp_path / "run", observer=Silent(), **where)))

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    devices = Devices(tickets, tmp_path, ("a", "b"))
    thread.join(180)
    devices.stop()
    assert [run.outcome for run in ended if isinstance(run, Run)] == ["done"], ended
    assert model(tmp_path / "run") == _in_one_process(job, tmp_path / "alone")


@pytest.mark.long
def test_a_device_is_lost_another_comes_and_the_run_goes_on_after_a_stop(fleet: Fleet, tmp_path: Path) -> None:
    """A client's state is at the coordinator: it is not lost with the device that wrote it."""
    job = _job(tmp_path, **{"federated.rounds": 400, "training.eval_every": 0})
    first, second = Devices(fleet, tmp_path, ("a",)), Devices(fleet, tmp_path, ("b",))
    run = _Running(fleet, job, tmp_path / "run")
    soon(lambda: run.trainers == {"a", "b"})
    second.stop()
    soon(lambda: run.said("device b was lost"))
    third = Devices(fleet, tmp_path, ("c",))
    soon(lambda: "c" in run.trainers)
    run.stop.request()
    assert run.outcome() == "interrupted"
    made = len(run.lines)
    first.stop()
    again = _Running(fleet, federated_job_of(job, {"federated.rounds": made + 20}), tmp_path / "run", resume=True)
    assert again.outcome() == "done"
    whole = federated_job_of(job, {"federated.rounds": made + 20})
    assert model(tmp_path / "run") == _in_one_process(whole, tmp_path / "alone")
    assert not any(timed.renewed for line in again.lines for one in line.record.trained.values() for timed in one)
    third.stop()


@pytest.mark.long
def test_a_run_without_devices_waits_for_one(fleet: Fleet, tmp_path: Path) -> None:
    job = _job(tmp_path, **{"federated.rounds": 400, "runtime.executors": 1})
    run = _Running(fleet, job, tmp_path / "run")
    only = Devices(fleet, tmp_path, ("a",))
    soon(lambda: len(run.lines) > 2)
    only.stop()
    soon(lambda: run.said("device a was lost"))
    made = len(run.lines)
    other = Devices(fleet, tmp_path, ("b",))
    soon(lambda: len(run.lines) > made + 2)
    run.stop.request()
    assert run.outcome() == "interrupted"
    assert run.trainers == {"a", "b"}
    other.stop()


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ({"model.name": "tests.federated.populations:module", "model.options": {}}, "model.name"),
        ({"model.name": "hf", "model.options": {"path": "."}}, "model.name"),
        ({"federated.algorithm": "isthmus.federated.algorithms.fedavg:FedAvg"}, "federated.algorithm"),
    ],
)
def test_code_and_weights_that_somebody_elses_job_names_are_not_read(
    overrides: dict[str, object], key: str, tmp_path: Path
) -> None:
    check_code(_job(tmp_path))
    with pytest.raises(UserError) as raised:
        check_code(_job(tmp_path, **overrides))
    assert str(raised.value).startswith(f"{key}: ")


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ({"runtime.scheme": "sd"}, "runtime.scheme"),
        ({"runtime.slow_down": (1.0, 1.0)}, "runtime.slow_down"),
        ({"data.options": {"path": "/etc/data"}, "data.kind": "npz"}, "data.path"),
    ],
)
def test_simulations_that_devices_cannot_carry_out_are_refused(
    overrides: dict[str, object], key: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as raised:
        program_of(_job(tmp_path, **overrides)).check(on_fleet=True)
    assert str(raised.value).startswith(f"{key}: ")


@pytest.mark.long
def test_a_device_of_one_owner_imports_code_from_the_folder_in_which_it_joins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first job of `isthmus init`, with its own algorithm and model."""
    own, home, ticket = tmp_path / "own", tmp_path / "fleet", tmp_path / "ticket"
    write_first_job(own, FirstJob(name="first", task="federated", devices=1, clients=4, steps=1))
    monkeypatch.chdir(own)
    serve = start("serve", "job.toml", "--state", home, "--port", "0", "--tickets", "0", "--run", tmp_path / "run")
    wait_until(lambda: (home / "status.json").exists(), serve)
    ticket.touch(0o600)
    ticket.write_text(isthmus_command("ticket", "--state", home).out)
    join = start("join", "--one-owner", "--state", tmp_path / "device", "--ticket-file", ticket)
    try:
        assert serve.wait(120) == 0, serve.communicate()
    finally:
        for process in (serve, join):
            process.terminate()
            process.communicate(timeout=30)


def test_devices_of_one_owner_open_any_file_that_the_job_names(tmp_path: Path) -> None:
    """As those of `isthmus up` and of a Ray cluster. Relative paths count from the folder of the process."""
    job = _job(tmp_path, **{"data.options": {"path": "/etc/data"}, "data.kind": "npz", "data.folder": "/elsewhere"})
    identity = Identity.made(tmp_path / "device")
    with (
        pytest.raises(UserError, match=r"data\.path: got '/etc/data', expected a relative path"),
        _allowed(job, Endpoint(device="a", identity=identity)),
    ):
        pass
    identity.share_data()
    with _allowed(job, Endpoint(device="a", identity=identity)) as found:
        assert found.data is not None and (found.data.options, found.data.folder) == ({"path": "/etc/data"}, "")
