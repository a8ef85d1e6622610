"""Members of a group that follow their rounds end with the sum, whatever arrives when."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.programs.ports import Recorder

from isthmus.errors import UserError
from isthmus.plans import Collective
from isthmus.plans.collective import CollectiveMessage, Round, rounds
from isthmus.protocol.run_messages import PartsArrived
from isthmus.protocol.worker import Exchange, GroupView, PartsPort


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


class Members:
    """Those of one group. Their messages arrive in a random order."""

    def __init__(self, programs: Sequence[tuple[Round, ...]], buffers: list[np.ndarray], seed: int) -> None:
        self.programs, self.buffers, self.draw = programs, buffers, random.Random(seed)
        self.waiting: list[tuple[int, PartsArrived, np.ndarray]] = []
        self.held: dict[tuple[int, int, int], np.ndarray] = {}
        self.sent = 0
        self.exchanges = [
            Exchange([GroupView(group=4, rounds=program)], Member(self, me)) for me, program in enumerate(programs)
        ]

    def summed(self) -> int:
        """Run all exchanges; returns how many elements were sent."""
        starts = list(range(len(self.exchanges)))
        self.draw.shuffle(starts)
        while self.waiting or starts:
            if starts and (not self.waiting or self.draw.random() < 0.3):
                self.exchanges[starts.pop()].start(9, [4])
            else:
                target, body, parts = self.waiting.pop(self.draw.randrange(len(self.waiting)))
                self.held[target, body.round, body.source] = parts
                self.exchanges[target].arrived(body)
        assert not any(exchange.busy for exchange in self.exchanges) and not self.held
        return self.sent


class Member(NamedTuple):
    """The port of one member."""

    group: Members
    me: int

    def send_parts(self, group: int, turn: int, target: int, item: int) -> None:
        members, buffer = self.group, self.group.buffers[self.me]
        (message,) = (m for m in members.programs[self.me][turn].sends if m.other == target)
        first, last = message.parts.span(len(buffer))
        body = PartsArrived(group=group, round=turn, source=self.me, item=item)
        members.waiting.append((target, body, buffer[first:last].copy()))
        members.sent += last - first

    def merge(self, group: int, turn: int, item: int) -> None:
        assert (group, item) == (4, 9)
        buffer, done = self.group.buffers[self.me], self.group.programs[self.me][turn]
        for message in done.receives:
            first, last = message.parts.span(len(buffer))
            arrived = self.group.held.pop((self.me, turn, message.other))
            buffer[first:last] = buffer[first:last] + arrived if done.adds else arrived


@given(case=collectives(), elements=st.integers(0, 40), seed=st.integers(0, 1000))
def test_all_members_end_with_the_same_sum(case: tuple[Collective, int], elements: int, seed: int):
    collective, members = case
    values = np.random.default_rng(seed).normal(size=(members, elements))
    buffers = [v.copy() for v in values]
    sent = Members(rounds(collective, members), buffers, seed).summed()
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
    port = Recorder(PartsPort)
    exchange = Exchange([GroupView(group=0, rounds=turns)], port.port)
    exchange.arrived(PartsArrived(group=0, round=0, source=1, item=1))
    assert port.took() == []
    exchange.start(0, [0])
    exchange.arrived(PartsArrived(group=0, round=1, source=1, item=0))
    assert port.took() == [("send_parts", 0, 0, 1, 0)]
    exchange.arrived(PartsArrived(group=0, round=0, source=1, item=0))
    assert port.took() == [("merge", 0, 0, 0), ("send_parts", 0, 1, 1, 0), ("merge", 0, 1, 0)]
    assert not exchange.busy
    exchange.start(1, [0])
    assert port.took() == [("send_parts", 0, 0, 1, 1), ("merge", 0, 0, 1), ("send_parts", 0, 1, 1, 1)]
    assert exchange.busy and turns[1].sends == (CollectiveMessage(1, turns[0].receives[0].parts),)
