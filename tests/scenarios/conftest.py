"""Runs here are short: a change of plan must pay within seconds."""

from __future__ import annotations

import pytest

from isthmus.protocol import adaptation, drift
from isthmus.session import session


@pytest.fixture(autouse=True)
def soon_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drift, "LEAST_S", 0.2)
    monkeypatch.setattr(adaptation, "CHANGE_S", 0.05)
    monkeypatch.setattr(session, "GRACE_S", 0.5)
