"""DT-FM's placements as plans: equal replicas of equal stages, each device in one of them."""

from __future__ import annotations

import msgspec
import pytest
from plan_cases import fleet_of, gpt_graph, problem_of, random_graph
from tests.tiers import represented_by

from isthmus.cost.blocks import Blocks
from isthmus.errors import FleetTooSmall, UserError
from isthmus.fleet import resolve_fleet
from isthmus.planners import plan
from isthmus.planners.placement.on_fleet import equal_cut

NAMES = ("dtfm-genetic", "dtfm-genetic-code", "dtfm-kl", "random")


@pytest.mark.parametrize("name", represented_by(NAMES, "dtfm-kl", "random"))
def test_each_device_runs_one_equal_stage(name: str) -> None:
    problem = problem_of(gpt_graph(2), resolve_fleet("dtfm-case3").thin(4), micro_batches=10)
    made = plan(name, problem)
    assert sorted(made.devices) == sorted(problem.fleet.names)
    assert len({len(replica.stages) for replica in made.replicas}) == 1
    cuts = {tuple(stage.first for stage in replica.stages) for replica in made.replicas}
    assert len(cuts) == 1
    shares = [replica.micro_batches for replica in made.replicas]
    assert sum(shares) == 10 and max(shares) - min(shares) <= 1
    assert made == plan(name, problem)


def test_a_placement_search_is_no_worse_than_random() -> None:
    problem = problem_of(gpt_graph(2), resolve_fleet("dtfm-case5").thin(4), micro_batches=16)
    steps = {name: plan(name, problem).predicted.step_s for name in ("random", "dtfm-genetic")}
    assert steps["dtfm-genetic"] <= steps["random"] * (1 + 1e-9)


def test_what_does_not_fit_and_what_does_not_factor() -> None:
    tight = problem_of(random_graph(1, 6), fleet_of([1.0, 1.0], 0, memory=[10, 10]))
    with pytest.raises(FleetTooSmall, match="short"):
        plan("random", tight)
    seven = problem_of(random_graph(1, 3), fleet_of([1.0] * 7, 0), micro_batches=2)
    with pytest.raises(UserError, match="7 devices do not factor"):
        plan("random", seven)


@pytest.mark.parametrize("stages", (1, 2, 3, 5))
def test_stages_are_cut_near_equal_shares_of_the_flops(stages: int) -> None:
    blocks = Blocks(problem_of(gpt_graph(6), fleet_of([1.0], 0)))
    cut = equal_cut(blocks, stages)
    assert cut == sorted(set(cut)) and len(cut) == stages - 1
    largest = max(blocks.work[k + 1] - blocks.work[k] for k in range(blocks.count))
    for number, boundary in enumerate(cut, 1):
        assert abs(blocks.work[boundary] - blocks.work[-1] * number / stages) <= largest


def test_plans_survive_json() -> None:
    made = plan("random", problem_of(gpt_graph(2), resolve_fleet("three-sites"), micro_batches=4))
    assert msgspec.json.decode(msgspec.json.encode(made), type=type(made)) == made
