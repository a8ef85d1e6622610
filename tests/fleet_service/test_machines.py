"""A machine with several accelerators: a device for each, by one ticket and one command."""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus.api import join as device
from isthmus.errors import IsthmusError, PeerError, UserError
from isthmus.runtime.processes.device_processes import ProcessPlace
from isthmus.runtime.processes.memory import machine_memory_bytes
from isthmus.runtime.service.agent import Agent, join_fleet, membership_in, run_group
from isthmus.runtime.service.enrollment import Dismissal, check_name
from isthmus.runtime.service.hardware import hardware_of
from tests.runtime.commands import Done, isthmus, refused

from .parties import Fleet, in_background, outcomes, soon


def folders(folder: Path, *names: str) -> dict[str, Path]:
    return {name: folder / name.replace("/", "-") for name in names}


def test_one_ticket_is_good_for_all_devices_of_a_machine(fleet: Fleet, tmp_path: Path) -> None:
    ticket, desk = fleet.ticket(), folders(tmp_path, "desk/0", "desk/1")
    joined = join_fleet(ticket, desk, 5.0)
    assert list(joined) == ["desk/0", "desk/1"] and all(membership_in(desk[name]) == joined[name] for name in desk)
    assert join_fleet(ticket, desk, 5.0) == joined, "the answer may have been lost on its way"
    for others in (folders(tmp_path, "shelf/0"), folders(tmp_path, "desk/0"), desk | folders(tmp_path, "desk/2")):
        with pytest.raises(PeerError, match="good for one machine"):
            join_fleet(ticket, others, 5.0)
    assert [member.name for member in fleet.state.roster.members()] == ["desk/0", "desk/1"]


def test_all_devices_of_a_machine_join_or_none(fleet: Fleet, tmp_path: Path) -> None:
    join_fleet(fleet.ticket(), folders(tmp_path, "desk/1"), 5.0)
    ticket, desk = fleet.ticket(), folders(tmp_path / "again", "desk/0", "desk/1")
    with pytest.raises(PeerError, match="'desk/1' is taken"):
        join_fleet(ticket, desk, 5.0)
    assert [member.name for member in fleet.state.roster.members()] == ["desk/1"]
    join_fleet(ticket, folders(tmp_path / "again", "desk/0"), 5.0)  # it was not used up


def test_they_live_together_and_one_that_is_lost_is_only_that_one(fleet: Fleet, tmp_path: Path) -> None:
    desk, said = folders(tmp_path, "desk/0", "desk/1"), list[str]()
    agents = {
        name: Agent(
            desk[name],
            joined,
            ProcessPlace(hardware=f"chip ({name})"),
            timeout_s=5.0,
            log=said.append,
            waits_s=(0.2,),  # on a busy machine several attempts fail: their waits would add up to minutes
        )
        for name, joined in join_fleet(fleet.ticket(), desk, 5.0).items()
    }
    ended: list[Exception | None] = []

    def stop() -> None:
        for agent in agents.values():
            agent.stop()

    with in_background(lambda: ended.extend(outcomes(lambda: run_group(agents, said.append))), stop):
        fleet.service.wait_for(["desk/0", "desk/1"])
        assert [current_status.hardware for current_status in fleet.service.current_status().devices] == [
            "chip (desk/0)",
            "chip (desk/1)",
        ]
        fleet.state.roster.revoke("desk/1", 0.0)
        soon(lambda: any(line.startswith("desk/1: ") and "the other devices go on" in line for line in said))
        assert fleet.service.present == {"desk/0"} and not ended
        fleet.state.roster.revoke("desk/0", 0.0)
        soon(lambda: ended)
    assert isinstance(ended[0], Dismissal), "all are lost: that is the command's own end"


def test_a_device_that_ends_by_an_error_of_ours_is_told_of() -> None:
    """Its thread ended without a word, and the command went on without it."""

    class Member:
        def __init__(self, error: Exception) -> None:
            self.error = error

        def run(self) -> None:
            raise self.error

        def stop(self) -> None: ...

    said: list[str] = []
    members = {"desk/0": Member(KeyError("x")), "desk/1": Member(PeerError("gone"))}
    with pytest.raises(IsthmusError):
        run_group(members, said.append)
    assert said[0] in ("desk/0: KeyError: 'x'; the other devices go on", "desk/1: gone; the other devices go on")


@pytest.mark.parametrize("name", ["desk/0", "desk/12", "desk/cpu", "a b/3"])
def test_names_of_a_machines_devices(name: str) -> None:
    check_name(name)


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("all", {"0": "cuda:0", "1": "cuda:1"}),
        ("1", {"1": "cuda:1"}),
        ("1, 0", {"1": "cuda:1", "0": "cuda:0"}),
        ("0,cpu", {"0": "cuda:0", "cpu": "cpu"}),
        ("cuda:1,checked:0", {"1": "cuda:1", "0": "checked:0"}),
    ],
)
def test_which_accelerators_are_devices(monkeypatch: pytest.MonkeyPatch, asked: str, found: dict[str, str]) -> None:
    _two_gpus(monkeypatch)
    assert device.accelerators_of(asked) == found


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("2", ["--devices", "got 2", "below 2", "cuda:0, cuda:1"]),
        ("0,0", ["--devices", "cuda:0 and cuda:0"]),
        ("0,checked:0", ["--devices", "cuda:0 and checked:0", "called 0"]),
        ("0,tpu", ["--devices", "'tpu'", "cuda:0, cuda:1"]),
        ("0,", ["--devices", "''"]),
    ],
)
def test_accelerators_that_cannot_be_devices(monkeypatch: pytest.MonkeyPatch, asked: str, words: list[str]) -> None:
    _two_gpus(monkeypatch)
    with pytest.raises(UserError) as error:
        device.accelerators_of(asked)
    assert all(word in str(error.value) for word in words), error.value


def _two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    here = ("cuda:0", "cuda:1")
    monkeypatch.setattr(device, "accelerator_names", lambda: here)
    monkeypatch.setattr("isthmus.accelerators.available.accelerator_names", lambda: here)


def test_what_is_not_here_ends_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def join(*options: str) -> Done:
        return isthmus("join", *options, "--state", tmp_path)

    refused(join("--device", "tpu:1"), 2, "--device", "'tpu:1'", "cpu")
    refused(join("--devices", "0", "--device", "cpu"), 2, "--devices", "beside --device")
    for several in (join("--device", "cpu", "--device", "checked"), isthmus("probe", *2 * ("--device", "cpu"))):
        refused(several, 2, "--device: got 2 of them", "--devices cpu,c")
    monkeypatch.setattr(device, "accelerator_names", tuple)
    for asked in ("all", "0,2"):
        refused(join("--devices", asked), 2, "--devices", "torch sees no accelerator here", "to take the CPU")


def test_hardware_is_called_by_its_name() -> None:
    (cpu,) = hardware_of(["cpu"], "--device")
    assert cpu.label.endswith(" (cpu)") and cpu.total_bytes > 0 and not cpu.error


def test_what_jobs_may_take_is_each_devices_own() -> None:
    machine = machine_memory_bytes()
    assert device.memory_of("", "cpu") == machine and device.memory_of("", "cuda:0") is None
    assert device.memory_of("1 GiB", "cuda:0") == 1 << 30 == device.memory_of("1 GiB")
    twice = f"{2 * machine} B"
    assert device.memory_of(twice, "cuda:0") == 2 * machine and device.memory_of(twice) == machine
