"""A state in one buffer and out again, bit for bit and stride for stride."""

import pytest
import torch

from isthmus.errors import PeerError
from isthmus.training.layout import TensorHeader
from isthmus.training.snapshot import by_part, check_state, joined, part_of, snapshot

STATE = {
    "w.weight": torch.randn(3, 5).t(),
    "w.bias": torch.randn(6)[::2],
    "count": torch.tensor(7, dtype=torch.int64),
    "half": torch.randn(3).to(torch.bfloat16),
    "empty": torch.empty(0, 2),
    "optimizer.w.weight.momentum_buffer": torch.randn(5, 3),
    "optimizer.w.weight.step": torch.tensor(3.0),
}


def test_what_is_copied_comes_back() -> None:
    taken = snapshot(STATE)
    found = taken.tensors()
    assert found.keys() == STATE.keys()
    for name, value in STATE.items():
        assert torch.equal(found[name], value) and found[name].dtype == value.dtype, name
    before = STATE["count"].clone()
    STATE["count"] += 1
    assert torch.equal(taken.tensors()["count"], before), "a copy"


def test_the_optimizer_state_belongs_to_its_parameter() -> None:
    parts = by_part(STATE)
    assert set(parts) == {"w.weight", "w.bias", "count", "half", "empty"}
    assert set(parts["w.weight"]) == {n for n in STATE if "w.weight" in n}
    assert joined(parts.values()).keys() == STATE.keys()
    assert part_of("optimizer.a.b.exp_avg") == "a.b"


def _header(name: str, *shape: int) -> TensorHeader:
    return TensorHeader(name, "float32", shape, tuple(torch.empty(shape, device="meta").stride()))


SHAPES = {"w": (2, 3)}


@pytest.mark.parametrize(
    ("headers", "words"),
    [
        ([], "sent no 'w'"),
        ([_header("w", 3, 2)], "not of its stage"),
        ([_header("w", 2, 3), _header("v", 2, 3)], "not of its stage"),
        ([_header("w", 2, 3), _header("w", 2, 3)], "not of its stage"),
        ([_header("w", 2, 3), _header("optimizer.v.step")], "not of its stage"),
        ([_header("w", 2, 3), _header("optimizer.w.step", 9)], "not of its stage"),
        ([_header("w", 2, 3), *(_header(f"optimizer.w.{n}", 2, 3) for n in range(9))], "not of its stage"),
        ([_header("w", 2, 3), _header("optimizer.w.x"), _header("optimizer.w.x")], "twice"),
    ],
)
def test_what_is_no_state_of_the_stage_is_refused(headers: list[TensorHeader], words: str) -> None:
    with pytest.raises(PeerError, match=words):
        check_state(SHAPES, headers)
    check_state(SHAPES, [_header("w", 2, 3), _header("optimizer.w.momentum_buffer", 2, 3), _header("optimizer.w.step")])
