"""Each worker's view of its stage, derived from the plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from isthmus.errors import UserError
from isthmus.plans.collective import CollectiveMessage, Round, rounds
from isthmus.plans.plan import Plan, Replica
from isthmus.plans.schedule import whole
from isthmus.protocol.worker import Feeding, GroupView, StageView

Pair = tuple[int, int]
Neighbours = dict[int, tuple[int, ...]]


def plan_views(
    plan: Plan, *, clips: bool, counts: bool, skips: bool = False, eval_edges: Iterable[Pair] | None = None
) -> tuple[StageView, ...]:
    """The views of all workers: the stages of all replicas, one replica after another.

    `clips`: gradient norms are exchanged before each update, to clip by them; `skips`: to leave out updates that are
    not finite. `counts`: the loss is a sum over a count.
    `eval_edges` are the (source, target) pairs of workers that activations take in an evaluation; without it, those of
    training. Raises `UserError` for a plan whose stages, edges, limits and groups do not fit together.
    """
    pairs = None if eval_edges is None else list(eval_edges)
    found: list[StageView] = []
    for replica in plan.replicas:
        first = len(found)
        inside = range(first, first + len(replica.workers))
        edges = None if pairs is None else [(a - first, b - first) for a, b in pairs if a in inside]
        views = stage_views(replica, clips=clips, counts=counts, eval_edges=edges, feeding=feeding_of(plan))
        found += [_shifted(view, first) for view in views]
    groups = _groups(plan)
    return tuple(
        msgspec.structs.replace(
            view,
            skips=skips,
            groups=groups.get(view.stage, ()),
            averages=plan.sync.averages,
            period=plan.sync.period,
            delay=plan.sync.outer.delay if plan.sync.outer else 0,
        )
        for view in found
    )


def feeding_of(plan: Plan) -> Feeding | None:
    """Return who does which micro-batches, where several holders feed a plan's chain. UserError where its copies are
    not theirs."""
    own_samples, devices = plan.constraints.own_samples, plan.devices
    copied = [copies for replica in plan.replicas for copies in replica.copied.values()]
    for copies in copied:
        held = tuple(devices[worker] for worker in copies)
        if held != plan.constraints.feeders:
            expected = ", ".join(plan.constraints.feeders) or "none: no holder has data of its own"
            raise UserError(f"plan: copies: got copies of a stage on {', '.join(held)}, expected {expected}")
    if len(plan.constraints.feeders) < 2:
        return None
    if len(plan.replicas) > 1 or not copied:
        raise UserError(f"plan: replicas: got {len(plan.replicas)}, expected one, whose first stage has copies")
    size = plan.micro_batch_size
    return Feeding(
        train=tuple(h.train for h in own_samples),
        heldout=whole(tuple(h.heldout for h in own_samples), size),
        micro_batch_size=size,
        copies=tuple(copied),
    )


def _shifted(view: StageView, first: int) -> StageView:
    """The view with workers' numbers in place of its replica's stages."""
    neighbours = (
        "forward_from",
        "forward_to",
        "backward_from",
        "backward_to",
        "eval_from",
        "eval_to",
        "parameter_users",
        "parameter_owners",
    )
    moved = {name: tuple(first + s for s in getattr(view, name)) for name in neighbours}
    return msgspec.structs.replace(view, stage=first + view.stage, first=first, **moved)


def _groups(plan: Plan) -> dict[int, tuple[GroupView, ...]]:
    found: dict[int, tuple[GroupView, ...]] = {}
    for number, group in enumerate(plan.sync.groups):
        try:
            members = plan.members(group)
        except UserError as e:
            raise UserError(f"plan: sync: group {number}: {e}") from None
        if not group.iterations or max(group.iterations) >= plan.sync.period:
            raise UserError(
                f"plan: sync: group {number}: iterations: got {list(group.iterations)}, "
                f"expected some of 0..{plan.sync.period - 1}"
            )
        for member, its in zip(members, rounds(group.collective, len(members)), strict=True):
            view = GroupView(group=number, rounds=tuple(_among(r, members) for r in its), iterations=group.iterations)
            found[member] = (*found.get(member, ()), view)
    return found


def _among(r: Round, members: Sequence[int]) -> Round:
    def named(messages: tuple[CollectiveMessage, ...]) -> tuple[CollectiveMessage, ...]:
        return tuple(CollectiveMessage(members[m.other], m.parts) for m in messages)

    return Round(sends=named(r.sends), receives=named(r.receives), adds=r.adds)


def stage_views(
    replica: Replica,
    *,
    clips: bool,
    counts: bool,
    eval_edges: Iterable[Pair] | None = None,
    feeding: Feeding | None = None,
) -> tuple[StageView, ...]:
    """The views of one replica's stages and their copies, as workers are counted. See `plan_views`."""
    _check_limits(replica)
    _check_pairs("edge", [(e.source, e.target) for e in replica.edges], len(replica.stages), onward=True)
    shared_uses = [(p.owner, user) for p in replica.shared for user in p.users if user != p.owner]
    _check_pairs("shared parameter", shared_uses, len(replica.stages))
    edges = replica.worker_edges
    forward = [(e.source, e.target) for e in edges]
    evaluation = forward if eval_edges is None else list(eval_edges)
    if not replica.copies:
        _check_pairs("edge", evaluation, len(replica.stages), onward=True)
    forward_from, forward_to = _neighbours(forward)
    backward_from, backward_to = _neighbours((e.target, e.source) for e in edges if e.gradients)
    eval_from, eval_to = _neighbours(evaluation)
    parameter_owners, parameter_users = _neighbours((a, b) for _, a, b in replica.shared_uses if a != b)
    chain, loss_stage = replica.stage_of, _loss_stage(replica)
    has_backward = {
        *(number for number, stage in enumerate(replica.workers) if stage.flops_backward),
        *backward_from,
        *backward_to,
        *parameter_owners,
        *parameter_users,
    }
    return tuple(
        StageView(
            stage=s,
            stages=len(chain),
            in_flight=replica.schedule.in_flight[chain[s]],
            splits=replica.weight_flops[s] > 0,
            forward_from=forward_from.get(s, ()),
            forward_to=forward_to.get(s, ()),
            backward_from=backward_from.get(s, ()),
            backward_to=backward_to.get(s, ()),
            eval_from=eval_from.get(s, ()),
            eval_to=eval_to.get(s, ()),
            parameter_users=parameter_users.get(s, ()),
            parameter_owners=parameter_owners.get(s, ()),
            trains=s in has_backward,
            has_loss=chain[s] == loss_stage,
            losses=chain.count(loss_stage),
            counts=counts,
            clips=clips,
            feeding=feeding,
            delayed=replica.schedule.name == "delayed",
        )
        for s in range(len(chain))
    )


def _neighbours(pairs: Iterable[Pair]) -> tuple[Neighbours, Neighbours]:
    """Return the stages that each stage receives from, and those that it sends to, ascending."""
    sources: dict[int, set[int]] = {}
    targets: dict[int, set[int]] = {}
    for source, target in pairs:
        sources.setdefault(target, set()).add(source)
        targets.setdefault(source, set()).add(target)
    return _ascending(sources), _ascending(targets)


def _ascending(neighbours: dict[int, set[int]]) -> Neighbours:
    return {stage: tuple(sorted(others)) for stage, others in neighbours.items()}


def _loss_stage(replica: Replica) -> int:
    stages = len(replica.stages)
    if not -1 <= replica.loss_stage < stages:
        raise UserError(f"plan: loss_stage: got {replica.loss_stage}, expected -1 to {stages - 1}")
    return replica.loss_stage % stages


def _check_limits(replica: Replica) -> None:
    schedule, stages = replica.schedule, len(replica.stages)
    limits, apart = schedule.in_flight, schedule.weight_flops
    if len(limits) != stages or min(limits, default=0) < 1:
        raise UserError(f"plan: schedule.in_flight: got {list(limits)}, expected {stages} numbers of at least 1")
    most = [stage.flops_backward for stage in replica.stages]
    if apart and (len(apart) != stages or not all(0 <= w <= b for w, b in zip(apart, most, strict=True))):
        raise UserError(f"plan: schedule.weight_flops: got {list(apart)}, expected {stages} numbers of 0 to {most}")


def _check_pairs(field: str, pairs: Iterable[Pair], stages: int, *, onward: bool = False) -> None:
    for source, target in pairs:
        if not (0 <= source < stages and 0 <= target < stages) or (onward and source >= target):
            expected = "an earlier and a later one" if onward else "two"
            raise UserError(
                f"plan: {field}: got stages {source} and {target}, expected {expected} of 0 to {stages - 1}"
            )
