"""Drawn integers in the frames of decoupled replicas and of their merger, through the decoder and the receiver's checks
into its machine: it keeps to what its run can have, and goes on with the right message."""

from __future__ import annotations

import copy
import itertools
from collections import deque

import pytest
import torch
from torch import Tensor

from isthmus.cost import Decoupled
from isthmus.errors import PeerError
from isthmus.plans import OuterOptimizer
from isthmus.programs.merger import Merger
from isthmus.programs.merging import Finish
from isthmus.protocol.decoupled_events import Contributed, LastStepMade, MergeChanges, MergeRules, StepsMade
from isthmus.protocol.run_messages import Halt
from isthmus.runtime.decoupled.merger import MergerHost, MergerWatch
from isthmus.runtime.decoupled.merger_link import MergerLink, Received, ReplicaHost
from isthmus.runtime.messages.all_messages import AnyMessage
from isthmus.runtime.messages.decoupled import FromReplica, ToReplica
from isthmus.session.session import Observation
from isthmus.training.decoupled import MergedFragments, ReplicaFragments, change_codec, delta_codec
from isthmus.training.layout import header_of

from ..drawn_integers import Lies, landed, received
from ..programs.ports import Asked, MergerRecorder

pytestmark = pytest.mark.thorough

RUN, STEP_SAMPLES, STEPS = "run", 4, 24
SIZES = (6, 3)
AWAY = (7, 10)
"""Turns between which one replica is away."""
PLAIN = Decoupled(codec="none", fragments=len(SIZES))
RULES = MergeRules(
    samples=2 * STEPS * STEP_SAMPLES,
    merge_every=16,
    fragments=len(SIZES),
    quorum=2,
    grace=0.5,
    timeout_s=60,
    step_samples=STEP_SAMPLES,
)


class _Queue(deque[Received]):
    """That can be copied."""

    def get(self) -> Received:
        return self.popleft()

    def empty(self) -> bool:
        return not self


class _Link(MergerLink):
    """A replica's, to no merger: what it puts waits here."""

    def __init__(self) -> None:
        self.received = _Queue()
        self.sent: deque[FromReplica] = deque()
        self.tensors: deque[list[Tensor]] = deque()
        self.refused: PeerError | None = None

    def put(self, body: object, tensors: list[Tensor] | None = None) -> None:
        headers = tuple(header_of(f"delta {n}", tensor) for n, tensor in enumerate(tensors or []))
        self.sent.append(FromReplica(run=RUN, body=body, tensors=headers))  # pyright: ignore[reportArgumentType]
        self.tensors.append(tensors or [])

    def refuse(self, error: PeerError) -> None:
        self.refused = error


class Conversation:
    """Two replicas and their merger, from the first version to the end of the run. Lies are told beside the right
    messages, and what came of the right ones is kept."""

    def __init__(self, lies: Lies | None, *, to_replicas: bool) -> None:
        self._lies, self._to_replicas = lies, to_replicas
        merged = MergedFragments(
            [torch.ones(n) for n in SIZES], OuterOptimizer(rate=0.7, momentum=0.9), change_codec(PLAIN)
        )
        self.machine = Merger(RULES, "ab")
        watch = MergerWatch(stepped=lambda *_: None, merged=lambda *_: None, note=lambda _: None)
        self._merger = MergerHost(self.machine, merged, delta_codec(PLAIN), dict.fromkeys("ab"), RUN, 60.0, watch)
        self._own = {name: [[torch.zeros(n)] for n in SIZES] for name in "ab"}
        self._replicas = {
            name: ReplicaHost(ReplicaFragments(own, delta_codec(PLAIN)), 2 * STEP_SAMPLES, _Link())
            for name, own in self._own.items()
        }
        self.messages = 0
        self.merged: list[MergeChanges] = []
        self._now_s = 0.0

    @property
    def weights(self) -> list[Tensor]:
        return self._merger._merged.known

    @property
    def finish(self) -> Finish | None:
        return self.machine.finish

    def run(self) -> None:
        merger = self._merger
        for name in "ab":
            self.machine.joined(name)
        for turn in itertools.count():
            if self.finish is not None:
                break
            self._away("b", begins=turn == AWAY[0], ends=turn == AWAY[1])
            for name, replica in self._replicas.items():
                self._deliver(name)
                if replica.phase not in ("joining", "training"):
                    continue
                assert replica.receive() is not None
                for number, fragment in enumerate(self._own[name]):
                    fragment[0] -= 0.1 * (number + 1) * torch.sin(fragment[0] + replica._steps)
                replica._fragments.account.trained(STEP_SAMPLES)
                replica.stepped(STEP_SAMPLES, 1.0)
                self._give(name)
        for link in merger._links.values():
            link.halt(newest_first=True)
        for name, replica in self._replicas.items():
            self._deliver(name)
            assert replica.receive() is None and replica.halted

    def _away(self, name: str, *, begins: bool, ends: bool) -> None:
        """Its connection is lost, and it trains on."""
        merger, replica = self._merger, self._replicas[name]
        if begins:
            self.machine.disconnected(name, "test")
            self.machine.looked(Observation())
            replica._receive((None, []))
        if ends:
            merger._links[name].delivery.restart()
            self.machine.joined(name)

    # To replicas

    def _deliver(self, name: str) -> None:
        replica, link = self._replicas[name], self._merger._links[name]
        while name in self.machine.present and (outgoing := link._following(0)) is not None:
            message, tensors = outgoing
            assert isinstance(message, ToReplica)
            self.messages += self._to_replicas
            if self._lies is not None and self._to_replicas:
                self._lies.about(message, lambda lie, own=list(tensors): self._lie_to(name, lie, own))
            body, arrived = landed(received(message), tensors)
            assert isinstance(body, ToReplica)
            replica._receive((body.body, arrived))
            assert replica.link.refused is None  # pyright: ignore[reportAttributeAccessIssue]

    def _lie_to(self, name: str, message: AnyMessage, tensors: list[Tensor]) -> None:
        message, arrived = landed(message, tensors)
        assert isinstance(message, ToReplica)
        before, replica = self._replicas[name], copy.deepcopy(self._replicas[name])
        replica._receive((message.body, arrived))
        link = replica.link
        assert isinstance(link, _Link)
        assert replica._steps == before._steps and replica.phase in ("joining", "training", "ending", "over")
        if link.refused is not None:
            assert _told(replica) == _told(before)
            raise link.refused
        if isinstance(message.body, Halt):
            assert replica.halted and replica.phase == "over"
            return
        if replica.phase == "training":
            replica._fragments.account.trained(STEP_SAMPLES)
            replica.stepped(STEP_SAMPLES)
            assert 0 <= replica.samples <= 1 << 60
        for said in link.sent:
            given = said.body
            if isinstance(given, Contributed):
                assert given.steps == before._steps + 1
                assert len(set(given.fragments)) == len(given.fragments) and set(given.fragments) <= {0, 1}
                assert max(given.samples, default=0) <= STEP_SAMPLES * given.steps

    # To the merger

    def _give(self, name: str) -> None:
        link = self._replicas[name].link
        assert isinstance(link, _Link)
        while link.sent:
            self._now_s += 0.001
            self.machine.clock(self._now_s)
            message, tensors = link.sent.popleft(), link.tensors.popleft()
            if name not in self.machine.present:
                continue
            self.messages += not self._to_replicas
            if self._lies is not None and not self._to_replicas:
                self._lies.about(message, lambda lie, own=tensors: self._lie_of(name, lie, own))
            right, arrived = landed(received(message), tensors, lambda m: self._merger.guard(name, m))
            self._merger.received(name, right, arrived)
            self.machine.looked(Observation())
            assert name in self.machine.present, "the right message is taken"

    def _lie_of(self, name: str, message: AnyMessage, tensors: list[Tensor]) -> None:
        merger, before = self._merger, self.machine
        message, arrived = landed(message, tensors, lambda m: merger.guard(name, m))
        assert isinstance(message, FromReplica)
        body = message.body
        assert isinstance(body, StepsMade | Contributed | LastStepMade)
        if not isinstance(body, LastStepMade):
            before.check(name, body)
        if isinstance(body, Contributed):
            for fragment, payload in zip(body.fragments, arrived, strict=True):
                assert merger._merged.unpacked(fragment, payload, merger._codec) is not None
        port = MergerRecorder()
        machine = copy.deepcopy(before, {id(merger): port})
        machine.heard(name, body)
        self._is_of_the_plan(machine, port.took(), name)

    def _is_of_the_plan(self, machine: Merger, said: list[Asked], name: str) -> None:
        made = {other: self._replicas[other]._steps for other in "ab"}
        members = self.machine._members
        if not members[name].reports and members[name].connections > 1:  # as many as it may have made while away
            made[name] = self.machine._most_steps(name)
        assert machine.present == self.machine.present
        assert machine.samples <= STEP_SAMPLES * sum(made.values())
        for other, steps in made.items():
            assert machine.steps(other) <= steps
        assert not any(one[0] == "ended" for one in said) or self.machine.phase == "closing"
        for merge in (one[1] for one in said if one[0] == "merge"):
            assert isinstance(merge, MergeChanges)
            assert merge.merge == self.machine.merge
            for one in (c for fragment in merge.fragments for c in fragment.contributions):
                assert one.number <= merge.merge and one.samples <= STEP_SAMPLES * made[one.replica]
                assert one.steps <= made[one.replica] + 1
                for taken in one.taken:
                    assert taken.fragment in (0, 1) and taken.merge <= merge.merge and taken.steps <= one.steps


def _told(replica: ReplicaHost) -> tuple[object, ...]:
    """All that the merger's messages may change."""
    account, machine = replica._fragments.account, replica._machine
    known = [None if values is None else values.tolist() for values in account.known]
    return replica.phase, known, [*account._samples], {*machine._missing}, machine._asked, [*replica._taken._taken]


@pytest.mark.parametrize("to_replicas", [False, True], ids=["to-the-merger", "to-replicas"])
def test_a_drawn_integer_is_refused_or_one_that_the_run_may_have(to_replicas: bool) -> None:
    right = Conversation(None, to_replicas=to_replicas)
    right.run()
    lies = Lies(33, right.messages)
    disturbed = Conversation(lies, to_replicas=to_replicas)
    disturbed.run()
    lies.told()
    assert disturbed.finish == right.finish == Finish("done")
    assert disturbed.machine.samples == right.machine.samples
    assert all(torch.equal(a, b) for a, b in zip(disturbed.weights, right.weights, strict=True))
