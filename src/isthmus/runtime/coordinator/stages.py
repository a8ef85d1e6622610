"""Builds the stages that devices run, from a plan and a captured model."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from isthmus.errors import UserError
from isthmus.graph import Flow, StageGraph, assign, partition
from isthmus.graph.captured import Captured
from isthmus.graph.partition import align
from isthmus.plans import Plan, Replica
from isthmus.protocol import StageView
from isthmus.protocol.views import plan_views
from isthmus.training.scaling import LOSS_SCALE


class StagePair(msgspec.Struct, frozen=True):
    """The stages that one worker of a device runs: the training stage, and the evaluation stage that shares its
    weights."""

    view: StageView
    train: StageGraph
    evaluation: StageGraph
    scales: bool = False  # whether it has a loss scale
    copy: bool = False  # whether another device runs the same stage, and gives its state

    @property
    def owned(self) -> tuple[str, ...]:
        """Own names of the trainable parameters that this stage updates, in the order of its engine."""
        trained = {op.name for op in self.train.variables() if op.kind == "parameter" and any(op.requires_grad)}
        variables = {op.name: op for op in (*self.evaluation.variables(), *self.train.variables())}
        return tuple(op.target for n, op in variables.items() if n in trained and n not in self.train.shared_from)

    @property
    def written(self) -> frozenset[str]:
        """Own names of the weights and buffers that training changes here: what the stage's state holds. Every stage
        has the loss scale, if there is one."""
        mutated = {name for op in self.train.ops for name in op.mutates}
        scale = (LOSS_SCALE,) if self.scales else ()
        return frozenset((*self.owned, *(op.target for op in self.train.variables() if op.name in mutated), *scale))


def readers(plan: Plan, captured: Captured, *, evaluates: bool) -> tuple[str, ...]:
    """Devices that read data under a plan, in its order; `evaluates`: held-out ones too."""
    pairs = zip(plan.devices, stage_pairs(plan, captured, clips=False), strict=True)
    found = (device for device, pair in pairs if pair.train.columns or (evaluates and pair.evaluation.columns))
    return tuple(dict.fromkeys(found))


def stage_pairs(
    plan: Plan, captured: Captured, *, clips: bool, skips: bool = False, scales: bool = False
) -> tuple[StagePair, ...]:
    """The stages of all replicas, as workers are counted. UserError when the plan was made for another graph."""
    held = bool(plan.constraints.data_holders)
    flow, eval_flow = Flow(captured.train, columns_first=held), Flow(captured.eval, columns_first=held)
    train: list[StageGraph] = []
    evaluation: list[StageGraph] = []
    for replica in plan.replicas:
        first = len(train)
        ours, theirs = _cut(replica, flow, eval_flow, first)
        train += _of_workers(replica, ours, first)
        evaluation += _of_workers(replica, theirs, first)
    edges = {(c.source, c.target) for stage in evaluation for c in stage.sends}
    counts = captured.train.count is not None
    copies = [worker >= len(r.stages) for r in plan.replicas for worker in range(len(r.workers))]
    views = plan_views(plan, clips=clips, skips=skips, counts=counts, eval_edges=sorted(edges))
    return tuple(
        StagePair(msgspec.structs.replace(view, has_loss=t.loss is not None), t, e, scales, copy)
        for view, t, e, copy in zip(views, train, evaluation, copies, strict=True)
    )


def _of_workers(replica: Replica, stages: Sequence[StageGraph], first: int) -> Sequence[StageGraph]:
    """The stages and their copies, each with values that come from and go to every copy of its neighbours. Of stages
    that own a shared parameter the first sends it to all that use it."""
    if not replica.copies:
        return stages
    chain, found = replica.stage_of, list[StageGraph]()
    for worker, stage in enumerate(chain):
        graph, copied = stages[stage], worker >= len(stages)
        crossings = [
            msgspec.structs.replace(c, source=first + a, target=first + b)
            for c in (*graph.receives, *graph.sends)
            for a, b in replica.joined(c.source - first, c.target - first)
        ]
        users = {
            name: [w for w, other in enumerate(chain) if first + other in users]
            for name, users in graph.shared_with.items()
        }
        found.append(
            msgspec.structs.replace(
                graph,
                index=first + worker,
                receives=tuple(c for c in crossings if c.target == first + worker),
                sends=tuple(c for c in crossings if c.source == first + worker),
                shared_with={}
                if copied
                else {name: tuple(first + w for w in workers) for name, workers in users.items()},
            )
        )
    return found


def _cut(
    replica: Replica, flow: Flow, eval_flow: Flow, first: int
) -> tuple[Sequence[StageGraph], Sequence[StageGraph]]:
    """A replica's stages for training and for evaluation, numbered from `first` on."""
    stages = replica.stages
    if stages[-1].last != len(flow.operators) - 1:
        raise UserError(
            f"plan: covers operators 0..{stages[-1].last}, the model has 0..{len(flow.operators) - 1}: "
            "it was made for another model"
        )
    stage_of = assign(flow, [stage.first for stage in stages[1:]])
    eval_stage_of = align(flow, eval_flow, stage_of)
    train = partition(flow, {op: first + stage for op, stage in stage_of.items()})[first:]
    evaluation = partition(eval_flow, {op: first + stage for op, stage in eval_stage_of.items()})[first:]
    evaluation += tuple(_empty(first + k) for k in range(len(evaluation), len(train)))
    _check_parameters(train, evaluation)
    return train, evaluation


def _empty(index: int) -> StageGraph:
    """The evaluation may end before the last training stage."""
    return StageGraph(index=index, ops=(), columns=(), receives=(), sends=(), shared_from={}, shared_with={})


def _check_parameters(train: tuple[StageGraph, ...], evaluation: tuple[StageGraph, ...]) -> None:
    """An evaluation stage may use only trained parameters that its device holds."""
    trained = {op.target for stage in train for op in stage.variables()}
    for t, e in zip(train, evaluation, strict=True):
        here = {op.target for op in t.variables()}
        for op in e.variables():
            if op.kind == "parameter" and op.target in trained - here:
                raise UserError(
                    f"model: evaluation uses parameter {op.target!r} in stage {e.index}, training does not: "
                    "cut elsewhere or make both forwards alike"
                )
