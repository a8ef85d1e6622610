"""Whom a comparison of fingerprints names: whose inputs are right and outputs are not."""

from __future__ import annotations

import pytest

from isthmus.protocol.fingerprints import Node, StepFinding, judge

WORKERS = ("a", "b", "c")
CHAIN = {
    0: ("sent forward 1", "received backward 1", "gradients", "state"),
    1: ("received forward 0", "sent forward 2", "received backward 2", "sent backward 0", "gradients", "state"),
    2: ("received forward 1", "sent backward 1", "gradients", "state"),
}
"""What three stages report."""
BACK = {(1, "received backward 2"), (1, "sent backward 0"), (0, "received backward 1")}
LEARNT = {(stage, node) for stage in CHAIN for node in ("gradients", "state")}


def reports(differing: set[tuple[int, str]] = frozenset(), nodes: dict[int, tuple[str, ...]] = CHAIN):  # type: ignore[assignment, no-untyped-def]
    return {s: {n: "1" if (s, n) in differing else "0" for n in names} for s, names in nodes.items()}


@pytest.mark.parametrize(
    ("differing", "named"),
    [
        (set(), []),
        ({(1, "gradients"), (1, "state")}, [("b",)]),
        ({(1, "state")}, [("b",)]),
        # a value that stage 1 sent, and all that follows from it
        ({(1, "sent forward 2"), (2, "received forward 1"), (2, "sent backward 1"), *BACK, *LEARNT}, [("b",)]),
        ({(2, "sent backward 1"), *BACK, *(LEARNT - {(2, "gradients"), (2, "state")})}, [("c",)]),
        ({(1, "gradients"), (2, "gradients")}, [("b",), ("c",)]),
        # stage 1 says that it sent the right values: who changed them is not known
        ({(2, "received forward 1"), (2, "sent backward 1"), *BACK, *LEARNT}, [("b", "c")]),
    ],
)
def test_who_is_named(differing: set[tuple[int, str]], named: list[tuple[str, ...]]) -> None:
    assert [found.workers for found in judge(WORKERS, reports(differing), reports())] == named


def test_who_sent_what_cannot_be_compared_is_a_suspect_too() -> None:
    nodes = {**CHAIN, 0: (*CHAIN[0], "received count 2")}
    assert judge(WORKERS, reports({(0, "gradients")}, nodes), reports()) == (
        StepFinding(workers=("a", "c"), nodes=("gradients",)),
    )
    assert judge(WORKERS, reports({(0, "gradients")}, nodes), reports(nodes=nodes))[0].workers == ("a",)


def test_who_leaves_out_what_it_computed_is_named() -> None:
    """The first stage sends a wrong value, or has wrong gradients, and does not report them."""
    follows = {(1, node) for node in CHAIN[1]} | {(2, node) for node in CHAIN[2]} | {(0, "received backward 1")}
    silent = {**CHAIN, 0: ("received backward 1", "gradients")}
    (found,) = judge(WORKERS, reports(follows, silent), reports())
    assert found == StepFinding(workers=("a", "b"), nodes=("received forward 0",))
    hidden = {**CHAIN, 0: CHAIN[0][:2]}
    assert judge(WORKERS, reports(nodes=hidden), reports()) == (StepFinding(workers=("a",), nodes=("gradients",)),)
    lost = {stage: nodes for stage, nodes in CHAIN.items() if stage}  # before it reported: nobody is to blame for that
    assert judge(WORKERS, reports(nodes=lost), reports()) == ()


def test_a_summand_is_its_devices_own_and_a_sum_is_everybodys() -> None:
    replicas = dict.fromkeys(range(3), ("summands", "gradients", "state"))
    wrong = {(1, "summands"), *((s, n) for s in range(3) for n in ("gradients", "state"))}
    for differing, named in ((wrong, [("b",)]), ({(0, "gradients"), (2, "gradients")}, [("a", "c")])):
        found = judge(WORKERS, reports(differing, replicas), reports(nodes=replicas))
        assert [one.workers for one in found] == named


@pytest.mark.parametrize("name", ["", "sent", "sent forward", "sent forward x", "lost forward 1", "sent state 1", "x"])
def test_other_names_are_no_nodes(name: str) -> None:
    assert Node.parse(name) is None
    assert judge(WORKERS, {0: {name: "1"}}, {0: {name: "0"}}) == ()
