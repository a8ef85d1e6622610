"""What the commands of a fleet's folder refuse, and say."""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus.errors import UserError
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
