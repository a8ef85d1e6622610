"""Drawn integers in what a merger orders first of a device that joined, through the decoder and the device's check into
the trainer that it makes and a step of it. Who sent it is named where it is refused, and the right order is taken next.

Structs of decoupled runs with integers, and where they are drawn:

- to replicas: TrainReplica with Assignment, ReplicaShare, Decoupled and TensorHeader: here; its graphs, which are the
  program that the merger has the device run: here, `graphs`. ToReplica with CollectChanges, FragmentSent and Halt:
  test_drawn_integers.py, `to-replicas`;
- to the merger: FromReplica with StepsMade, Contributed, VersionTaken and TensorHeader: test_drawn_integers.py,
  `to-the-merger`. LastStepMade and ReplicaNote have none;
- of pipelines' devices and their coordinator: those of every run, tests/runtime/test_drawn_integers.py.
"""

from __future__ import annotations

import dataclasses
import socket
from collections import deque
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import torch
from torch import Tensor

from isthmus.errors import PeerError, StepError, UserError
from isthmus.protocol.decoupled_events import NEVER
from isthmus.runtime.decoupled import device_replica, merger_link
from isthmus.runtime.decoupled.device_replica import GraphTrainer
from isthmus.runtime.decoupled.merger_link import MergerLink, ReplicaPlace
from isthmus.runtime.device.peer_connections import Endpoint
from isthmus.runtime.messages.all_messages import AnyMessage
from isthmus.runtime.messages.assignment import Assignment
from isthmus.runtime.messages.decoupled import TrainReplica
from isthmus.runtime.messages.run import JoinRun
from isthmus.runtime.transport.channel import SocketChannel, decode_message
from isthmus.training.layout import pack

from ..drawn_integers import Lies, landed, possible_threads
from .small import job_of
from .test_graph_trainer import ordered, samples_of

pytestmark = pytest.mark.thorough

PLACE = ReplicaPlace(name="a", run="run", address="127.0.0.1:1", timeout_s=60.0)
SITE = Endpoint(device="a")
GRAPHS = ("train", "evaluation")
Order = tuple[TrainReplica, list[Tensor]]


class _Link(MergerLink):
    """To a merger that has said this."""

    def __init__(self, *said: Order) -> None:
        self._place, self._connection = PLACE, cast(Any, SimpleNamespace(current=None))
        self.received, self._was_assigned = merger_link.queue.SimpleQueue(), True
        self.orders = deque(said)

    def assigned(self) -> Order:
        return self.orders.popleft()


@pytest.fixture
def right(monkeypatch: pytest.MonkeyPatch) -> Order:
    """Data are read once, and threads are left as they are."""
    job = job_of()
    _, order, kept = ordered(job, "b")
    data = {"train": samples_of(job, order)}
    monkeypatch.setattr(device_replica, "stage_data", lambda *_, **__: data)
    return order, list(kept.values())


@pytest.fixture(autouse=True)
def _threads(monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    yield from possible_threads(monkeypatch)


def _step(trainer: GraphTrainer) -> float:
    torch.manual_seed(0)
    for fragment, elements in enumerate(trainer.fragments.elements):
        trainer.fragments.take(fragment, torch.randn(elements) / 8, whole=True, included=NEVER, first=True)
    return trainer.step(0)


@pytest.mark.parametrize("graphs", [False, True], ids=["numbers", "graphs"])
def test_a_drawn_integer_is_refused_or_one_that_a_replica_may_be_ordered(
    graphs: bool, right: Order, capsys: pytest.CaptureFixture[str]
) -> None:
    order, tensors = right
    expected = _step(device_replica._assigned(_Link(right), SITE))

    def take(message: AnyMessage) -> None:
        try:
            message, arrived = landed(message, tensors)
        except PeerError as e:
            raise PeerError(f"merger: {e}") from None  # as the channel does
        assert isinstance(message, TrainReplica)
        try:
            follow(message, arrived)
        except (UserError, StepError) as e:
            if not graphs:
                raise
            raise PeerError(f"merger: {e}") from None  # of operators: the graph is the merger's, which hears of it

    def follow(message: TrainReplica, arrived: list[Tensor]) -> None:
        link = _Link((message, arrived), right)
        trainer = device_replica._assigned(link, SITE)
        if not link.orders:
            assert (trainer.steps, _step(trainer)) == (order.steps, expected)
            raise PeerError(capsys.readouterr().err)
        share, given = message.assignment.replica, order.assignment.replica
        assert share is not None and given is not None
        assert trainer.samples == given.own and 0 <= trainer.steps < 1 << 32
        assert (share.number + 1) * share.own <= share.batch
        assert trainer.fragments.elements == [4810, 4160]
        assert isinstance(_step(trainer), float)

    lies = Lies(43, 1)
    inner = {*TrainReplica.__struct_fields__, *Assignment.__struct_fields__} - {"assignment"}
    keep = [name for name in inner if (name in GRAPHS) != graphs]
    lies.about(order, take, names="merger: ", keep=keep if graphs else GRAPHS)
    lies.told()


def test_a_merger_whose_order_is_refused_is_dialled_again(right: Order, capsys: pytest.CaptureFixture[str]) -> None:
    """Over TCP: it says it anew."""
    order, tensors = right
    wrong = msgspec.structs.replace(order, steps=1 << 40)
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor() as pool:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        link = MergerLink(dataclasses.replace(PLACE, address=address, away_timeout_s=60.0))
        listener.settimeout(60.0)
        trainer, channels = pool.submit(device_replica._assigned, link, SITE), list[SocketChannel]()
        for said in (wrong, order):
            channels.append(SocketChannel(listener.accept()[0], "replica", 60.0))
            joining = channels[-1].receive()
            assert joining is not None and isinstance(joining[0], JoinRun)
            channels[-1].send(said, [pack(tensor) for tensor in tensors])
        assert trainer.result().steps == order.steps
        link.close(0.0)
        for channel in channels:
            channel.close()
    assert "replica a: merger: ordered step 1099511627776 of 17179869184 samples, 4 each; dialling it again" in (
        capsys.readouterr().err
    )


def test_a_graph_uses_values_that_it_has(right: Order) -> None:
    """Of the operator of the loss another output: it was a KeyError in the first step."""
    graph = right[0].assignment.train
    content = msgspec.msgpack.decode(msgspec.msgpack.encode(right[0]))
    assert graph.loss is not None
    content["assignment"]["train"]["loss"][2] = 4
    with pytest.raises(PeerError, match=f"output 4 of '{graph.loss.op}' is used in stage 0, which has none"):
        decode_message(memoryview(msgspec.msgpack.encode(content)))
