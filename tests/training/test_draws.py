"""First values that a device draws itself: the same bits as those of the module that was built, or none."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor, nn

from isthmus.protocol.draws import Draw, DrawnTensor, Draws
from isthmus.training import draws as module_under_test
from isthmus.training.draws import repeated
from isthmus.training.file_backed import FileBacked, TensorSpace
from isthmus.training.layout import bytes_of


class Model(nn.Module):
    """Layers as they draw by default; tensors that are drawn twice, in part, from elsewhere, cast, tied or computed."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Linear(600, 700)
        self.odd = nn.Embedding(7, 3, padding_idx=1)
        self.twice = nn.Linear(40, 40)
        nn.init.normal_(self.twice.weight, std=0.02)
        self.cast = nn.Linear(32, 16).bfloat16().float()
        self.narrow = nn.Parameter(torch.empty(33, 17, dtype=torch.bfloat16).normal_(0.0, 0.1))
        self.zeros = nn.Parameter(torch.empty(20, 20).zero_())
        self.copied = nn.Parameter(torch.empty(40, 40).half())
        self.copied.data.copy_(self.twice.weight.data)
        self.tied = self.twice.weight
        self.other = nn.Parameter(torch.empty(50).normal_(generator=torch.Generator().manual_seed(3)))
        self.scaled = nn.Parameter(torch.empty(50).normal_().mul_(2.0))
        self.part = nn.Parameter(torch.empty(60))
        nn.init.uniform_(self.part[:17])
        nn.init.uniform_(self.part[17:])
        self.after = nn.Linear(9, 9)
        self.turned = nn.Parameter(torch.empty(8, 6).t().normal_())  # other numbers per element: nothing is known after
        self.last = nn.Linear(5, 5)


DRAWN = {
    *("large.weight", "large.bias", "twice.weight", "twice.bias", "cast.weight", "cast.bias", "narrow", "zeros"),
    *("copied", "tied", "after.weight", "after.bias"),
}


def recorded(folder: Path, build: Callable[[], nn.Module] = Model) -> tuple[dict[str, Tensor], Draws]:
    torch.manual_seed(5)
    with FileBacked(TensorSpace(folder)) as mode:
        built = {name: p.detach() for name, p in build().named_parameters(remove_duplicate=False)}
    tensors = tuple(
        DrawnTensor(name=name, shape=tuple(value.shape), origin=origin, sha256=digest(value))
        for name, value in built.items()
        if (origin := mode.recorded.origin(value)) is not None
    )
    return built, Draws(seed=5, draws=tuple(mode.recorded.draws), tensors=tensors)


def digest(value: Tensor) -> str:
    return hashlib.sha256(bytes_of(value.detach().reshape(-1))).hexdigest()


@pytest.mark.parametrize("piece", [16, 48, 1 << 20])
def test_repeated_draws_have_the_bits_of_the_module(
    piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module_under_test, "_PIECE", piece)
    built, asked = recorded(tmp_path)
    asked = msgspec.json.decode(msgspec.json.encode(asked), type=Draws)
    assert {tensor.name for tensor in asked.tensors} == DRAWN
    # Each alone: what comes before it is drawn in pieces, and dropped.
    for tensor in asked.tensors:
        found, lacking = repeated(msgspec.structs.replace(asked, tensors=(tensor,)))
        assert not lacking and found[tensor.name].dtype == built[tensor.name].dtype
        assert torch.equal(found[tensor.name], built[tensor.name])
    assert repeated(asked)[0].keys() == DRAWN


class SeedsAgain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        torch.manual_seed(1)
        self.second = nn.Linear(8, 8)


def test_what_the_record_does_not_know_is_found_by_its_digest(tmp_path: Path) -> None:
    found, lacking = repeated(recorded(tmp_path, SeedsAgain)[1])
    assert found.keys() == {"first.weight", "first.bias"} and lacking.keys() == {"second.weight", "second.bias"}
    assert all("drawn here it has other values" in reason for reason in lacking.values())


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"draws": ()}, "it is none of the draws"),
        ({"draws": (Draw("normal_", 1 << 50, "float32", ()),)}, "more than 134217728 elements"),
        ({"draws": (Draw("uniform_", 64, "float32", (1.0, 0.0)),)}, "cannot be drawn: "),
        ({"draws": (Draw("uniform_", 64, "load", ()),)}, "type 'load', expected one of: bfloat16"),
        ({"draws": (Draw("fill_", 64, "float32", ()),)}, "cannot be drawn: "),
        ({"draws": (Draw("normal_", 64, "float32", (0.0, math.pi)),)}, "other values"),
        ({"seed": 6}, "other values"),
    ],
)
def test_what_cannot_be_drawn_is_lacking(changed: dict[str, object], words: str, tmp_path: Path) -> None:
    _, asked = recorded(tmp_path, lambda: nn.Linear(8, 8, bias=False))
    found, lacking = repeated(msgspec.structs.replace(asked, **changed))
    assert not found and words in lacking["weight"]
