"""Members of a group that follow their rounds end with the sum, whatever arrives when."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.errors import UserError
from isthmus.plans import Collective
from isthmus.plans.collective import CollectiveMessage, Round, rounds
from isthmus.protocol.events import Merge, SendParts
from isthmus.protocol.exchange import Exchange, GroupView
from isthmus.protocol.run_messages import PartsArrived


@st.composite
def collectives(draw: st.DrawFn) -> tuple[Collective, int]:
    members = draw(st.integers(1, 7))
    order = draw(st.permutations(range(members)))
    kind = draw(st.sampled_from(["sharded", "ring", "hierarchical"]))
    if kind == "sharded":
        return Collective(), members
    if kind == "ring":
        return Collective(kind="ring", islands=(tuple(order),)), members
    cuts = sorted({0, members, *draw(st.sets(st.integers(1, max(members - 1, 1)), max_size=3))})
    islands = tuple(tuple(order[a:b]) for a, b in itertools.pairwise(cuts))
    return Collective(kind="hierarchical", islands=islands), members


def summed(programs: Sequence[tuple[Round, ...]], buffers: list[np.ndarray], seed: int) -> int:
    """Run all members' exchanges with messages in a random order; returns how many bytes were sent."""
    draw = random.Random(seed)
    machines = [Exchange([GroupView(group=4, rounds=program)]) for program in programs]
    waiting: list[tuple[int, PartsArrived, np.ndarray]] = []
    held: dict[tuple[int, int, int], np.ndarray] = {}
    sent = 0

    def follow(me: int, steps: list[SendParts | Merge]) -> None:
        nonlocal sent
        for step in steps:
            turn = programs[me][step.round]
            if isinstance(step, SendParts):
                (message,) = (m for m in turn.sends if m.other == step.target)
                first, last = message.parts.span(len(buffers[me]))
                event = PartsArrived(group=4, round=step.round, source=me, item=9)
                waiting.append((step.target, event, buffers[me][first:last].copy()))
                sent += last - first
                continue
            for message in turn.receives:
                first, last = message.parts.span(len(buffers[me]))
                arrived = held.pop((me, step.round, message.other))
                buffers[me][first:last] = buffers[me][first:last] + arrived if turn.adds else arrived

    starts = list(range(len(machines)))
    draw.shuffle(starts)
    while waiting or starts:
        if starts and (not waiting or draw.random() < 0.3):
            me = starts.pop()
            follow(me, machines[me].start(9, [4]))
        else:
            target, event, parts = waiting.pop(draw.randrange(len(waiting)))
            held[target, event.round, event.source] = parts
            follow(target, machines[target].arrived(event))
    assert not any(machine.busy for machine in machines) and not held
    return sent


@given(case=collectives(), elements=st.integers(0, 40), seed=st.integers(0, 1000))
def test_all_members_end_with_the_same_sum(case: tuple[Collective, int], elements: int, seed: int):
    collective, members = case
    values = np.random.default_rng(seed).normal(size=(members, elements))
    buffers = [v.copy() for v in values]
    sent = summed(rounds(collective, members), buffers, seed)
    for buffer in buffers:
        np.testing.assert_allclose(buffer, values.sum(axis=0), atol=1e-12)
        assert buffer.tobytes() == buffers[0].tobytes()
    assert sent == 2 * (members - 1) * elements


@given(case=collectives(), elements=st.integers(0, 100))
def test_what_is_sent_is_what_the_other_waits_for(case: tuple[Collective, int], elements: int):
    programs = rounds(*case)
    assert len({len(p) for p in programs}) == 1
    for number in range(len(programs[0])):
        sends = {(me, m.other, m.parts) for me, p in enumerate(programs) for m in p[number].sends}
        waits = {(m.other, me, m.parts) for me, p in enumerate(programs) for m in p[number].receives}
        assert sends == waits
        assert all(0 <= a <= b <= elements for _, _, parts in sends for a, b in [parts.span(elements)])


def test_islands_must_be_the_members():
    with pytest.raises(UserError, match=r"'ring': islands: got \[\[0, 1\]\], expected each of the members 0..2 once"):
        rounds(Collective(kind="ring", islands=((0, 1),)), 3)


def test_what_comes_early_waits_for_its_item_and_round():
    turns = rounds(Collective(), 2)[0]
    machine = Exchange([GroupView(group=0, rounds=turns)])
    early = PartsArrived(group=0, round=0, source=1, item=1)
    assert machine.arrived(early) == []
    assert machine.start(0, [0]) == [SendParts(0, 0, 1, 0)]
    assert machine.arrived(PartsArrived(group=0, round=1, source=1, item=0)) == []
    assert machine.arrived(PartsArrived(group=0, round=0, source=1, item=0)) == [
        Merge(0, 0, 0),
        SendParts(0, 1, 1, 0),
        Merge(0, 1, 0),
    ]
    assert not machine.busy
    assert machine.start(1, [0]) == [SendParts(0, 0, 1, 1), Merge(0, 0, 1), SendParts(0, 1, 1, 1)]
    assert machine.busy and turns[1].sends == (CollectiveMessage(1, turns[0].receives[0].parts),)
