"""Tensors of safetensors files, by range."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from isthmus.errors import UserError
from isthmus.training.stored import DTYPES, save_tensors, stored_tensors

TENSORS: dict[str, Tensor] = {
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 4),
    "narrow": torch.randn(300, 7, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16),
    "flags": torch.tensor([True, False, True]),
    "counts": torch.arange(12, dtype=torch.int64).reshape(3, 4),
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path / "model.safetensors"


def test_tensors_are_read_as_the_library_wrote_them(file: Path) -> None:
    found = stored_tensors(file)
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        read = found[name].read()
        assert read.dtype == tensor.dtype and read.stride() == tensor.stride() and torch.equal(read, tensor)


def test_pieces_are_the_tensor_in_order(file: Path) -> None:
    narrow = stored_tensors(file)["narrow"]
    pieces = [bytes(piece) for piece in narrow.pieces(most_bytes=1000)]
    assert [len(piece) for piece in pieces] == [1000] * 4 + [200]
    assert b"".join(pieces) == TENSORS["narrow"].view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("before", range(1, 10))
def test_a_view_has_the_bytes_of_a_read_and_the_file_is_not_written(
    before: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    wide = torch.randn(200, 301, generator=torch.Generator().manual_seed(before)).to(dtype)
    save_file({"a" * before: torch.zeros(before, dtype=dtype), "wide": wide}, tmp_path / "model.safetensors")
    stored = stored_tensors(tmp_path / "model.safetensors")["wide"]
    viewed = stored.view()
    assert viewed.dtype == dtype and viewed.stride() == wide.stride() and torch.equal(viewed, wide)
    viewed.zero_()
    assert torch.equal(stored.read(), wide)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(stored.offset + stored.nbytes - 1)
    with pytest.raises(UserError, match="truncated since"):
        stored.view()


@pytest.mark.parametrize("kept", [0, 4, 40, -1])
def test_a_truncated_file_is_refused_with_its_name(file: Path, kept: int) -> None:
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(UserError, match=r"model\.safetensors.*truncated"):
        stored_tensors(file)


def test_a_file_that_became_shorter_is_refused_as_it_is_read(file: Path) -> None:
    found = stored_tensors(file)
    file.write_bytes(file.read_bytes()[:-8])
    last = max(found.values(), key=lambda tensor: tensor.offset)
    with pytest.raises(UserError, match="truncated since"):
        last.read()


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ({"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]}, "of type F8_E4M3, expected one of: BF16"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, "4 bytes, which is not what float32"),
        ({"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}, "no safetensors file"),
    ],
)
def test_a_header_that_contradicts_itself_is_refused(tmp_path: Path, entry: dict[str, object], why: str) -> None:
    header = json.dumps({"w": entry}).encode()
    (tmp_path / "m.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(UserError, match=why):
        stored_tensors(tmp_path / "m.safetensors")


def test_a_header_of_many_brackets_is_refused(tmp_path: Path) -> None:
    header = b'{"w": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    (tmp_path / "m.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(UserError, match="no safetensors file"):
        stored_tensors(tmp_path / "m.safetensors")


def test_all_types_of_the_format_that_torch_writes_are_known(tmp_path: Path) -> None:
    save_file({name: torch.zeros(2, dtype=getattr(torch, name)) for name in DTYPES.values()}, tmp_path / "all")
    assert {t.header.dtype for t in stored_tensors(tmp_path / "all").values()} == set(DTYPES.values())


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_a_file_is_written_as_the_library_writes_it(tmp_path: Path, metadata: dict[str, str] | None) -> None:
    typed = {f'of "{name}" é': torch.arange(3).to(getattr(torch, name)) for name in DTYPES.values()}
    tensors = TENSORS | typed | {"columns": torch.arange(24.0).reshape(4, 6).T}
    save_file({name: t.contiguous() for name, t in tensors.items()}, tmp_path / "library", metadata)
    digest = save_tensors(tmp_path / "ours", tensors, metadata)
    expected = (tmp_path / "library").read_bytes()
    assert (tmp_path / "ours").read_bytes() == expected and digest == hashlib.sha256(expected).hexdigest()
    again = save_tensors(tmp_path / "again", stored_tensors(tmp_path / "ours"), metadata)
    assert again == digest and (tmp_path / "again").read_bytes() == expected


def test_a_cast_is_made_as_it_is_read_and_equals_that_of_the_whole(file: Path) -> None:
    narrow = stored_tensors(file)["narrow"]
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        cast, expected = narrow.cast(dtype), TENSORS["narrow"].to(dtype)
        assert (cast.dtype, cast.nbytes) == (dtype, expected.nbytes)
        assert torch.equal(cast.read(), expected) and torch.equal(cast.raw().read(), TENSORS["narrow"])
        joined = b"".join(cast.pieces(9))
        assert joined == bytes(expected.view(torch.uint8).reshape(-1).tolist())
