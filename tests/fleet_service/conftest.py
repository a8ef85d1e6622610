"""Fixtures of several files. Identities are made once: keys cost time, and nobody changes them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from isthmus.runtime.identity import Authority, Identity
from isthmus.runtime.service import agent, fleet_coordinator

from .holders import Joined
from .parties import Fleet, certified, serving


@pytest.fixture(autouse=True, scope="session")
def _looks_often() -> Iterator[None]:
    """Agents and services of this process: half a second and a second are long for who waits for nothing else."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agent, "TICK_S", 0.05)
        patch.setattr(fleet_coordinator, "WATCH_S", 0.2)
        yield


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="session")
def coordinator(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Identity:
    return certified(authority, tmp_path_factory.mktemp("coordinator"), "coordinator")


@pytest.fixture(scope="session")
def device(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Identity:
    return certified(authority, tmp_path_factory.mktemp("device"))


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with serving(tmp_path / "fleet") as made:
        yield made


@pytest.fixture
def joined(fleet: Fleet, tmp_path: Path) -> Iterator[Joined]:
    found = Joined(fleet, tmp_path)
    yield found
    found.end()
