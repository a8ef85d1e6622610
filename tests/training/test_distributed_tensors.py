"""Folders that `torch.distributed.checkpoint` wrote are read as torch reads them, and nothing in them is ever run."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed import checkpoint as dcp

from isthmus.api.export import ExportOptions, export_model
from isthmus.errors import UserError
from isthmus.training.distributed_tensors import METADATA, distributed_tensors
from isthmus.training.pickled import read_pickled

FILE = "__0_0.distcp"
VALUES: dict[str, Tensor] = {
    **{str(dtype): torch.arange(6).to(dtype).reshape(2, 3) for dtype in (torch.int8, torch.int16, torch.int32)},
    **{str(dtype): torch.randn(3, 2).to(dtype) for dtype in (torch.float64, torch.bfloat16, torch.float16)},
    "bool": torch.tensor([True, False]),
    "complex": torch.randn(2, dtype=torch.complex64),
    "bytes": torch.arange(200, dtype=torch.uint8),
    "long": torch.tensor(7),
    "nothing": torch.empty(0, 3),
    "turned": torch.randn(4, 5).t(),
    "part of a larger one": torch.randn(9, 8)[2:4, 1:3],
}
RANKS = """
import sys, torch
from torch import distributed as dist, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
rank, world, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.randn(2, 5)).sum().backward()
optimizer.step()
weights, states = get_state_dict(model, optimizer)
dcp.save({"model": weights, "optim": states, "step": 7}, checkpoint_id=f"{folder}/saved")
dist.destroy_process_group()
"""


def saved(folder: Path, values: Any = None) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        dcp.save(VALUES if values is None else values, checkpoint_id=folder, no_dist=True)
    return folder


def as_torch_reads(folder: Path) -> None:
    """Every tensor has the bits that `dcp.load` gives."""
    found = {".".join(keys): tensor for keys, tensor in distributed_tensors(folder).items()}
    expected = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in found.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(expected, checkpoint_id=folder, no_dist=True)
    for name, tensor in found.items():
        assert tensor.read().dtype == expected[name].dtype and torch.equal(tensor.read(), expected[name]), name


def test_every_type_and_layout(tmp_path: Path) -> None:
    as_torch_reads(saved(tmp_path))
    assert distributed_tensors(tmp_path).keys() == {(name,) for name in VALUES}


def test_several_ranks_had_a_part_of_each_tensor(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANKS, str(rank), "3", str(tmp_path)], env=environment)
        for rank in range(3)
    ]
    assert [rank.wait() for rank in ranks] == [0, 0, 0]
    found = distributed_tensors(tmp_path / "saved")
    assert {len(found["model", f"{n}.weight"].chunks) for n in (0, 1)} == {3}
    assert ("optim", "state", "1.bias", "exp_avg_sq") in found and ("step",) not in found
    as_torch_reads(tmp_path / "saved")
    done, _ = export_model(tmp_path / "saved", tmp_path / "out")
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert weights.keys() == {"0.weight", "0.bias", "1.weight", "1.bias"} and (done.done, done.unit) == (4, "tensors")
    assert all(torch.equal(weights[name], found["model", name].read()) for name in weights)


def test_which_tensors_are_the_models(tmp_path: Path) -> None:
    one = torch.ones(2)
    for number, (values, names) in enumerate(
        [({"a": one}, {"a"}), ({"app": {"model": {"a.b": one}, "other": {"c": one}}}, {"a.b"})]
    ):
        export_model(saved(tmp_path / f"{number}", values), tmp_path / f"out-{number}")
        assert load_file(tmp_path / f"out-{number}" / "model.safetensors").keys() == names
    for name, values, said in (
        ("two", {"x": {"model": {"a": one}}, "y": {"model": {"a": one}}}, "got tensors in 'x.model', 'y.model'"),
        ("none", {"optim": {"a": one}}, "got tensors in 'optim', expected those of one 'model'"),
        ("number", {"step": 3}, "got no tensors, expected those of one 'model'"),
    ):
        with pytest.raises(UserError, match=said):
            export_model(saved(tmp_path / name, values), tmp_path / "no")
    with pytest.raises(UserError, match="without options"):
        export_model(tmp_path / "0", tmp_path / "no", ExportOptions(max_shard_size="5GB"))
    assert not (tmp_path / "no").exists()


class Runs:
    """What a reader that runs pickles would do."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.path),)


def changed(folder: Path, change: Callable[[Any], None]) -> None:
    metadata = pickle.loads((folder / METADATA).read_bytes())
    change(metadata)
    (folder / METADATA).write_bytes(pickle.dumps(metadata))


def test_nothing_is_run(tmp_path: Path) -> None:
    saved(tmp_path / "saved")
    for place in ("planner_data", "storage_meta", "version", "state_dict_metadata"):
        changed(saved(tmp_path / "saved"), lambda m, place=place: setattr(m, place, Runs(tmp_path / "ran")))
        with pytest.raises(UserError, match=r"it names '(posix|nt).mkdir', which is not expected in it"):
            distributed_tensors(tmp_path / "saved")
    pickle.loads((tmp_path / "saved" / METADATA).read_bytes())
    assert (tmp_path / "ran").is_dir(), "it is one that runs"


def chunk_of(metadata: Any) -> Any:
    return metadata.state_dict_metadata["bytes"].chunks[0]


def place_of(metadata: Any) -> Any:
    return next(place for index, place in metadata.storage_data.items() if index.fqn == "bytes")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: setattr(place_of(m), "relative_path", "../x"), "got '../x', expected a plain file of the folder"),
        (lambda m: setattr(place_of(m), "relative_path", "gone"), "gone: cannot be read: No such file"),
        (lambda m: setattr(place_of(m), "transform_descriptors", ["zstd"]), "expected a plain file"),
        (lambda m: setattr(place_of(m), "offset", -1), "Expected `int` >= 0"),
        (lambda m: setattr(chunk_of(m), "sizes", torch.Size([201])), "a part that leads out of"),
        (
            lambda m: setattr(chunk_of(m), "sizes", torch.Size([199])),
            r"got 199 elements in \d+ bytes, expected \[200\]",
        ),
        (lambda m: setattr(chunk_of(m), "sizes", torch.Size([200, 1])), r"got a part \[200, 1\]"),
        (lambda m: setattr(m.state_dict_metadata["bytes"], "chunks", []), "got 0 elements"),
        (lambda m: m.state_dict_metadata["bytes"].__dict__.update(size=torch.Size([1 << 40])), "got 200 elements"),
        (lambda m: m.storage_data.clear(), r"tensor '.*': got no file of its part at \[0"),
        (lambda m: setattr(m, "state_dict_metadata", 3), "Expected `array`, got `int`"),
        (lambda m: m.state_dict_metadata.update(x=1.5), "opcode BINFLOAT is not expected"),
    ],
)
def test_metadata_that_are_not_as_torch_writes_them(change: Callable[[Any], None], said: str, tmp_path: Path) -> None:
    changed(saved(tmp_path), change)
    with pytest.raises(UserError, match=said) as raised:
        distributed_tensors(tmp_path)
    assert str(raised.value).count("\n") == 0


def test_a_tensor_larger_than_the_files_is_not_made(tmp_path: Path) -> None:
    def change(metadata: Any) -> None:
        metadata.state_dict_metadata["bytes"].size = chunk_of(metadata).sizes = torch.Size([1 << 45])

    changed(saved(tmp_path), change)
    with pytest.raises(UserError, match=f"got {1 << 45} elements in "):
        distributed_tensors(tmp_path)


def test_damaged_and_other_files_are_named(tmp_path: Path) -> None:
    whole = (saved(tmp_path) / FILE).read_bytes()
    tensor = distributed_tensors(tmp_path)[("bytes",)]
    (chunk,) = tensor.chunks
    at = whole.index(bytes(range(200)))
    assert chunk.at < at < chunk.at + chunk.nbytes
    where = f"^{tmp_path / FILE}: tensor 'bytes' at byte {chunk.at}: "
    for spoilt, said in (
        (whole[:at] + b"\xff" + whole[at + 1 :], "Bad CRC-32"),
        (whole[: chunk.at + chunk.nbytes - 1], "File is not a zip file"),
        (whole[: chunk.at] + bytes(chunk.nbytes), "File is not a zip file"),
        (whole.replace(b"ByteStorage", b"CharStorage"), r"got another tensor, expected uint8 \[200\]|Bad CRC"),
    ):
        (tmp_path / FILE).write_bytes(spoilt)
        with pytest.raises(UserError, match=where + f".*({said})"):
            tensor.read()
    (tmp_path / FILE).unlink()
    with pytest.raises(UserError, match="cannot be read: No such file"):
        tensor.read()
    (tmp_path / METADATA).write_bytes(b"\x80\x04" + b"\x8c\xff")
    with pytest.raises(UserError, match=r"no metadata of torch\.distributed\.checkpoint that can be read"):
        distributed_tensors(tmp_path)


def test_parts_that_overlap_are_no_tensor(tmp_path: Path) -> None:
    saved(tmp_path, {"a": torch.arange(4), "b": torch.arange(2), "c": torch.arange(2)})

    def change(metadata: Any) -> None:
        places = {index.fqn: place for index, place in metadata.storage_data.items()}
        (chunk,) = metadata.state_dict_metadata["b"].chunks
        metadata.state_dict_metadata["a"].chunks = [chunk, chunk]
        metadata.storage_data = {
            type(i)(i.fqn, i.offset): places["b" if i.fqn == "a" else i.fqn] for i in metadata.storage_data
        }

    changed(tmp_path, change)
    with pytest.raises(UserError, match="tensor 'a': its chunks do not fill it"):
        distributed_tensors(tmp_path)[("a",)].read()


@pytest.mark.parametrize(
    "spoilt", [b"", b".", b"\x80\x04.", b"(.", b"\x85.", b"]a.", b"}\x8c\x01xb.", b"h\x07.", b"t."]
)
def test_what_is_no_pickle(spoilt: bytes) -> None:
    with pytest.raises(ValueError, match=r"pickle|opcode|expected|not enough|sequence"):
        read_pickled(spoilt, ())


def test_every_truncation_and_many_changed_bytes_are_refused_or_harmless(tmp_path: Path) -> None:
    text = (saved(tmp_path, {"model": {"a": torch.ones(2, 3)}}) / METADATA).read_bytes()
    spoilt = [text[:end] for end in range(0, len(text), 3)]
    spoilt += [text[:at] + bytes([(text[at] + 7 * at + 1) % 256]) + text[at + 1 :] for at in range(0, len(text), 2)]
    for other in spoilt:
        (tmp_path / METADATA).write_bytes(other)
        try:
            found = distributed_tensors(tmp_path)
        except UserError:
            continue
        for tensor in found.values():
            assert tensor.nbytes <= 1 << 20, "no more than the files have"


def test_changed_bytes_of_a_tensor_are_refused_or_harmless(tmp_path: Path) -> None:
    expected = torch.arange(12.0).reshape(3, 4)
    text = (saved(tmp_path, {"a": expected}) / FILE).read_bytes()
    tensor, refused = distributed_tensors(tmp_path)[("a",)], 0
    for at in range(0, len(text), 3):
        for mask in (0x01, 0x80, 0xFF):
            (tmp_path / FILE).write_bytes(text[:at] + bytes([text[at] ^ mask]) + text[at + 1 :])
            try:
                assert tensor.read().shape == expected.shape
            except UserError:
                refused += 1
    assert refused > 100
