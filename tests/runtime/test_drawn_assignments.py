"""Drawn integers in what a coordinator orders of a device: its assignment, and all else that `DeviceWorker` follows.
Each goes through the decoder into a device at work, which has no sockets here. What comes of it is something that a
run can have, or the device's own end of it, by an error that names the coordinator.
"""

from __future__ import annotations

import gc
import queue
import threading
from collections.abc import Generator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import msgspec
import pytest
import torch
from torch import Tensor

from isthmus.accelerators import HOST
from isthmus.cost import PlanLayout, build_replicas
from isthmus.data import Dataset, load_dataset
from isthmus.errors import PeerError, UserError
from isthmus.fleet import Fleet
from isthmus.job import prepare
from isthmus.protocol import RunSpec
from isthmus.protocol.device_session import DeviceSession
from isthmus.protocol.run_messages import (
    DeviceFailed,
    DeviceReady,
    Halt,
    Item,
    ItemReported,
    OpenItem,
    PlaceWeights,
    SendState,
    WeightExchange,
    WeightsRead,
    items,
)
from isthmus.protocol.run_ports import EpochStart
from isthmus.runtime.coordinator.run_callbacks import Address
from isthmus.runtime.coordinator.stage_assignments import StageAssignments
from isthmus.runtime.device import device as device_module
from isthmus.runtime.device.coordinator_link import CoordinatorLink, CoordinatorMessage
from isthmus.runtime.device.device import DeviceWorker
from isthmus.runtime.device.part_writer import PartWriter
from isthmus.runtime.device.peer_connections import Endpoint
from isthmus.runtime.device.state_transfer import StateOutlets
from isthmus.runtime.messages.all_messages import AnyMessage
from isthmus.runtime.messages.assignment import Assignment, StateMessage, StatePart
from isthmus.runtime.messages.run import AssignMessage, ToDevice
from isthmus.training.layout import header_of

from ..drawn_integers import Lies, landed, possible_threads
from .jobs import DIGITS, fleet_of, job_of, random_cut

pytestmark = pytest.mark.thorough

RUN, EPOCH = "run", 4
GRAPHS = ("train", "evaluation")
HALT = CoordinatorMessage(ToDevice(run=RUN, body=Halt(epoch=EPOCH)), [])


class Given(NamedTuple):
    """What each device of a plan is assigned, the model's weights, and its samples."""

    assignments: Mapping[str, Assignment]
    weights: Mapping[str, Tensor]
    data: Mapping[str, Dataset]

    def placed(self, device: str) -> CoordinatorMessage:
        """The weights of its stage."""
        right = self.assignments[device]
        names = sorted({op.target for op in (*right.train.variables(), *right.evaluation.variables())})
        headers = tuple(header_of(name, self.weights[name]) for name in names)
        message = ToDevice(run=RUN, body=PlaceWeights(epoch=EPOCH), tensors=headers)
        return CoordinatorMessage(message, [self.weights[name] for name in names])


class _Worker(DeviceWorker):
    """Without connections: `said` is what it tells the coordinator. It is told to leave when `last` is reported, or it
    cannot go on."""

    def __init__(self, device: str, given: Given, last: int | None = None) -> None:
        self._run, self._timeout_s, self._foreign, self._others = RUN, 60.0, False, False
        self._site = Endpoint(device=device)
        self._accelerator, self._before, self._ranks = HOST, 0, None
        self._inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._session = DeviceSession()
        self._session.port = self
        self._data = dict(given.data)
        self._pending = self._executor = self._joiner = self._server = None
        self._values, self._notes = {}, ()
        self._last = last
        self.said: list[Any] = []
        self.lent: list[StateMessage | StatePart] = []
        self.follow_on: list[CoordinatorMessage] = [HALT]
        """What it is told when it cannot go on."""
        self._control = cast(Any, self)
        self._followed, self._donors, self._fetches, self._feeds = None, {}, [], []
        self._parts = PartWriter((), self._send_saved)
        self._outlets = StateOutlets(RUN, 1.0)
        self._outlets.put = lambda message, tensors, of: self.lent.append(message)
        self._peers = cast(Any, SimpleNamespace(connect=lambda _, off: {}, paths=lambda: (), close=lambda: None))

    # As the link to the coordinator

    def send(self, message: AnyMessage, tensors: Sequence[Tensor] = (), of: object = None) -> None:
        body = cast(Any, message).body
        self.said.append(body)
        if isinstance(body, DeviceFailed):
            for order in self.follow_on:
                self._inbox.put(order)
        elif isinstance(body, ItemReported) and body.item == self._last:
            self._inbox.put(HALT)

    def hear(self, message: AnyMessage, tensors: list[Tensor]) -> None:
        link: Any = SimpleNamespace(_inbox=self._inbox, _newest_epoch=-1)
        link._connection = SimpleNamespace(over=threading.Event())
        CoordinatorLink._on_message(link, message, tensors)

    def outdated(self, epoch: int) -> bool:
        return False

    def close(self) -> None: ...

    def told(self, *found: object) -> _Worker:
        """Work until it is told to leave."""
        for one in found:  # the device lets go of the tensors that came with an order
            self._inbox.put(one._replace(tensors=[*one.tensors]) if isinstance(one, CoordinatorMessage) else one)
        self.work()
        return self


class _NoLinks:
    """Of a stage that nothing is opened for."""

    def __init__(self, *_: object) -> None: ...
    def abandon(self) -> None: ...
    def close(self) -> None: ...


def given(devices: int) -> Given:
    """Of two replicas of two stages, or of one device alone."""
    made = job_of("mlp", {"layers": 2}, DIGITS, clip_norm=1.0, eval_every=2, steps=5)
    prepared, fleet = prepare(made), fleet_of(devices)
    count, problem = made.training.micro_batches, prepared.problem(fleet)
    layouts = [PlanLayout(("d0",), (), count)]
    if devices == 4:
        cut = tuple(random_cut(prepared, 2, 0, once=True))
        layouts = [PlanLayout(("d0", "d1"), cut, count // 2), PlanLayout(("d2", "d3"), cut, count // 2)]
    plan = build_replicas(problem, layouts, planner="test")
    emulated: Fleet | None = fleet if devices == 4 else None
    found = StageAssignments(prepared, plan, fleet, emulated=emulated)
    addresses = {name: Address("h", 7) for name in fleet.names}
    begun = EpochStart(step=3, first_item=5, epoch=EPOCH, from_checkpoint=False)
    weights = {name: p.detach() for name, p in prepared.build().named_parameters()}
    data = {"train": load_dataset(DIGITS, "train"), "heldout": load_dataset(DIGITS, "heldout")}
    assigned = dict(found.assignments(RUN, begun, addresses, 2))
    gc.freeze()  # each of hundreds of workers collects garbage before its stage: not through what a capture imports
    return Given(assigned, weights, data)


@pytest.fixture(autouse=True)
def _threads(monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    yield from possible_threads(monkeypatch)


@pytest.mark.parametrize("of", ["numbers", "graphs"])
def test_an_assignment_begins_a_stage_or_names_the_coordinator(of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "StageLinks", _NoLinks)
    chain = given(4)
    lies = Lies(1, len(chain.assignments))
    others = tuple(name for name in Assignment.__struct_fields__ if name not in GRAPHS)
    for device, right in chain.assignments.items():
        placed = chain.placed(device)

        def take(message: AnyMessage, device: str = device, placed: CoordinatorMessage = placed) -> None:
            landed(message)
            worker = _Worker(device, chain)
            try:
                worker.told(CoordinatorMessage(message, []), placed, HALT)
            except UserError as e:  # its data are others, or its operators are not here, which are the job's
                raise PeerError(f"coordinator: {e}" if of == "graphs" else str(e)) from None
            refused(worker, epoch=cast(AssignMessage, message).assignment.epoch)
            assert {type(body) for body in worker.said} <= {DeviceReady}

        lies.about(
            AssignMessage(run=RUN, assignment=right),
            take,
            names="coordinator",
            keep=GRAPHS if of == "numbers" else others,
        )
        assert DeviceReady in map(type, _Worker(device, chain).told(_assigned(right), placed, HALT).said)
    lies.told() if of == "numbers" else print(lies.refused, lies.taken)


def refused(worker: _Worker, epoch: int = EPOCH) -> None:
    """PeerError for an order that it could not follow. It told the coordinator, and took the next one."""
    for body in worker.said:
        if isinstance(body, DeviceFailed):
            assert body.fault == "other" and body.epoch in (epoch, EPOCH)
            assert worker._session.phase == "over", "by the coordinator's word"
            raise PeerError(body.reason)


def _assigned(right: Assignment) -> CoordinatorMessage:
    return CoordinatorMessage(AssignMessage(run=RUN, assignment=right), [])


def test_a_stage_that_was_assigned_does_its_items_or_names_the_coordinator() -> None:
    alone, spec = given(1), RunSpec(steps=5, micro_batches=4, micro_batch_size=2, start_step=3)
    right = alone.assignments["d0"]
    opened = [OpenItem(item=msgspec.structs.replace(i, index=5 + n), epoch=EPOCH) for n, i in enumerate(items(spec))]
    last = opened[-1].item.index
    lies = Lies(2, 1)
    done = _Worker("d0", alone, last).told(_assigned(right), alone.placed("d0"), *opened).said
    assert [body.item for body in done if isinstance(body, ItemReported)] == [5, 6, last]

    def take(message: AnyMessage) -> None:
        landed(message)
        worker = _Worker("d0", alone, last)
        epoch = cast(AssignMessage, message).assignment.epoch
        found = [HALT] if epoch != EPOCH else opened
        try:
            worker.told(CoordinatorMessage(message, []), alone.placed("d0"), *found)
        except UserError as e:  # its data are others
            raise PeerError(str(e)) from None
        for body in worker.said:
            if isinstance(body, DeviceFailed):
                raise PeerError(body.reason)

    lies.about(AssignMessage(run=RUN, assignment=right), take, names="coordinator", keep=GRAPHS)
    lies.told()


def test_an_order_out_of_phase_is_reported_and_the_device_takes_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended the device's process."""
    monkeypatch.setattr(device_module, "StageLinks", _NoLinks)
    chain = given(4)
    worker, placed, right = _Worker("d1", chain), chain.placed("d1"), _assigned(chain.assignments["d1"])
    worker.follow_on = [right, placed, HALT]
    worker.told(right, placed, placed)
    assert [type(body) for body in worker.said] == [DeviceReady, DeviceFailed, DeviceReady]
    with pytest.raises(
        PeerError, match=r"^coordinator: sent PlaceWeights that cannot be followed: PlaceWeights came in phase"
    ):
        refused(worker)


def _at_work(alone: Given) -> tuple[list[ToDevice], list[list[Tensor]]]:
    """What a device at work is told: two steps, before each of which others change a weight, and to lend its state."""
    names = sorted(alone.weights)
    spec = RunSpec(steps=5, micro_batches=4, micro_batch_size=2, start_step=3)
    first, second, last = [msgspec.structs.replace(i, index=5 + n) for n, i in enumerate(items(spec))]
    amounts = [torch.full((alone.weights[names[0]].numel(),), 0.25)]
    headers = (header_of(names[0], amounts[0]),)

    def opened(item: Item, exchange: WeightExchange | None = None) -> ToDevice:
        tensors = () if exchange is None else headers
        return ToDevice(run=RUN, body=OpenItem(item=item, exchange=exchange, epoch=EPOCH), tensors=tensors)

    lent = SendState(number=2, step=4, parts=frozenset(names), receivers=frozenset({"d1"}), epoch=EPOCH)
    orders = [
        opened(first, WeightExchange(rate_step=3, wanted=(names[1],))),
        ToDevice(run=RUN, body=lent),
        opened(second, WeightExchange(rate_step=4)),
        opened(last),
    ]
    return orders, [amounts, [], amounts, []]


def test_a_stage_at_work_lends_and_adds_what_it_is_told_or_names_the_coordinator() -> None:
    alone, lies = given(1), Lies(3, 3)
    orders, tensors = _at_work(alone)
    assigned = _assigned(alone.assignments["d0"])

    def done(*told: tuple[AnyMessage, list[Tensor]]) -> _Worker:
        worker = _Worker("d0", alone, orders[-1].body.item.index)  # pyright: ignore[reportAttributeAccessIssue]
        worker._inbox.put(assigned)
        worker._inbox.put(alone.placed("d0"))
        try:
            for message, sent in told:
                worker.hear(*landed(message, sent))
        except PeerError as e:
            raise PeerError(f"coordinator: {e}") from None  # as the channel does
        return worker.told()

    right = done(*zip(orders, tensors, strict=True))
    assert [type(body) for body in right.said] == [DeviceReady, WeightsRead, *[ItemReported] * 3]
    assert [(m.kind, m.step) for m in right.lent if isinstance(m, StateMessage)] == [("state", 4), ("gradients", 5)]
    kinds = [type(m) for m in right.lent]
    for place, order in enumerate(orders[:-1]):

        def take(message: AnyMessage, place: int = place) -> None:
            told = [*zip(orders, tensors, strict=True)]
            told[place] = (message, tensors[place])
            if isinstance(body := cast(ToDevice, message).body, OpenItem) and body.epoch != EPOCH:
                told[place + 1 :] = [(HALT.message, [])]  # of another plan: it waits for its own
            worker = done(*told)
            assert {type(body) for body in worker.said} <= {DeviceReady, WeightsRead, ItemReported, DeviceFailed}
            refused(worker)
            lent = [m for m in worker.lent if isinstance(m, StateMessage)]
            assert all(3 <= m.step <= 5 and m.epoch == EPOCH for m in lent)
            if isinstance(body, SendState):
                assert {m.number for m in worker.lent} <= {body.number}
            elif cast(OpenItem, body).epoch == EPOCH:
                assert [*map(type, worker.lent)] == kinds

        lies.about(order, take, names="coordinator")
    lies.told()


@pytest.mark.parametrize("step", [0, 2, 6, 1 << 48])
def test_a_state_that_never_comes_is_refused(step: int) -> None:
    """The donor waited for it as long as the run lasted."""
    alone = given(1)
    orders, _ = _at_work(alone)
    lent = cast(SendState, orders[1].body)
    wrong = msgspec.structs.replace(orders[1], body=msgspec.structs.replace(lent, step=step))
    worker = _Worker("d0", alone)
    worker._inbox.put(_assigned(alone.assignments["d0"]))
    worker._inbox.put(alone.placed("d0"))
    worker.hear(*landed(wrong, []))
    with pytest.raises(PeerError, match=f"^coordinator: asked for the state after {step} steps, expected 3 to 5$"):
        refused(worker.told(HALT))
    assert worker.lent == []


@pytest.mark.parametrize("rate_step", [5, 1 << 48])
def test_the_rate_is_that_of_a_step_of_the_run(rate_step: int) -> None:
    """Of one of torch's schedulers it was looked for step by step."""
    alone = given(1)
    orders, tensors = _at_work(alone)
    opened = cast(OpenItem, orders[0].body)
    exchange = msgspec.structs.replace(cast(WeightExchange, opened.exchange), rate_step=rate_step)
    wrong = msgspec.structs.replace(orders[0], body=msgspec.structs.replace(opened, exchange=exchange))
    worker = _Worker("d0", alone)
    worker._inbox.put(_assigned(alone.assignments["d0"]))
    worker._inbox.put(alone.placed("d0"))
    worker.hear(*landed(wrong, tensors[0]))
    with pytest.raises(PeerError, match=f"^coordinator: opened an item with the rate of step {rate_step}, the run has"):
        refused(worker.told())
