"""Simulated federated rounds refuse faults that no run has. `tests/faults/rounds_schedules.py` has drawn ones."""

from __future__ import annotations

import numpy as np
import pytest

from isthmus.errors import UserError
from isthmus.programs.rounds import Rounds
from isthmus.protocol.federated_messages import LinearFit
from isthmus.protocol.federated_planning import RoundRules
from isthmus.protocol.federated_scheduler import ThroughputModel
from isthmus.simulator.options import Fault
from isthmus.simulator.rounds import FederatedCosts, simulate_federation


def test_executors_exchange_nothing_so_no_link_between_them_can_fail() -> None:
    link = Fault(time_s=1.0, kind="link", device="a", other="b", lasts_s=1.0)
    rules = RoundRules(rounds=1, needed=1)
    with pytest.raises(UserError, match="clients exchange nothing with each other"):
        simulate_federation(
            lambda _: Rounds(
                "ab", rules, np.ones(2, np.int64), lambda _: np.arange(2), ThroughputModel(2, window_rounds=5)
            ),
            FederatedCosts(lines=(LinearFit(0.1, 0.1),) * 2),
            faults=[link],
        )
