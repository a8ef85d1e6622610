"""A state in one buffer and out again, bit for bit and stride for stride."""

import errno
import os
import tempfile
from pathlib import Path

import msgspec
import pytest
import torch

from isthmus.accelerators import HOST
from isthmus.accelerators.accelerator import Host
from isthmus.errors import PeerError
from isthmus.training import snapshot as snapshots
from isthmus.training.layout import TensorHeader, header_of, pack
from isthmus.training.snapshot import IncomingSnapshot, by_part, check_state, joined, part_of, snapshot, stretches
from isthmus.training.stored import StoredTensor, sent_header

MEMORY = HOST.memory()
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


@pytest.mark.parametrize("room", [True, False])
def test_the_copy_of_a_large_state_is_in_a_file(room: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or in memory, where the disk is full; and it stays until what is sent of it is let go."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(snapshots, "LARGE_BYTES", 100)
    if not room:

        def full(*_: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "posix_fallocate", full)
    taken = snapshot(STATE, on_disk=True)
    expected = snapshot(STATE).tensors()
    sent, found = taken.sent(), taken.tensors()
    del taken
    assert [isinstance(value, StoredTensor) for value in sent.values()] == [room] * len(STATE)
    for name, value in expected.items():
        assert torch.equal(found[name], value) and found[name].stride() == value.stride(), name
        assert sent_header(name, sent[name]) == header_of(name, STATE[name])  # also of gaps
        value = sent[name]
        travels = b"".join(value.pieces()) if isinstance(value, StoredTensor) else bytes(pack(value))
        assert travels == bytes(pack(STATE[name])), name
    assert not list(tmp_path.iterdir()), "it has no name"
    assert snapshot(STATE).space is None, "nobody asked"


@pytest.mark.parametrize("free", [0, 1 << 40])
def test_a_copy_that_arrives_is_in_a_file_where_memory_is_scarce(free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "LARGE_BYTES", 100)
    monkeypatch.setattr(Host, "memory", lambda self: msgspec.structs.replace(MEMORY, free=free))  # pyright: ignore
    taken = snapshot(STATE)
    arriving = IncomingSnapshot(taken.headers)
    for offset, stretch, headers in stretches(taken.flat, 100):
        assert arriving.expects(offset, headers)
        arriving.add(stretch)
    assert arriving.whole and (arriving.snapshot.space is not None) == (free == 0)
    found = arriving.snapshot.tensors()
    assert all(torch.equal(found[name], value) for name, value in STATE.items())


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
