"""The coordinator passes on what is lent, and keeps none of it: what it refuses, and when it has enough."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, cast

import msgspec
import pytest
import torch

from isthmus.errors import PeerError
from isthmus.runtime.coordinator.joiners import MOST_STRETCH_BYTES, MOST_WAITING, Joiners
from isthmus.runtime.messages.all_messages import AnyMessage
from isthmus.runtime.messages.state_transfer import ReceiveStateMessage, StateMessage, StatePart
from isthmus.runtime.transport.lanes import SendLane
from isthmus.training.layout import header_of

from .test_coordinator_host import NotedScript

SHAPE = (100, 10)


class Modelled(NotedScript):
    def shapes(self, parts: Collection[str]) -> dict[str, tuple[int, ...]]:
        return dict.fromkeys(parts, SHAPE)


class Lane:
    """Nothing leaves it."""

    def __init__(self) -> None:
        self.said: list[AnyMessage] = []
        self.waiting_bytes = 0

    def put(self, message: AnyMessage, tensors: Collection[torch.Tensor] = (), *, background: bool = False) -> None:
        self.said.append(message)
        self.waiting_bytes += sum(t.nbytes for t in tensors)

    def background_bytes(self) -> int:
        return self.waiting_bytes

    def drop_background(self) -> None:
        self.waiting_bytes = 0


def _stretch(size_bytes: int, of: str = "oslo", dtype: torch.dtype = torch.uint8) -> tuple[StatePart, torch.Tensor]:
    flat = torch.zeros(size_bytes, dtype=dtype)
    return StatePart(run="r", number=1, of=of, offset=0, tensors=(header_of("stretch", flat),)), flat


def test_a_newcomer_whose_line_is_slow_does_not_fill_the_memory() -> None:
    lane = Lane()
    joiners = Joiners("r", Modelled(), {"rome": cast(SendLane, lane)})
    joiners.follow("rome", 1, 3, {"oslo": frozenset({"w"})}, 0)
    message, flat = _stretch(10_000)
    passed = 0
    while not (slow := joiners.pass_on("oslo", message, [flat])):
        passed += 1
        assert passed < 100, "there is no end"
    assert slow == "rome"
    most = MOST_WAITING * SHAPE[0] * SHAPE[1]
    assert most < lane.waiting_bytes <= most + 10_000
    joiners.forget("oslo")
    assert lane.waiting_bytes == 0, "what it will not follow need not travel any more"
    assert joiners.pass_on("oslo", message, [flat]) is None


@pytest.mark.parametrize(
    "wrong",
    [
        _stretch(MOST_STRETCH_BYTES + 1)[0],
        _stretch(8, of="cairo")[0],
        _stretch(8, dtype=torch.float32)[0],
        StatePart(run="r", number=1, of="oslo", offset=0, tensors=_stretch(8)[0].tensors * 2),
        StatePart(run="r", number=1, of="oslo", offset=0),
        StateMessage(run="r", number=1, of="cairo", kind="state", step=1, headers=()),
        StateMessage(run="r", number=1, of="oslo", kind="state", step=1, headers=(), tensors=_stretch(8)[0].tensors),
    ],
    ids=["too large", "of another", "no bytes", "two", "none", "begun for another", "begun with bytes"],
)
def test_what_is_no_stretch_of_its_own_is_refused_before_it_is_received(wrong: StateMessage | StatePart) -> None:
    joiners = Joiners("r", Modelled(), {})
    joiners.check("oslo", _stretch(8)[0], 0, 0)
    with pytest.raises(PeerError, match="sent what is not its own"):
        joiners.check("oslo", wrong, 0, 0)


def test_what_is_still_under_way_of_an_earlier_following_goes_no_further() -> None:
    lane = Lane()
    joiners = Joiners("r", Modelled(), {"rome": cast(SendLane, lane)})
    message, flat = _stretch(100)
    for number in (1, 2):
        joiners.follow("rome", number, 3, {"oslo": frozenset({"w"})}, 0)
        joiners.pass_on("oslo", message, [flat])
        if number == 1:
            joiners.forget("oslo")
    assert [type(m) for m in lane.said] == [ReceiveStateMessage, StatePart, ReceiveStateMessage]


@pytest.mark.parametrize(
    ("kind", "number", "step"), [("state", 1, 4), ("gradients", 1, 3), ("gradients", 1, 9), ("state", 2, 3)]
)
def test_whoever_lends_a_state_of_no_such_step_is_refused_and_not_whoever_takes_it(
    kind: Literal["state", "gradients"], number: int, step: int
) -> None:
    """Else the joining device reports a step that the run has not done, and is shut out for it."""
    joiners = Joiners("r", Modelled(), {})
    joiners.follow("rome", 1, 3, {"oslo": frozenset({"w"})}, 0)
    right = StateMessage(run="r", number=1, of="oslo", kind="gradients", step=8, headers=())
    joiners.check("oslo", right, 0, 8)
    joiners.check("oslo", msgspec.structs.replace(right, kind="state", step=3), 0, 8)
    with pytest.raises(PeerError, match=f"sent {kind} of step {step} in transfer {number}, expected"):
        joiners.check("oslo", msgspec.structs.replace(right, kind=kind, number=number, step=step), 0, 8)
