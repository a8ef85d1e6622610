"""A job on devices that joined: real processes, TLS between all of them."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from isthmus.cost import build_plan
from isthmus.data import DataSpec, load_dataset
from isthmus.data.registry import refuse_paths
from isthmus.errors import UserError
from isthmus.experiments import RunOptions, Watcher, run_plan
from isthmus.job import Job, prepare
from isthmus.runtime.coordinator.run_callbacks import Outcome
from isthmus.runtime.device.stage_data import stage_data
from isthmus.runtime.identity.blinded_digests import ONE_OWNER, blinded
from isthmus.runtime.processes.device_processes import ProcessPlace
from isthmus.runtime.service.agent import Agent, join_fleet
from isthmus.runtime.service.status_file import LinkStatus
from isthmus.training.checkpoint import latest_checkpoint
from isthmus.training.optim import OptimizerConfig
from tests.runtime.jobs import DIGITS, final_weights, fleet_of, job_of, plain_run, random_cut
from tests.runtime.wire import assignment

from .crowds import crowd
from .parties import Fleet, Inviting, outcomes, soon

ON_DIGITS = job_of("mlp", {}, DIGITS)


class Devices:
    """Agents in threads of this process; their work is done by processes of their own."""

    def __init__(
        self,
        fleet: Inviting,
        folder: Path,
        names: tuple[str, ...],
        *,
        relayed: bool = False,
        checkpoints_to: tuple[str, ...] = (),
    ) -> None:
        self.said: list[str] = []
        self.agents: list[Agent] = []
        for name in names:
            membership = join_fleet(fleet.ticket(), {name: folder / name}, 10.0)[name]
            place = ProcessPlace(relayed=relayed, checkpoints_to=checkpoints_to)
            self.agents.append(Agent(folder / name, membership, place, timeout_s=10.0, log=self.said.append))
        self._threads = [threading.Thread(target=outcomes, args=(agent.run,), daemon=True) for agent in self.agents]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        for agent in self.agents:
            agent.stop()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()


def _train(
    fleet: Fleet, folder: Path, job: Job = ON_DIGITS, *, tells: Callable[[], None] = lambda: None, store: str = ""
) -> tuple[Outcome, list[float]]:
    prepared = prepare(job)
    machines = fleet_of(2)
    boundaries = random_cut(prepared, 2, 0, once=True)
    plan = build_plan(prepared.problem(machines), machines.names, boundaries, planner="test")
    options = RunOptions(emulate=False, backend=fleet.service, store=store)
    losses: list[float] = []

    def advanced(item: object, loss: float | None, spans: object) -> None:
        losses.extend([loss] if loss is not None else [])
        tells()

    return run_plan(prepared, plan, machines, folder, options, Watcher(advanced=advanced)), losses


@pytest.mark.parametrize("relayed", [False, True])
def test_devices_that_joined_train_as_the_plain_loop_does(fleet: Fleet, tmp_path: Path, relayed: bool) -> None:
    devices = Devices(fleet, tmp_path, ("d0", "d1"), relayed=relayed)
    links: list[LinkStatus] = []
    outcome, losses = _train(fleet, tmp_path / "run", tells=lambda: links.extend(fleet.service.current_status().links))
    assert outcome.outcome == "done", outcome.reason
    assert {(link.devices, link.relayed) for link in links} == {(("d0", "d1"), relayed)}
    assert all(link.latency_s is not None for link in links)
    assert (links[-1].carried_bytes > 0) == relayed, "what a relayed link costs"
    module, expected = plain_run(ON_DIGITS, prepare(ON_DIGITS))
    assert losses == expected
    saved = final_weights(tmp_path / "run")
    for name, value in module.named_parameters():
        assert torch.equal(saved[name], value), name
    soon(lambda: sum("the run is over" in line for line in devices.said) == 2)
    devices.stop()


def test_devices_whose_owners_name_the_store_write_their_parts_of_checkpoints(fleet: Fleet, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store/runs"
    devices = Devices(fleet, tmp_path, ("d0", "d1"), checkpoints_to=(url,))
    for name, parts in (("runs/first", 0), ("other", 2)):
        outcome, _ = _train(fleet, tmp_path / name, store=f"file://{tmp_path}/store/{name}")
        assert outcome.outcome == "done", outcome.reason
        here = latest_checkpoint(tmp_path / name / "checkpoints").glob("stage-*")
        assert len(list(here)) == parts, "of a store that no owner names all come to the coordinator"
    first, other = (final_weights(tmp_path / name) for name in ("runs/first", "other"))
    assert first.keys() == other.keys() and all(torch.equal(first[name], other[name]) for name in other)
    devices.stop()


def test_steps_whose_loss_is_infinite_are_left_out_as_in_the_plain_loop(fleet: Fleet, tmp_path: Path) -> None:
    job = job_of("mlp", {}, DIGITS, steps=4, non_finite="skip")
    job = msgspec.structs.replace(job, optimizer=(OptimizerConfig(name="sgd", lr=1e30),))
    devices = Devices(fleet, tmp_path, ("d0", "d1"))
    outcome, _ = _train(fleet, tmp_path / "run", job)
    devices.stop()
    assert outcome.outcome == "done", outcome.reason
    module, expected = plain_run(job, prepare(job))
    assert [math.isfinite(loss) for loss in expected] == [True, False, False, False]
    saved = final_weights(tmp_path / "run")
    for name, value in module.named_parameters():
        assert torch.equal(saved[name], value), name


@pytest.mark.long
def test_unknown_peers_at_the_door_keep_no_device_out(fleet: Fleet, tmp_path: Path) -> None:
    """They hold more connections than there is room for, from the devices' own address, and come back when cut."""
    with crowd(fleet.service.port, idle=80, dripping=40, halfway=40) as unknown_peers:
        devices = Devices(fleet, tmp_path, ("d0", "d1"))
        outcome, losses = _train(fleet, tmp_path / "run")
        assert outcome.outcome == "done", outcome.reason
        assert losses and unknown_peers.reopened
        devices.stop()


def test_a_run_waits_for_its_devices_and_ends_when_one_is_revoked(fleet: Fleet, tmp_path: Path) -> None:
    first = Devices(fleet, tmp_path, ("d0",))
    ended: list[Outcome] = []
    running = threading.Thread(target=lambda: ended.append(_train(fleet, tmp_path / "run")[0]), daemon=True)
    running.start()
    soon(lambda: any(line.startswith("waiting for d1") for line in fleet.said))
    second = Devices(fleet, tmp_path, ("d1",))
    soon(lambda: any("at work" in line for line in second.said))
    fleet.state.roster.revoke("d1", 0.0)
    running.join(120)
    assert [o.outcome for o in ended] == ["lost"] and "'d1' was lost: it was revoked" in ended[0].reason
    first.stop()


@pytest.mark.parametrize(
    "options", [{"files": "/etc/passwd"}, {"files": ["ok.txt", "../secret"]}, {"files": "stdlib", "tokenizer": "~/x"}]
)
def test_a_coordinator_cannot_name_files_outside_of_the_data_folder(options: dict[str, object]) -> None:
    with pytest.raises(UserError, match="expected a relative path"):
        refuse_paths(DataSpec(kind="text", options=options))
    refuse_paths(DataSpec(kind="text", options={"files": "texts/**/*.txt", "sequence_length": 3}))


def test_a_device_whose_data_have_changed_since_it_described_them_is_refused() -> None:
    told = assignment("d0")
    columns = msgspec.structs.replace(told.train, columns=("labels",))
    told = msgspec.structs.replace(told, train=columns, evaluates=False, digests={"train": "f" * 64})
    with pytest.raises(UserError, match=r"data \(train\): got other samples than this device described"):
        stage_data(told, ONE_OWNER, foreign=True)
    own = load_dataset(told.data, "train").fingerprint
    told = msgspec.structs.replace(told, train_samples=len(load_dataset(told.data, "train")))
    for key, allowed in ((ONE_OWNER, True), (bytes(32), False)):
        given = msgspec.structs.replace(told, digests={"train": blinded(own, key)})
        with contextlib.nullcontext() if allowed else pytest.raises(UserError, match="other samples"):
            assert stage_data(given, ONE_OWNER, foreign=True).keys() == {"train"}
