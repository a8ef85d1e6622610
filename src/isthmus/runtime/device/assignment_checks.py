"""Numbers of an assignment, compared with one another before the device does anything with them: where a stage stands,
whom it has links to, its part of each step and of the sums. What its graph computes is the job's affair.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from isthmus.errors import PeerError
from isthmus.plans.collective import CollectiveMessage
from isthmus.runtime.messages.assignment import Assignment


def check_assignment(assignment: Assignment) -> None:
    """PeerError, which names the coordinator, for numbers that no plan has."""
    for what, got, fits in chain(_of_place(assignment), _of_work(assignment), _of_sums(assignment)):
        if not fits:
            raise PeerError(f"coordinator: assigned stage {assignment.stage} with {what} {got}, which no plan has")


Check = tuple[str, object, bool]  # the name of the thing checked, its value, and whether it fits


def _of_place(assignment: Assignment) -> Iterator[Check]:
    view, train = assignment.view, assignment.train
    yield "its replica's first stage", view.first, view.first <= view.stage < view.first + view.stages
    linked = [neighbour.stage for neighbour in assignment.neighbours]
    yield "neighbours", linked, view.stage not in linked and _distinct(linked)
    named = {*view.forward_from, *view.forward_to, *view.backward_from, *view.backward_to, *view.eval_from}
    named |= {*view.eval_to, *view.parameter_users, *view.parameter_owners, *view.partners}
    for stage in (train, assignment.evaluation):
        yield "the graph of stage", stage.index, stage.index == train.index
        named |= {c.source for c in stage.receives} | {c.target for c in stage.sends} | {*stage.shared_from.values()}
        named |= {user for users in stage.shared_with.values() for user in users}
    if view.agrees or view.counts:
        yield "stages of its replica", view.stages, view.stages <= len(linked) + 1  # before they are listed
        named |= set(view.others)
    yield "links to stages", sorted(named), named <= {*linked}
    copied = {*assignment.snapshot_sources} | ({c.stage} if (c := assignment.snapshot_copy) is not None else set())
    yield "copies of snapshots by stages", sorted(copied), copied <= {*linked}
    yield "stretches of a snapshot of size", c and c.stretch_bytes, c is None or c.stretch_bytes > 0


def _of_work(assignment: Assignment) -> Iterator[Check]:
    view, share, size = assignment.view, assignment.share, assignment.engine.micro_batch_size
    yield "micro-batches of size", share.micro_batch_size, share.micro_batch_size == size > 0
    yield "micro-batches", (share.first, share.count, share.of), share.first + share.count <= share.of > 0
    yield "micro-batches of a step", assignment.engine.micro_batches, assignment.engine.micro_batches > 0
    yield "micro-batches at once", view.in_flight, view.in_flight > 0
    feeding = view.feeding
    if feeding is not None:
        yield "holders' micro-batches of size", feeding.micro_batch_size, feeding.micro_batch_size == size
        holders = {len(feeding.train), len(feeding.heldout), *map(len, feeding.copies)}
        yield "copies for holders", sorted(holders), len(holders) == 1
    positions = assignment.norm_positions
    most = sum(map(len, positions.values()))
    last = max((place for places in positions.values() for place in places), default=-1)
    yield "positions of parameters up to", last, last < most
    emulation = assignment.emulation
    if emulation is not None:
        speeds = emulation.flops_per_s
        yield "speeds", speeds, bool(speeds) and speeds[0][0] == 0 and all(speed > 0 for _, speed in speeds)


def _of_sums(assignment: Assignment) -> Iterator[Check]:
    view, train = assignment.view, assignment.train
    yield "a period of sums of", view.period, view.period > 0
    groups = [group.group for group in view.groups]
    yield "sums of groups", groups, _distinct(groups) and groups == [share.group for share in assignment.groups]
    shapes = {op.name: op.outputs[0].shape_at(1) for op in train.variables()}
    for share in assignment.groups:
        known = all(name in shapes for name in share.parameters)
        yield "sums of parameters", share.group, known
        elements = sum(math.prod(shapes[name]) for name in share.parameters)
        elements += len(share.parameters) + 1 if view.averages == "gradients" else 0
        yield f"elements of group {share.group}", share.elements, share.elements == elements
    for group in view.groups:
        yield "iterations of sums", group.iterations, all(number < view.period for number in group.iterations)
        for turn in group.rounds:
            yield f"rounds of group {group.group}", turn, _is_round(turn.sends) and _is_round(turn.receives)


def _is_round(messages: Sequence[CollectiveMessage]) -> bool:
    parts = [message.parts for message in messages]
    return _distinct(m.other for m in messages) and all(p.first <= p.last <= p.of > 0 for p in parts)


def _distinct(numbers: Iterable[int]) -> bool:
    return all(count == 1 for count in Counter(numbers).values())
