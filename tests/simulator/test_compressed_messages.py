"""A compressed plan is simulated with what crosses its links."""

from __future__ import annotations

import msgspec
from plans import chain, make_fleet, make_plan

from isthmus.fleet import Link
from isthmus.plans import Compression
from isthmus.protocol import RunSpec
from isthmus.simulator import simulate
from isthmus.trace import link_bytes, steady_step_s

SPEC = RunSpec(steps=2, micro_batches=6, micro_batch_size=1)
FLEET = make_fleet(3, Link(0.01, 1000.0))


def test_messages_have_their_bytes_on_the_wire() -> None:
    dense = make_plan([(2, 4), (3, 6), (1, 2)], chain(3, 800))
    edges = tuple(
        msgspec.structs.replace(
            edge,
            forward_compression=Compression(codec="topk", ratio=10.0, wire_bytes=240),
            backward_compression=Compression(codec="bf16", wire_bytes=400),
        )
        for edge in dense.replica.edges
    )
    packed = make_plan([(2, 4), (3, 6), (1, 2)], edges)
    found = simulate(packed, FLEET, SPEC)
    assert link_bytes(found) == {
        ("d0", "d1"): 12 * 240,
        ("d1", "d2"): 12 * 240,
        ("d1", "d0"): 12 * 400,
        ("d2", "d1"): 12 * 400,
    }
    as_if = tuple(
        msgspec.structs.replace(
            e, forward_compression=None, backward_compression=None, forward_bytes=240, backward_bytes=400
        )
        for e in edges
    )
    assert found.spans == simulate(make_plan([(2, 4), (3, 6), (1, 2)], as_if), FLEET, SPEC).spans
    assert steady_step_s(found) < steady_step_s(simulate(dense, FLEET, SPEC))
