"""DiLoCo's outer steps between replicas over processes, against the same arithmetic on plain copies of the model."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor, nn

from isthmus.api.make_plan import simulation_options
from isthmus.cost import PlanLayout, SyncPolicy, build_replicas
from isthmus.data import SampleOrder, load_dataset
from isthmus.experiments import RunOptions, Watcher, run_plan, run_spec
from isthmus.graph import cuts
from isthmus.job import Job, Prepared, prepare
from isthmus.plans import Plan
from isthmus.protocol.run_messages import shares
from isthmus.simulator import simulate
from isthmus.trace import Trace, link_bytes
from isthmus.training.checkpoint import split_replica
from isthmus.training.optim import Optimizers
from tests.training.reference import reference_step, reference_update

from .jobs import TEXT, final_weights, fleet_of, job_of

GPT: dict[str, object] = {"vocab_size": 256, "sequence_length": 16, "width": 16, "layers": 1, "heads": 2}
COUNTS = (1, 3)
"""Micro-batches of the replicas: one is cut in two, the other is whole."""


def two_replicas(prepared: Prepared) -> Plan:
    legal = [c.position for c in cuts(prepared.flow)]
    names = fleet_of(3).names
    layouts = [PlanLayout(names[:2], (legal[len(legal) // 2],), COUNTS[0]), PlanLayout(names[2:], (), COUNTS[1])]
    return build_replicas(prepared.problem(fleet_of(3)), layouts, planner="test")


class Twin:
    """Copies of the module that take their own steps; fragments of them are exchanged as the plan's groups say."""

    def __init__(self, job: Job, prepared: Prepared, plan: Plan) -> None:
        self.job, self.plan = job, plan
        assert plan.sync.outer is not None
        self.outer = plan.sync.outer
        self.modules: list[nn.Module] = []
        for _ in COUNTS:
            torch.manual_seed(job.training.seed)
            self.modules.append(prepared.build())
        self.parameters = [dict(module.named_parameters()) for module in self.modules]
        self.optimizers = [Optimizers(job.optimizer, p, job.learning_rate, job.training.steps) for p in self.parameters]
        self.values = {n: p.detach().clone() for n, p in self.parameters[0].items()}
        self.momenta = {n: torch.zeros_like(v) for n, v in self.values.items()}
        self.under_way: dict[int, list[tuple[str, Tensor]]] = {}
        own = {op.name: op.target for op in prepared.captured.train.ops}
        self.groups = [([own[p] for p in g.parameters], g.iterations) for g in plan.sync.groups]

    def step(self, step: int) -> None:
        job, t = self.job, self.job.training
        data = load_dataset(job.used_data, "train")
        order = SampleOrder(len(data), t.seed, t.shuffle)
        its = shares(COUNTS, job.micro_batch_size)
        for module, optimizers, share in zip(self.modules, self.optimizers, its, strict=True):
            config = msgspec.structs.replace(job.engine(), micro_batches=share.count)
            starts = [step * t.batch_size + (share.first + m) * job.micro_batch_size for m in range(share.count)]
            batches = [data.batch(order.indices(s, job.micro_batch_size), list(data.columns)) for s in starts]
            reference_step(module, batches, config)
            reference_update(module, optimizers, step, config)
        if self.outer.delay:
            self.apply(step)
        self.under_way[step + self.outer.delay] = [
            (name, self.delta(name))
            for names, steps in self.groups
            for name in names
            if step % self.plan.sync.period in steps
        ]
        if not self.outer.delay:
            self.apply(step)

    def delta(self, name: str) -> Tensor:
        parts = [c / sum(COUNTS) * (self.values[name] - p[name]) for c, p in zip(COUNTS, self.parameters, strict=True)]
        return torch.stack(parts).sum(0).detach()

    @torch.no_grad()
    def apply(self, step: int) -> None:
        for name, delta in self.under_way.pop(step, []):
            self.momenta[name] = self.outer.momentum * self.momenta[name] + delta
            down = delta + self.outer.momentum * self.momenta[name]
            self.values[name] = self.values[name] - self.outer.rate * down
            for parameters in self.parameters:
                own = parameters[name]
                own.copy_(self.outer.mixing * own + (1 - self.outer.mixing) * self.values[name])


@pytest.mark.parametrize(
    "policy",
    [
        SyncPolicy(mode="outer", period=2),
        SyncPolicy(mode="streaming", period=2, delay=1),
        SyncPolicy(mode="streaming", period=3, delay=3, mixing=0.25),
    ],
    ids=["outer", "streaming", "a delay of a period"],
)
def test_replicas_equal_their_twins(policy: SyncPolicy, tmp_path: Path) -> None:
    job = msgspec.structs.replace(
        job_of("gpt", GPT, TEXT, steps=6, batch_size=4, eval_every=4, eval_samples=4), sync=policy
    )
    prepared, fleet = prepare(job), fleet_of(3)
    plan = two_replicas(prepared)
    assert plan.sync.averages == "deltas" and len({i for g in plan.sync.groups for i in g.iterations}) == (
        1 if policy.mode == "outer" else policy.every
    )
    outcome = run_plan(prepared, plan, fleet, tmp_path, RunOptions(emulate=False), Watcher())
    assert outcome.outcome == "done"
    twin = Twin(job, prepared, plan)
    for step in range(job.training.steps):
        twin.step(step)
    saved = final_weights(tmp_path)
    checked = 0
    for name, value in saved.items():
        replica, own = split_replica(name)
        if own in twin.values:
            checked += 1
            expected = twin.parameters[replica][own].detach()
            assert torch.allclose(value, expected, rtol=1e-5, atol=1e-6), name
    assert checked == 2 * len(twin.values)
    sums = Trace(source="runtime", run="r", spans=tuple(s for s in outcome.spans if s.name == "average"))
    spans = simulate(plan, fleet, run_spec(prepared), simulation_options(prepared, plan)).spans
    expected_sums = Trace(source="simulator", run="r", spans=tuple(s for s in spans if s.name == "average"))
    assert link_bytes(sums) == link_bytes(expected_sums)
    assert sum(link_bytes(sums).values()) > 0
