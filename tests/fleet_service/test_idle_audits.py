"""Steps of a run are computed again by devices of its fleet that are not in its plan."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from isthmus.api.audit import IdleDevices, audit_run
from isthmus.api.folder import RunFolder
from isthmus.cost import build_plan
from isthmus.errors import UserError
from isthmus.experiments import RunOptions, Watcher, run_plan
from isthmus.fleet import Fleet as Machines
from isthmus.job import Prepared, keep_prepared, prepare
from isthmus.plans import Plan
from isthmus.runtime.coordinator.data_holders import DataHolders
from isthmus.runtime.processes.signals import Stop
from tests.runtime.jobs import DIGITS, fleet_of, job_of, random_cut

from .parties import Fleet, soon
from .test_fleet_runs import Devices


def planned() -> tuple[Prepared, Plan, Machines]:
    """For two devices."""
    job = job_of("mlp", {}, DIGITS, steps=4, save_every=2)
    prepared = prepare(msgspec.structs.replace(job, runtime=msgspec.structs.replace(job.runtime, fingerprints=True)))
    machines = fleet_of(2)
    boundaries = random_cut(prepared, 2, 0, once=True)
    return prepared, build_plan(prepared.problem(machines), ("d0", "d1"), boundaries, planner="test"), machines


def test_an_idle_device_computes_the_steps_of_the_others_again(fleet: Fleet, tmp_path: Path) -> None:
    prepared, plan, machines = planned()
    folder = RunFolder(tmp_path / "run")
    folder.begin(prepared.job, machines, plan, 0)
    keep_prepared(prepared, folder.captured)
    devices = Devices(fleet, tmp_path, ("d0", "d1", "d2"))
    fleet.service.wait_for(("d0", "d1", "d2"))
    holders = DataHolders(fleet.service.asks(Stop()), prepared.job.data, ("d0", "d1", "d2"), heldout=False)
    idle = IdleDevices(fleet.service, holders)
    during: list[list[str]] = []

    def advanced(*_: object) -> None:
        during.append(fleet.service.idle(plan.used))

    options = RunOptions(emulate=False, backend=fleet.service)
    outcome = run_plan(prepared, plan, machines, folder.path, options, Watcher(advanced=advanced))
    assert outcome.outcome == "done", outcome.reason
    assert during and all(found == ["d2"] for found in during)

    for agent in devices.agents[:2]:
        agent.stop()
    soon(lambda: fleet.service.present == frozenset({"d2"}))
    notes: list[str] = []
    found = audit_run(folder.path, 4, note=notes.append, idle=idle)
    assert notes == ["computing steps 3 to 4 again from the checkpoint of step 2, on d2"]
    assert found.holds and found.after == 2 and found.compared > 10 and found.devices == ("d0", "d1")
    devices.stop()
    with pytest.raises(UserError, match="audit: no device is idle"):
        audit_run(folder.path, 4, idle=idle)
