"""A module built in a file has the values, the strides and the ties that it has in memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from isthmus.errors import UserError
from isthmus.training.checkpoint import digest_of
from isthmus.training.file_backed import LARGE_BYTES, FileBacked, TensorSpace
from isthmus.training.stored import place_of

SIDE = 640  # a square of float32 is large


class Model(nn.Module):
    """What constructors do: draw in place, compute with what was drawn, cast, tie, share memory, leave gaps."""

    wide: Tensor
    angles: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.drawn = nn.Linear(SIDE, SIDE)
        self.scaled = nn.Parameter(torch.randn(SIDE, SIDE) * 0.02)
        self.table = nn.Embedding(SIDE, SIDE)
        self.tied = nn.Linear(SIDE, SIDE, bias=False)
        self.tied.weight = self.table.weight
        self.cast = nn.Linear(SIDE, 2 * SIDE).to(torch.bfloat16)
        self.turned = nn.Parameter(torch.rand(SIDE, SIDE).t())
        self.images = nn.Conv2d(128, 256, 3).to(memory_format=torch.channels_last)  # pyright: ignore
        self.part = nn.Parameter(self.scaled.detach()[SIDE // 2 :])
        self.copied = nn.Parameter(torch.full((SIDE, SIDE), 3.0).clone().double())
        self.register_buffer("wide", torch.arange(4.0).expand(SIDE, 4))
        self.register_buffer("angles", torch.polar(torch.ones(4), torch.arange(4.0)).conj())
        self.register_buffer("none", torch.empty(0, 3))
        with torch.no_grad():
            self.drawn.weight[0] = 7.0


def built(seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    module = Model()
    return dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers())


def test_a_module_built_in_a_file_is_the_module_built_in_memory(tmp_path: Path) -> None:
    expected, space = built(3), TensorSpace(tmp_path / "is" / "not" / "there")
    with FileBacked(space):
        found = built(3)
    assert {n for n, t in found.items() if not space.holds(t.untyped_storage())} == {
        n for n, t in expected.items() if t.untyped_storage().nbytes() < LARGE_BYTES
    }
    stored = {name: space.stored(name, tensor) for name, tensor in found.items()}
    for name, tensor in expected.items():
        read = stored[name].read()
        assert torch.equal(found[name], tensor) and torch.equal(read, tensor), name
        assert read.stride() == found[name].stride() == tensor.stride() and read.dtype == tensor.dtype, name
    assert place_of(stored["tied.weight"]) == place_of(stored["table.weight"])
    rows = [n for n, t in expected.items() if t.is_contiguous()]
    assert digest_of({n: stored[n] for n in rows}) == digest_of({n: expected[n].detach() for n in rows})
    assert not list(tmp_path.iterdir()), "the file has no name"


def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    refused = pytest.raises(UserError, match=r"cannot write 1,638,400 bytes of first weights: No space left")
    with refused, FileBacked(TensorSpace(tmp_path)):
        torch.empty(SIDE, SIDE)
