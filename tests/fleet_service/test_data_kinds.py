"""The owner of a device says which kinds of data a coordinator may name."""

from __future__ import annotations

import importlib.metadata
import sys
import threading
from importlib.metadata import EntryPoint
from pathlib import Path

import msgspec
import pytest

from isthmus.api.join import kinds_of
from isthmus.cost import build_plan
from isthmus.data import DataSpec
from isthmus.errors import UserError
from isthmus.experiments import RunOptions, Watcher, run_plan
from isthmus.job import prepare
from isthmus.runtime.device.stage_data import stage_data
from isthmus.runtime.identity.blinded_digests import ONE_OWNER
from isthmus.runtime.processes.device_processes import ProcessPlace
from isthmus.runtime.service.agent import Agent, join_fleet
from tests.federated.sites import write_job
from tests.runtime.commands import isthmus, refused
from tests.runtime.jobs import DIGITS, fleet_of, job_of, random_cut
from tests.runtime.wire import assignment

from .parties import Fleet, outcomes


def test_what_is_not_allowed_is_refused_and_the_coordinator_is_told(fleet: Fleet, tmp_path: Path) -> None:
    agents: list[Agent] = []
    for name in ("d0", "d1"):
        membership = join_fleet(fleet.ticket(), {name: tmp_path / name}, 10.0)[name]
        place = ProcessPlace(data_kinds=("text", "npz"))
        agents.append(Agent(tmp_path / name, membership, place, timeout_s=10.0, log=lambda _: None))
    threads = [threading.Thread(target=outcomes, args=(agent.run,), daemon=True) for agent in agents]
    for thread in threads:
        thread.start()
    prepared = prepare(job_of("mlp", {}, DIGITS))
    machines = fleet_of(2)
    boundaries = random_cut(prepared, 2, 0, once=True)
    plan = build_plan(prepared.problem(machines), machines.names, boundaries, planner="test")
    with pytest.raises(UserError, match=r"data.kind: got 'digits', expected one of: npz, text: the owner of this dev"):
        run_plan(
            prepared, plan, machines, tmp_path / "run", RunOptions(emulate=False, backend=fleet.service), Watcher()
        )
    for agent in agents:
        agent.stop()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.parametrize("evaluates", [False, True])
def test_nothing_of_it_is_imported(evaluates: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []

    class Entry(EntryPoint):
        def load(self) -> object:
            loaded.append(self.name)
            raise ImportError("it was loaded")

    entries = [Entry("hostile", "anything:load", "isthmus.datasets")]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda *, group: entries if "datasets" in group else [])
    told = assignment("d0")
    columns = msgspec.structs.replace(told.train, columns=("labels",))
    part = {"evaluation": columns, "evaluates": True} if evaluates else {"train": columns, "evaluates": False}
    told = msgspec.structs.replace(told, data=DataSpec(kind="hostile"), **part)
    with pytest.raises(UserError, match=r"data.kind: got 'hostile', expected one of: digits"):
        stage_data(told, ONE_OWNER, foreign=True, kinds=("digits",))
    assert loaded == []
    with pytest.raises(UserError, match="it was loaded"):
        stage_data(told, ONE_OWNER, foreign=True, kinds=("hostile",))
    assert stage_data(assignment("d0"), ONE_OWNER, foreign=True, kinds=()) == {}, "a stage without data names none"


def test_a_callable_is_imported_for_an_unknown_peer_only_if_the_owner_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "told_to.py").write_text("raise SystemExit('it was imported')")
    monkeypatch.syspath_prepend(tmp_path)
    kind = "told_to:load"
    told = assignment("d0")
    columns = msgspec.structs.replace(told.train, columns=("labels",))
    told = msgspec.structs.replace(told, data=DataSpec(kind=kind), train=columns, evaluates=False)
    for kinds, message in (
        (None, "got 'told_to:load', expected an installed kind: a callable is imported for nobody else unless"),
        (("digits", "told_to:other"), "got 'told_to:load', expected one of: digits, told_to:other"),
    ):
        with pytest.raises(UserError, match=message):
            stage_data(told, ONE_OWNER, foreign=True, kinds=kinds)
    assert "told_to" not in sys.modules
    for foreign, kinds in ((True, (kind,)), (False, None)):
        with pytest.raises(UserError, match="it was imported"):
            stage_data(told, ONE_OWNER, foreign=foreign, kinds=kinds)
    assert kinds_of(f"digits, {kind}") == ("digits", kind)


def test_a_kind_that_nobody_has_is_a_slip(tmp_path: Path) -> None:
    result = isthmus("join", "--data-kinds", "text,nzp", "--state", tmp_path / "state")
    refused(result, 2, "--data-kinds 'nzp': did you mean 'npz'")


def test_a_sites_file_is_held_to_it_too(tmp_path: Path) -> None:
    write_job(tmp_path, ("a", "b"))
    result = isthmus("join", "--site", tmp_path / "a.toml", "--data-kinds", "text", "--state", tmp_path / "state")
    refused(result, 2, "data.kind: got 'npz', expected one of: text")
