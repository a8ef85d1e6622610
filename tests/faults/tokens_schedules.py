"""A simulated service: whatever strikes its devices, each request gets its tokens once and in order, or a reason."""

from __future__ import annotations

import random
from collections.abc import Sequence

from isthmus.simulator.options import Fault
from isthmus.simulator.serving import ServedRequest, SimulatedServing
from tests.simulator.test_serving import simulated

REASONS = ("no device is left", "a second device", "fleet ")
"""Why a request is refused begins with one of them."""


def drawn(seed: int) -> SimulatedServing:
    """Up to eight faults strike a service of up to four devices."""
    draw = random.Random(seed)
    devices, at_once = draw.randint(2, 4), draw.randint(1, 4)
    requests = [
        ServedRequest(prompt=draw.randint(1, 6), new=draw.randint(1, 300), arrives_s=draw.uniform(0.0, 4.0))
        for _ in range(draw.randint(1, 8))
    ]
    faults = []
    for _ in range(draw.randint(1, 8)):
        kind = draw.choice(("lost", "silent", "link", "slow", "join", "leave"))
        one, other = draw.sample(range(4), 2)
        if max(one, other if kind == "link" else 0) >= devices:
            continue
        fault = Fault(
            time_s=draw.uniform(0.0, 8.0),
            kind=kind,
            device=f"d{one}",
            other=f"d{other}" if kind == "link" else "",
            lasts_s=draw.choice((0.2, 2.0, 8.0)),
            factor=4.0 if kind == "slow" else 1.0,
        )
        faults.append(fault)
    found, _ = simulated(seed, requests, *faults, at_once=at_once, devices=devices, objective="throughput")
    for request, answer in zip(requests, found.answers, strict=True):
        assert list(answer.token_s) == sorted(answer.token_s)
        assert answer.refused or len(answer.token_s) == request.new, f"seed {seed}: {found.notes}"
        assert len(answer.token_s) <= request.new and all(t >= request.arrives_s for t in answer.token_s)
        assert not answer.refused or answer.refused.startswith(REASONS), f"seed {seed}: {answer.refused}"
    return found


def check_harm(runs: Sequence[SimulatedServing]) -> None:
    answers = [answer for found in runs for answer in found.answers]
    assert sum(found.losses for found in runs) > len(runs) / 4
    assert sum(not answer.refused for answer in answers) > len(answers) / 2


def line(found: SimulatedServing) -> str:
    ends = [(f"{max(answer.token_s, default=0.0):.6f}", len(answer.token_s)) for answer in found.answers]
    return f"{ends} {found.losses} {found.chain.devices}"
