"""A simulated service: its times are the plan's. `tests/faults/tokens_schedules.py` has drawn faults."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tests.planners.test_generation_chains import fleet_of, problem_of

from isthmus.errors import UserError
from isthmus.planners.generation import Chain, Objective, plan_chain
from isthmus.simulator.options import Fault, RecoveryTimes, SimulationOptions
from isthmus.simulator.serving import ServedRequest, ServingSimulation, SimulatedServing

QUICK = RecoveryTimes(process_s=0.4, timeout_s=3.0, start_s=5.0)


def simulated(
    seed: int,
    requests: Sequence[ServedRequest],
    *faults: Fault,
    at_once: int = 4,
    devices: int = 3,
    objective: Objective = "latency",
) -> tuple[SimulatedServing, Chain]:
    problem = problem_of(fleet_of(seed, devices), at_once)

    def plan(names: Sequence[str]) -> Chain:
        return plan_chain(problem_of(problem.fleet.subset(names), at_once), objective)

    chain = plan(problem.fleet.names)
    options = SimulationOptions(faults=faults, recovery=QUICK, control_latency_s=0.01, seed=seed)
    return ServingSimulation(problem, chain, plan, requests, options).run(), chain


@pytest.mark.parametrize("seed", range(6))
def test_a_token_of_one_request_takes_what_the_plan_says(seed: int) -> None:
    found, chain = simulated(seed, [ServedRequest(prompt=1, new=9)])
    (answer,) = found.answers
    between_s = [later - before for before, later in zip(answer.token_s, answer.token_s[1:], strict=False)]
    assert between_s == [pytest.approx(chain.token_s)] * 8 and not answer.refused and found.chain == chain


@pytest.mark.parametrize("seed", range(6))
def test_many_requests_come_near_the_rate_of_the_plan_and_never_above(seed: int) -> None:
    found, chain = simulated(seed, [ServedRequest(prompt=1, new=200)] * 4)
    assert 0.9 * chain.tokens_per_s <= found.tokens_per_s <= chain.tokens_per_s * (1 + 1e-9)


def test_requests_go_on_where_they_were_when_a_device_is_lost() -> None:
    requests = [ServedRequest(prompt=3, new=40), ServedRequest(prompt=1, new=20, arrives_s=0.2)]
    quiet, chain = simulated(1, requests)
    at_s = quiet.answers[0].token_s[10]
    found, _ = simulated(1, requests, Fault(time_s=at_s, device=chain.devices[0]))
    assert found.losses == 1 and chain.devices[0] not in found.chain.devices
    assert [len(answer.token_s) for answer in found.answers] == [40, 20]
    before = [time_s for time_s in found.answers[0].token_s if time_s <= at_s]
    assert before == list(quiet.answers[0].token_s[: len(before)]) and len(before) >= 10


def test_a_service_ends_with_its_coordinator() -> None:
    with pytest.raises(UserError, match="--fault: got the coordinator for generation, expected a device or a link"):
        simulated(0, [], Fault(time_s=1.0, kind="coordinator", lasts_s=1.0))


def test_a_device_leaves_without_loss_or_stays_where_no_chain_is_without_it() -> None:
    requests = [ServedRequest(prompt=1, new=60)]
    chain = simulated(1, requests)[1]
    leave = Fault(time_s=0.5, kind="leave", device=chain.devices[0])
    found, _ = simulated(1, requests, leave)
    assert found.losses == 0 and chain.devices[0] not in found.chain.devices
    assert len(found.answers[0].token_s) == 60
    assert f"{chain.devices[0]} has left: it was asked to" in [text for _, text in found.notes]
    alone, _ = simulated(1, requests, Fault(time_s=0.5, kind="leave", device="d0"), devices=1)
    assert [text for _, text in alone.notes] == ["d0 was asked to leave and stays: no device is left"]
    assert len(alone.answers[0].token_s) == 60
