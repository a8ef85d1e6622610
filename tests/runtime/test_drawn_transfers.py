"""Drawn integers in frames that carry states, snapshots and sums, and in those that set up and pace a link: each goes
through the decoder and what the receiver checks before it allocates, into what receives it. What is refused names its
sender and leaves no trace: the right frame goes on, and the same bits are there in the end.
"""

from __future__ import annotations

import copy
import queue
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from isthmus.cost import PlanLayout, build_replicas
from isthmus.errors import PeerError
from isthmus.job import prepare
from isthmus.protocol.arrivals import StageArrivals
from isthmus.protocol.run_messages import Item, PartsArrived, SendState, StateReceived, TransferEnded
from isthmus.protocol.run_ports import EpochStart
from isthmus.protocol.worker import Exchange, PartsPort
from isthmus.runtime.coordinator.run_callbacks import Address
from isthmus.runtime.coordinator.stage_assignments import StageAssignments
from isthmus.runtime.device import state_transfer
from isthmus.runtime.device.assignment_checks import expected_parcels, expected_parts
from isthmus.runtime.device.fingerprints import Fingerprinter
from isthmus.runtime.device.links import Expected, StageLinks
from isthmus.runtime.device.peer_connections import PeerConnections
from isthmus.runtime.device.snapshots import SnapshotReceiver, SnapshotSender
from isthmus.runtime.device.state_transfer import CatchUpState, StateDonor, StateJoiner, check_followed
from isthmus.runtime.messages.all_messages import AnyMessage
from isthmus.runtime.messages.assignment import (
    Assignment,
    FollowHello,
    Neighbour,
    ReceiveStateMessage,
    SnapshotReplication,
    StateMessage,
    StatePart,
)
from isthmus.runtime.messages.run import Credit, Hello, ToPeer
from isthmus.runtime.transport.lanes import Credits
from isthmus.training.engine import EngineConfig
from isthmus.training.layout import header_of
from isthmus.training.optim import OptimizerConfig
from isthmus.training.snapshot import Snapshot, joined, snapshot

from ..drawn_integers import Lies, landed
from ..programs.ports import Recorder
from .jobs import DIGITS, fleet_of, job_of, random_cut
from .test_drawn_assignments import Given, _Worker
from .wire import assignment

pytestmark = pytest.mark.thorough

RUN, EPOCH, NUMBER, FIRST, DONE = "run", 4, 2, 5, 7
SHAPES = {"w": (30, 31), "v": (4,)}
CONFIG = EngineConfig(optimizers=(OptimizerConfig(name="sgd", momentum=0.9),), steps=20)
AGREED = ReceiveStateMessage(
    run=RUN,
    epoch=EPOCH,
    number=NUMBER,
    step=FIRST,
    donated={"oslo": SHAPES},
    trained=frozenset(SHAPES),
    config=CONFIG,
    peers=(),
)
Frame = tuple[AnyMessage, list[Tensor]]


def _given(draw: torch.Generator) -> dict[str, Tensor]:
    return {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}


def _lent(monkeypatch: pytest.MonkeyPatch) -> tuple[list[Frame], dict[str, Tensor]]:
    """What a device sends that does two steps, and its state then."""
    monkeypatch.setattr(state_transfer, "STRETCH_BYTES", 1000)
    draw, sent = torch.Generator().manual_seed(1), list[Frame]()
    own = CatchUpState(CONFIG, set(SHAPES), FIRST - 1, _given(draw))
    own.repeat(_given(draw))
    asked = SendState(number=NUMBER, epoch=EPOCH, step=FIRST, parts=frozenset(SHAPES))
    put = lambda message, tensors, _: sent.append((message, [t.clone() for t in tensors]))  # noqa: E731
    donor = StateDonor(asked, RUN, "oslo", put, lambda: 0)
    donor.begin(own.state())
    for _ in range(FIRST, DONE):
        own.repeat(given := _given(draw))
        donor.go_on(given)
    return sent, own.state()


def test_a_state_on_its_way_to_a_joining_device(monkeypatch: pytest.MonkeyPatch) -> None:
    sent, expected = _lent(monkeypatch)
    hello = FollowHello(run=RUN, epoch=EPOCH, number=NUMBER, device="rome")
    joiner, lies = StateJoiner(AGREED), Lies(1, len(sent))
    for right, tensors in sent:

        def take(message: AnyMessage, tensors: list[Tensor] = tensors) -> None:
            nonlocal joiner
            told = cast(StateMessage | StatePart, message)
            try:
                landed(told, tensors, lambda message: check_followed(message, hello, "oslo"))
            except PeerError as e:
                raise PeerError(f"device 'oslo': {e}") from None  # as the channel does
            before = copy.deepcopy(joiner)
            step = joiner.accept(told, tensors)
            assert step is None or FIRST <= step <= DONE
            joiner = before

        lies.about(right, take, names="device 'oslo'")
        joiner.accept(cast(Any, right), tensors)
    lies.told()
    ((step, parts),) = joiner.states()
    found = joined(parts.values())
    assert step == DONE and found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_what_a_joining_device_is_told_of_the_state_that_will_come(monkeypatch: pytest.MonkeyPatch) -> None:
    sent, _ = _lent(monkeypatch)
    nothing, lies = Given({}, {}, {}), Lies(2, 1)

    def followed(message: AnyMessage) -> list[Any]:
        worker = _Worker("rome", nothing)
        worker._session.epoch = EPOCH
        worker._follow(cast(Any, SimpleNamespace(message=message, tensors=[])))
        for frame in sent:
            worker._receive_state(cast(Any, frame[0]), frame[1])
        worker._end_following()
        return worker.said

    def take(message: AnyMessage) -> None:
        landed(message)
        said = followed(message)
        assert {type(body) for body in said} <= {StateReceived, TransferEnded}
        if any(isinstance(body, TransferEnded) for body in said):
            raise PeerError("it gets its state while all wait")

    lies.about(AGREED, take)
    lies.told()
    assert [body.step for body in followed(AGREED)] == [*range(FIRST, DONE + 1)]


class _Links(StageLinks):
    """Of one stage, without connections."""

    def __init__(self, told: Assignment, copies: SnapshotReceiver | None = None) -> None:
        self._run, self._epoch = told.run, told.epoch
        self._expected = Expected(expected_parcels(told), expected_parts(told))
        self._snapshot_copies = copies or SnapshotReceiver({}, lambda stage, step, taken: None)
        self._arrivals = StageArrivals(
            told.view,
            told.share,
            {n.stage: n.device for n in told.neighbours},
            start_step=told.start_step,
            first_item=told.first_item,
            lease_ahead=told.lease_ahead,
        )
        self._checking = cast(Any, _NoLock())
        self._ways, self._tensors, self._numbers = {}, {}, {}
        self._credits = {n.stage: Credits(n.window_bytes) for n in told.neighbours}
        self._fingerprints, self._spans = Fingerprinter(None), lambda span: None
        self._names, self._assignment = {n.stage: n for n in told.neighbours}, told
        self._inbox = queue.SimpleQueue()

    def take_in(self, source: int, message: AnyMessage, tensors: Sequence[Tensor]) -> None:
        name = f"device {self._names[source].device!r}"
        try:
            landed(message, tensors, self._guard)
        except PeerError as e:
            raise PeerError(f"{name}: {e}") from None  # as the channel does
        self._accept(source, cast(Any, SimpleNamespace(other=name, began_s=0.0)), message, list(tensors))

    def lied_to(self, lies: Lies, source: int, right: AnyMessage, tensors: Sequence[Tensor] = ()) -> None:
        """What is taken is forgotten again; what is refused has to leave no trace. Then the right one."""

        def take(message: AnyMessage) -> None:
            held = copy.deepcopy((self._arrivals, self._snapshot_copies)), dict(self._tensors), dict(self._numbers)
            self.take_in(source, message, tensors)
            (self._arrivals, self._snapshot_copies), self._tensors, self._numbers = held
            self._inbox = queue.SimpleQueue()

        lies.about(right, take, names=f"device {self._names[source].device!r}")
        self.take_in(source, right, tensors)


class _NoLock:
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


def _assigned(*replicas: tuple[str, ...]) -> list[Assignment]:
    made = job_of("mlp", {"layers": 2}, DIGITS)
    prepared, fleet = prepare(made), fleet_of(sum(map(len, replicas)))
    cut = tuple(random_cut(prepared, 2, 0, once=True))
    layouts = [PlanLayout(devices, cut, made.training.micro_batches // len(replicas)) for devices in replicas]
    plan = build_replicas(prepared.problem(fleet), layouts, planner="test")
    begun = EpochStart(step=FIRST, first_item=0, epoch=EPOCH, from_checkpoint=False)
    addresses = {name: Address("h", 7) for name in fleet.names}
    return [*StageAssignments(prepared, plan, fleet).assignments(RUN, begun, addresses, 2).values()]


def test_snapshots_of_a_neighbour() -> None:
    told = _assigned(("d0", "d1"))[1]
    draw, sent, kept = torch.Generator().manual_seed(1), list[Frame](), dict[int, Snapshot]()
    shapes = told.snapshot_sources[0]
    state = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    links = _Links(told, SnapshotReceiver(told.snapshot_sources, lambda stage, step, taken: kept.update({step: taken})))
    parts = SnapshotReplication(stage=1, every=4, stretch_bytes=4000)
    sender = SnapshotSender(RUN, EPOCH, 0, parts, lambda message, tensors: sent.append((message, list(tensors))))
    sender.begin(FIRST + 1, snapshot(state))
    for _ in range(4):
        sender.go_on()
    lies = Lies(3, len(sent))
    for message, tensors in sent:
        kept.clear()
        links.lied_to(lies, 0, message, tensors)
        assert {*kept} <= {FIRST + 1}
    lies.told()
    found = kept[FIRST + 1].tensors()
    assert all(torch.equal(found[name], value) for name, value in state.items())


def test_sums_between_replicas() -> None:
    assigned = _assigned(("d0", "d1"), ("d2", "d3"))
    pair = [assigned[0], assigned[2]]
    links = {told.stage: _Links(told) for told in pair}
    ports = {told.stage: Recorder(PartsPort) for told in pair}
    exchanges = {told.stage: Exchange(told.view.groups, ports[told.stage].port) for told in pair}
    sizes = {told.stage: {share.group: share.elements for share in told.groups} for told in pair}
    share, groups = pair[0].share, [group.group for group in pair[0].view.groups]
    rounds = {(told.stage, g.group): g.rounds for told in pair for g in told.view.groups}
    for item in range(2):
        size = share.of * share.micro_batch_size
        opened = Item(
            index=item, kind="train", step=FIRST + item, first_sample=(FIRST + item) * size, micro_batches=share.of
        )
        for one in links.values():
            one._arrivals.opened(opened)
    lies, sums = Lies(4, 2 * sum(len(turn.sends) for turns in rounds.values() for turn in turns)), 0
    for item in range(2):
        for exchange in exchanges.values():
            exchange.start(item, groups)
        while due := [(stage, asked) for stage, port in ports.items() for asked in port.took()]:
            for stage, (what, group, turn, *rest) in cast(list[tuple[int, tuple[Any, ...]]], due):
                if what == "merge":
                    sums += 1
                    continue
                target, _ = rest
                (sends,) = (m for m in rounds[stage, group][turn].sends if m.other == target)
                stretch = torch.zeros(sends.parts.count(sizes[stage][group]))
                body = PartsArrived(group=group, round=turn, source=stage, item=item, epoch=EPOCH)
                message = ToPeer(run=RUN, body=body, tensors=(header_of("average", stretch),))
                links[target].lied_to(lies, stage, message, [stretch])
                assert links[target]._inbox.get_nowait() == body
                exchanges[target].arrived(body)
    lies.told()
    assert sums and not any(exchange.busy for exchange in exchanges.values())


def test_credits_of_a_neighbour() -> None:
    links, lies = _Links(_assigned(("d0", "d1"))[1]), Lies(5, 1)
    credits = links._credits[0]

    def take(message: AnyMessage) -> None:
        credits._used_bytes = 1000
        links.take_in(0, message, [])
        assert 0 <= credits.used_bytes <= 1000

    lies.about(Credit(run=RUN, size_bytes=600), take, names="")
    assert lies.refused and lies.taken
    credits._used_bytes = 1000
    links.take_in(0, Credit(run=RUN, size_bytes=600), [])
    assert credits.used_bytes == 400


class _Heard:
    """A connection that somebody made."""

    party, other = None, "somebody"

    def __init__(self, first: AnyMessage) -> None:
        self.first, self.closed = first, False

    def receive(self, *_: object, **__: object) -> Frame:
        return self.first, []

    def close(self) -> None:
        self.closed = True


def test_who_says_which_stage_it_is() -> None:
    lies, right = Lies(6, 1), Hello(run="secret", stage=0, epoch=0)
    neighbour = Neighbour(stage=0, device="d0", host="h", port=7)
    told = assignment("d1", stage=1, neighbours=(neighbour,))

    def take(message: AnyMessage) -> None:
        listener = SimpleNamespace(start=lambda heard: None)
        dialer = SimpleNamespace(timeout_s=5.0, identity=None)
        peers = PeerConnections(cast(Any, listener), "secret", cast(Any, dialer))
        liar, honest = _Heard(message), _Heard(right)
        peers._on_connection(cast(Any, liar))
        peers._on_connection(cast(Any, honest))
        assert peers.connect(told) == {0: honest}
        assert liar.closed or cast(Hello, message).epoch > told.epoch

    lies.about(right, take)
    assert lies.refused and lies.taken
