"""What a lying coordinator gets from honest sites over TLS: nothing of one site's update, no round beyond the run."""

from __future__ import annotations

from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from isthmus.federated.task_spec import Approval, SiteLog
from isthmus.protocol.federated_messages import ExecutorJoined, PhaseId, SumsSent
from isthmus.runtime.identity import Authority, Identity
from tests.fleet_service.parties import certified, soon

from .hostile import HostileCoordinator, settled

NAMES = ("a", "b", "c", "d")


@pytest.fixture
def coordinator(tmp_path: Path) -> Generator[HostileCoordinator]:
    hostile = HostileCoordinator(tmp_path, NAMES)
    yield hostile
    hostile.close()


def another_run(coordinator: HostileCoordinator) -> None:
    coordinator.kept = "1" * 32
    coordinator.reconnect()


@pytest.mark.parametrize(
    ("again", "then", "why"),
    [
        (PhaseId(0, number=-1), lambda _: None, "Expected `int` >= 0 - at `$.body.opening.phase.number`"),
        (PhaseId(0, number=1), lambda _: None, "asked for pass 2 of the run, expected 1"),
        (PhaseId(0, attempt=1), HostileCoordinator.reconnect, "a sum of this round, with other sites, are revealed"),
        (PhaseId(1), lambda _: None, "of this update, or of one from the same model, with other sites, are revealed"),
        (PhaseId(0), another_run, "of this update, or of one from the same model, with other sites, are revealed"),
    ],
    ids=["before the first pass", "beyond the last pass", "after a reconnection", "another round", "another run"],
)
def test_the_same_model_with_one_site_fewer_tells_no_update(
    coordinator: HostileCoordinator, again: PhaseId, then: Callable[[HostileCoordinator], None], why: str
) -> None:
    """The difference of both sums would be site d's update, to the last bit but the scale."""
    whole = coordinator.secure_sum(PhaseId(0), NAMES)
    assert isinstance(whole, torch.Tensor)
    then(coordinator)
    fewer = coordinator.secure_sum(again, NAMES[:-1])
    assert isinstance(fewer, str), f"the difference of the sums is site d's update: {(whole - fewer)[:4]}"
    assert why in fewer
    assert all(not site.failures for site in coordinator.sites.values()), "a site's process would end"


@pytest.mark.parametrize(
    ("round_", "told"),
    [
        (-8, "Expected `int` >= 0 - at `$.body.opening.phase.round`"),
        (4, "asked for round 5 of the run, expected 1 to 4"),
    ],
    ids=["before the first", "after the last"],
)
def test_no_site_trains_a_round_that_the_run_has_not(coordinator: HostileCoordinator, round_: int, told: str) -> None:
    """It hangs up, names the coordinator, and is there again for the rounds of the run."""
    answered = coordinator.secure_sum(PhaseId(round_), NAMES)
    assert isinstance(answered, str), "its sites were trained, and the sum was opened"
    site = coordinator.sites["a"]
    assert told in settled(site, "coordinator: ")
    assert all(not site.failures for site in coordinator.sites.values()), "a site's process would end"
    coordinator.reconnect()
    assert isinstance(coordinator.secure_sum(PhaseId(0), NAMES), torch.Tensor)


def test_a_state_that_a_site_never_made_ends_no_process_of_it(tmp_path: Path) -> None:
    """Its number is one that the run can have. The site hangs up, names the coordinator, and trains the right order."""
    coordinator = HostileCoordinator(tmp_path, ("a",), secure=False, algorithm="scaffold")
    site = coordinator.sites["a"]
    coordinator.open(PhaseId(3), ("a",), state=1)
    told = settled(site, "coordinator: ")
    assert "asked this site to go on from what is not here: state " in told and "round-000001.safetensors" in told
    assert not site.failures, "its process would end"
    coordinator.reconnect()
    coordinator.open(PhaseId(3), ("a",))
    while isinstance(body := coordinator.heard()[1], ExecutorJoined):
        pass
    assert isinstance(body, SumsSent)
    coordinator.close()


def test_another_device_under_a_sites_name_is_another_site(coordinator: HostileCoordinator) -> None:
    """The coordinator has the authority's key. The log has the devices of a sum, which a new process reads."""
    assert isinstance(coordinator.secure_sum(PhaseId(0), NAMES), torch.Tensor)
    site, run = coordinator.sites["a"], coordinator.kept
    ids = {name: Identity(other.folder).id for name, other in coordinator.sites.items()}
    soon(lambda: SiteLog(site.folder).revealed(run))  # the others' shares may have been enough before a's were there
    kept = SiteLog(site.folder).revealed(run)
    assert set(kept.values()) == {frozenset({"a", *(f"{name}:{ids[name]}" for name in "bcd")})}
    certified(Authority(coordinator.folder / "authority"), coordinator.folder / "other")
    for path in (coordinator.folder / "other").iterdir():
        (coordinator.sites["d"].folder / path.name).write_bytes(path.read_bytes())
    coordinator.reconnect()
    again = coordinator.secure_sum(PhaseId(1), NAMES)
    assert isinstance(again, str), "two sums of one model, of which one has another update in place of d's"
    assert "of this update, or of one from the same model, with other sites, are revealed" in again


def test_a_phase_is_not_opened_again(coordinator: HostileCoordinator) -> None:
    """With another model, what is trained from the first would be kept as of the second."""
    coordinator.open(PhaseId(0), NAMES)
    coordinator.model = coordinator.model + 1
    coordinator.open(PhaseId(0), NAMES)
    told = settled(coordinator.sites["a"], "coordinator: ")
    assert "opened round 1 (attempt 1, pass 1) again" in told


def test_a_device_that_the_owners_rules_do_not_name_is_no_neighbour(coordinator: HostileCoordinator) -> None:
    site: Any = coordinator.sites["a"].runner
    ids = {name: Identity(other.folder).id for name, other in coordinator.sites.items()}
    for d, answer in ((ids["d"], torch.Tensor), ("0" * 32, str)):
        approval = Approval(sites=("a", "b", f"c:{ids['c']}", f"d:{d}"))
        site._config = msgspec.structs.replace(site._config, approval=approval)
        coordinator.reconnect()
        assert isinstance(coordinator.secure_sum(PhaseId(0), NAMES), answer)
    assert settled(coordinator.sites["a"], f"coordinator: d has device {ids['d']}, approval.sites allows {'0' * 32}")
