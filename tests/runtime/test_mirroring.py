"""A snapshot on its way to another device, a stretch at a time."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
import torch
from torch import Tensor

from isthmus.errors import PeerError
from isthmus.runtime.device.snapshots import SnapshotReceiver, SnapshotSender
from isthmus.runtime.messages.assignment import SnapshotMessage, SnapshotPart, SnapshotReplication
from isthmus.training.snapshot import Snapshot, snapshot

STATE = {"w": torch.randn(40, 7), "optimizer.w.step": torch.tensor(3.0)}
SHAPES = {2: {"w": (40, 7)}}
Sent = list[tuple[SnapshotMessage | SnapshotPart, Sequence[Tensor]]]


def _sent(every: int = 4, stretch_bytes: int = 100) -> tuple[SnapshotSender, Sent]:
    sent: Sent = []
    snapshot_copy = SnapshotReplication(stage=1, every=every, stretch_bytes=stretch_bytes)
    return SnapshotSender("run", 3, 2, snapshot_copy, lambda m, t: sent.append((m, t))), sent


def test_a_little_after_each_item_and_whole_before_the_next_one() -> None:
    sender, sent = _sent()
    sender.begin(8, snapshot(STATE))
    assert len(sent) == 1
    counts: list[int] = []
    for _ in range(4):
        before = len(sent)
        sender.go_on()
        counts.append(len(sent) - before)
    assert counts == [5, 4, 4, 0] or sum(counts) == len(sent) - 1
    assert all(t[0].numel() <= 100 for _, t in sent[1:]) and counts[3] == 0
    complete: list[tuple[int, int, Snapshot]] = []
    receiver = SnapshotReceiver(SHAPES, lambda stage, step, taken: complete.append((stage, step, taken)))
    for message, tensors in sent:
        assert not complete
        receiver.guard(message)
        receiver.accept(message, tensors)
    ((stage, step, taken),) = complete
    assert (stage, step) == (2, 8)
    assert all(torch.equal(taken.tensors()[name], value) for name, value in STATE.items())


@pytest.mark.parametrize(
    "change",
    [{"source": 1}, {"step": 9}, {"offset": 100}, {"tensors": ()}],
    ids=["another stage", "another snapshot", "a gap", "nothing"],
)
def test_what_is_out_of_turn_is_refused(change: dict[str, object]) -> None:
    sender, sent = _sent()
    sender.begin(8, snapshot(STATE))
    sender.go_on()
    receiver = SnapshotReceiver(SHAPES, lambda stage, step, taken: None)
    receiver.guard(sent[0][0])
    receiver.accept(*sent[0])
    receiver.guard(sent[1][0])
    with pytest.raises(PeerError):
        receiver.guard(msgspec.structs.replace(sent[1][0], **change))


def test_a_snapshot_of_other_shapes_is_refused_before_it_is_received() -> None:
    sender, sent = _sent()
    sender.begin(8, snapshot({"w": torch.zeros(1000, 1000)}))
    with pytest.raises(PeerError, match="not of its stage"):
        SnapshotReceiver(SHAPES, lambda stage, step, taken: None).guard(sent[0][0])
