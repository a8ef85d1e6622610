"""What the commands of a fleet's folder refuse, and say."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest

from isthmus.errors import UserError
from isthmus.runtime.service.bulletin import Bulletin, DeviceNews, post
from isthmus.runtime.service.fleet_state import FleetState
from isthmus.runtime.service.job_queue import JobQueue
from tests.runtime.commands import isthmus


def test_one_coordinator_serves_a_folder(tmp_path: Path) -> None:
    first, second = FleetState(tmp_path), FleetState(tmp_path)
    with first.served(), pytest.raises(UserError, match="another coordinator serves this fleet"), second.served():
        pass
    with second.served():
        pass
    first.close()
    second.close()


def test_what_others_say_is_no_markup(tmp_path: Path) -> None:
    FleetState(tmp_path).close()
    queue = JobQueue(tmp_path)
    number = queue.submit("[red]small", "pipeline", b"{}", tmp_path)
    queue.begin()
    queue.end(number, "failed", "[data]: [/tmp/x] is not there")
    queue.close()
    done = isthmus("jobs", "--state", str(tmp_path))
    assert done.code == 0 and "[red]small" in done.out
    assert "[data]: [/tmp/x]" in " ".join(done.out.replace("│", " ").split())


@pytest.mark.parametrize("command", [["devices"], ["devices", "--revoke", "bob"], ["ticket"], ["drain", "bob"]])
def test_a_folder_that_was_mistyped_does_not_become_a_fleet(tmp_path: Path, command: list[str]) -> None:
    done = isthmus(*command, "--state", str(tmp_path / "typo"))
    assert done.code == 2 and "no fleet was served from it: start `isthmus serve`" in done.err
    assert not (tmp_path / "typo").exists()


def test_a_device_is_not_drained_before_it_works(tmp_path: Path) -> None:
    state = FleetState(tmp_path)

    def drained() -> str:
        done = isthmus("drain", "bob", "--state", str(tmp_path))
        assert done.code == 2 and state.take_leaving() == []
        return done.err

    assert "no device has joined" in drained()
    state.roster.redeem(state.roster.invite(time.time())[0], "b" * 32, "bob", time.time())
    assert "no coordinator serves this fleet now" in drained()
    bob = DeviceNews(name="bob", id="b" * 32, working=False)
    post(tmp_path, Bulletin(at_s=time.time(), port=1, devices=(bob,)))
    assert "works for no run" in drained()
    post(tmp_path, Bulletin(at_s=time.time(), port=1, devices=(msgspec.structs.replace(bob, working=True),)))
    assert isthmus("drain", "bob", "--state", str(tmp_path)).code == 0
    assert state.take_leaving() == ["bob"]
    state.close()
