"""Devices that come back after their certificate has ended."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from isthmus.errors import PeerError
from isthmus.runtime.identity import Identity
from isthmus.runtime.processes.device_processes import ProcessPlace
from isthmus.runtime.service import enrollment
from isthmus.runtime.service.agent import Agent, join_fleet
from isthmus.runtime.service.enrollment import Dismissal, renew_late

from .parties import Fleet, in_background, soon

DAY_S = 86400.0


@pytest.fixture
def lenient(tmp_path: Path) -> Iterator[Fleet]:
    """A coordinator that renews after 30 days."""
    fleet = Fleet(tmp_path / "fleet", renew_after_absence_s=30 * DAY_S)
    yield fleet
    fleet.service.close()
    fleet.state.close()


def _away(fleet: Fleet, folder: Path, days: float) -> Identity:
    """A device that joined, and was last seen so many days ago."""
    join_fleet(fleet.ticket(), {"desk": folder}, 5.0)
    identity = Identity(folder)
    _end_certificate(fleet, identity)
    fleet.state.roster.seen(identity.id, time.time() - days * DAY_S)
    return identity


def _end_certificate(fleet: Fleet, identity: Identity) -> None:
    authority = fleet.state.authority
    identity.keep(authority.certify(identity.request(), "device", -60.0)[1], authority.der())


def _comes_back(fleet: Fleet, folder: Path) -> None:
    membership = join_fleet(fleet.ticket(), {"desk": folder}, 5.0)["desk"]
    _end_certificate(fleet, Identity(folder))
    said: list[str] = []
    agent = Agent(folder, membership, ProcessPlace(), timeout_s=5.0, log=said.append, waits_s=(0.1,))
    with in_background(agent.run, agent.stop):
        soon(lambda: fleet.service.present or any("trying again" in line for line in said))
        if not fleet.service.present:
            raise PeerError(next(line for line in said if "trying again" in line))


def test_a_device_comes_back_by_itself_where_the_policy_allows(lenient: Fleet, tmp_path: Path) -> None:
    _comes_back(lenient, tmp_path / "desk")
    soon(lambda: any("desk, which was away" in line for line in lenient.said))  # written after it has the certificate


def test_else_it_needs_a_ticket(fleet: Fleet, tmp_path: Path) -> None:
    with pytest.raises(PeerError, match=r"renews none then .*join again with a new ticket"):
        _comes_back(fleet, tmp_path / "desk")


def test_a_device_that_was_away_too_long(lenient: Fleet, tmp_path: Path) -> None:
    identity = _away(lenient, tmp_path / "desk", days=31.0)
    with pytest.raises(Dismissal, match=r"away for 31\.0 days, and the coordinator renews .* at most 30 days"):
        renew_late(identity, [lenient.address], 5.0)
    assert identity.expires_s() < time.time()


def test_a_revoked_device_stays_out(lenient: Fleet, tmp_path: Path) -> None:
    identity = _away(lenient, tmp_path / "desk", days=1.0)
    lenient.state.roster.revoke("desk", time.time())
    with pytest.raises(Dismissal, match="was revoked"):
        renew_late(identity, [lenient.address], 5.0)


def test_nobody_gets_a_certificate_in_the_name_of_another(lenient: Fleet, tmp_path: Path) -> None:
    identity = _away(lenient, tmp_path / "desk", days=1.0)
    stranger = Identity.made(tmp_path / "stranger")
    stranger.keep(lenient.state.authority.certify(stranger.request(), "device")[1], lenient.state.authority.der())
    victim = identity.id
    with (
        mock.patch.object(Identity, "id", victim),
        pytest.raises(Dismissal, match="of another key"),
    ):
        renew_late(stranger, [lenient.address], 5.0)
    with (
        mock.patch.object(enrollment, "requested_key", side_effect=AssertionError("it was read")),
        pytest.raises(Dismissal, match="not in the fleet"),
    ):
        renew_late(stranger, [lenient.address], 5.0)
