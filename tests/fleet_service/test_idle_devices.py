"""Which devices of a fleet have nothing to do, and compute as others do."""

from __future__ import annotations

import contextlib
from pathlib import Path

from isthmus.runtime.processes.device_processes import ProcessPlace
from isthmus.runtime.service.agent import Agent, join_fleet

from .parties import Fleet, in_background


def test_idle_devices_are_those_of_the_same_hardware_that_work_for_no_run(fleet: Fleet, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        for name, hardware in (("a", "one"), ("b", "one"), ("c", "another")):
            membership = join_fleet(fleet.ticket(), {name: tmp_path / name}, 10.0)[name]
            place = ProcessPlace(hardware=hardware)
            agent = Agent(tmp_path / name, membership, place, timeout_s=10.0, log=lambda _: None)
            stack.enter_context(in_background(agent.run, agent.stop))
        fleet.service.wait_for(("a", "b", "c"))
        assert fleet.service.idle(("a",)) == ["a", "b"]
        assert fleet.service.idle(("c",)) == ["c"]
        assert fleet.service.idle(("a", "c")) == [], "of two kinds none computes as both"
