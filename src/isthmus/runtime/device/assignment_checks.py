"""Numbers of an assignment, compared with one another before the device does anything with them: where a stage stands,
whom it has links to, its part of each step and of the sums. What its graph computes is the job's affair.

The stage and its view determine which tensors an assignment may receive, and how it packs those that it sends.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import torch

from isthmus.errors import PeerError
from isthmus.graph import Ref
from isthmus.graph.opgraph import TensorSpec
from isthmus.graph.partition import Crossing
from isthmus.plans import Packing
from isthmus.plans.collective import CollectiveMessage
from isthmus.protocol.run_messages import Parcel
from isthmus.runtime.device.links import Signature
from isthmus.runtime.messages.assignment import Assignment
from isthmus.training.gradients import gradient_dtype
from isthmus.training.scaling import LOSS_SCALE, LOSS_SCALE_SHAPE


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


def label(ref: Ref) -> str:
    """Return how a value is called in a frame."""
    return f"{ref.op}:{ref.index}"


def _gradient_type(parameter: TensorSpec) -> str:
    return str(gradient_dtype(getattr(torch, parameter.dtype))).removeprefix("torch.")


def expected_parts(assignment: Assignment) -> dict[tuple[int, int, int], int]:
    """Elements that may arrive in the sums, by group, round and source."""
    sizes = {share.group: share.elements for share in assignment.groups}
    return {
        (group.group, number, message.other): message.parts.count(sizes[group.group])
        for group in assignment.view.groups
        for number, turn in enumerate(group.rounds)
        for message in turn.receives
    }


def sent_packings(assignment: Assignment) -> dict[tuple[Parcel, int], dict[str, Packing]]:
    """Return how training packs what it sends to each stage, by label: only what carries a gradient, or is one."""
    train, sent = assignment.train, {n.stage: n.sent for n in assignment.neighbours}
    size = assignment.engine.micro_batch_size
    found: dict[tuple[Parcel, int], dict[str, Packing]] = {}

    def note(parcel: Parcel, stage: int, crossing: Crossing) -> None:
        named, packing = found.setdefault((parcel, stage), {}), _packing(crossing, sent.get(stage), size)
        if packing is not None:
            named[label(crossing.value)] = packing

    for c in train.sends:
        note("forward", c.target, c)
    for c in train.receives:
        note("backward", c.source, c)
    return found


def _packing(crossing: Crossing, packing: Packing | None, size: int) -> Packing | None:
    """Return the packing of a value; None, as it is, for one that has no gradient, that no codec takes or that none
    would make shorter."""
    if packing is None or not crossing.gradient:
        return None
    spec = crossing.spec
    return packing if packing.saves(math.prod(spec.shape_at(size)), spec.dtype) else None


def part_shapes(assignment: Assignment) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the stage's variables, by name: other devices may give their state."""
    size = assignment.engine.micro_batch_size
    shapes = {op.target: op.outputs[0].shape_at(size) for op in assignment.train.variables()}
    return shapes | {LOSS_SCALE: LOSS_SCALE_SHAPE}


def expected_parcels(assignment: Assignment) -> dict[tuple[Parcel, int], frozenset[Signature]]:
    """Return the parcels that may arrive from each stage under this assignment, by name, dtype and shape."""
    size = assignment.engine.micro_batch_size
    train, view = assignment.train, assignment.view
    specs = {op.name: op.outputs[0] for op in train.ops if op.kind == "parameter"}
    found: dict[tuple[Parcel, int], set[Signature]] = {}
    received = {n.stage: n.received for n in assignment.neighbours}

    def allow(parcel: Parcel, source: int, signature: Signature) -> None:
        found.setdefault((parcel, source), set()).add(signature)

    def cross(parcel: Parcel, other: int, crossings: Sequence[Crossing], packing: Packing | None) -> None:
        allow(
            parcel,
            other,
            tuple((label(c.value), c.spec.dtype, c.spec.shape_at(size), _packing(c, packing, size)) for c in crossings),
        )

    for stage in (train, assignment.evaluation):
        for source in {c.source for c in stage.receives}:
            packing = received.get(source) if stage is train else None  # evaluations are of the model as it is
            cross("forward", source, stage.received_from(source), packing)
    for target in {c.target for c in train.sends}:
        due = [c for c in train.sent_to(target) if c.gradient]
        cross("backward", target, due, received.get(target))
    for owner in view.parameter_owners:
        names = [n for n, o in train.shared_from.items() if o == owner]
        allow("shared", owner, tuple((n, specs[n].dtype, specs[n].shape_at(size), None) for n in names))
    for user in view.parameter_users:
        names = [n for n, users in train.shared_with.items() if user in users]
        donated = tuple((n, _gradient_type(specs[n]), specs[n].shape_at(size), None) for n in names)
        allow("shared_gradient", user, donated)
    for other in view.others:
        allow("count", other, ())
        if view.agrees:
            allow("norms", other, (("norms", "float32", (len(assignment.norm_positions[other]),), None),))
    return {key: frozenset(signatures) for key, signatures in found.items()}
