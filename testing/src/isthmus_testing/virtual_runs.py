"""Runs on the virtual clock, as tests and benchmarks read them."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence

from isthmus.errors import PeerError, UserError
from isthmus.programs.rounds import Rounds
from isthmus.simulator.options import Fault
from isthmus.simulator.rounds import FederatedCosts, SimulatedRound, simulate_federation
from isthmus.trace import Trace

__all__ = ["period_s", "simulate_federated"]


def period_s(trace: Trace, device: str) -> float:
    """Median time between the ends of consecutive backward passes of one step on a device.

    UserError when no step has two of them there.
    """
    ends: dict[int, list[float]] = {}
    for span in trace.spans:
        if span.device == device and span.track == "compute" and span.name == "B":
            ends.setdefault(span.step, []).append(span.end_s)
    gaps = [b - a for step in ends.values() for a, b in itertools.pairwise(sorted(step))]
    if not gaps:
        raise UserError(f"trace {trace.run!r}: device {device!r}: no step has two backward passes")
    return statistics.median(gaps)


def simulate_federated(
    machine: Rounds, costs: FederatedCosts, seed: int = 0, faults: Sequence[Fault] = ()
) -> tuple[SimulatedRound, ...]:
    """Every committed round. The same seed gives the same run. PeerError when the run cannot go on."""
    found = simulate_federation(lambda _: machine, costs, seed, faults)
    if found.finish.outcome == "lost":
        raise PeerError(found.finish.reason)
    return found.rounds
