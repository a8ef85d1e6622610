from __future__ import annotations

import pytest
from synthetic_pipeline import make_fleet, make_plan, play

from isthmus.fleet import Fleet
from isthmus.plans import Plan
from isthmus.trace import Trace


@pytest.fixture(scope="session")
def fleet() -> Fleet:
    return make_fleet(4)


@pytest.fixture(scope="session")
def plan(fleet: Fleet) -> Plan:
    return make_plan(fleet)


@pytest.fixture(scope="session")
def predicted(plan: Plan, fleet: Fleet) -> Trace:
    return play(plan, fleet)


@pytest.fixture(scope="session")
def measured(plan: Plan, fleet: Fleet) -> Trace:
    return play(plan, fleet, jitter=0.1, source="runtime")
