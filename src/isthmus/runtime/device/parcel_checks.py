"""The stage and its view determine which tensors an assignment may receive, and how it packs those that it sends."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from isthmus.graph import Ref
from isthmus.graph.opgraph import TensorSpec
from isthmus.graph.partition import Crossing
from isthmus.plans import Packing
from isthmus.protocol.run_messages import Parcel
from isthmus.runtime.device.links import Signature
from isthmus.runtime.messages.assignment import Assignment
from isthmus.training.gradients import gradient_dtype


def label(ref: Ref) -> str:
    """How a value is called in a frame."""
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
    """How training packs what it sends to each stage, by label: only what carries a gradient, or is one."""
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
