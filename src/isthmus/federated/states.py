"""What clients keep between rounds: one safetensors file per client and round, in folders by hash.

    states/3fa/17-000012.safetensors      client 17, as it is after round 12

A file is named by the round that wrote it, so what an open round writes never touches what the last one left: to
abort a round is to forget it, and the coordinator's number per client says which file counts. So a file needs no
listing, and no folder is large: 4,096 of them hold 1e6 clients with 250 files each.

States of clients come and go with every round, so a file that nobody needs any more is renamed and written over: to
remove one and to make another takes twice as long, and the kernel would have to find the memory anew. Written is
straight from the tensors to the kernel, which brings it to the disk behind; large states are mapped, not copied.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load, load_file
from torch import Tensor

from isthmus.errors import UserError
from isthmus.training.layout import bytes_of

NEVER = -1
"""The round of a client that has kept nothing yet."""
MAPPED_BYTES = 1 << 20
"""From here on a file is mapped: smaller ones are read sooner than mapped."""
_DTYPES = {
    torch.float32: "F32", torch.float64: "F64", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


class StateStore:
    """The states under one folder, for all executors of a machine: a client is at one of them at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)
        self._free: list[str] = []
        self._headers: dict[tuple[tuple[str, torch.dtype, torch.Size], ...], bytes] = {}

    def path(self, client: int, round_: int) -> Path:
        return Path(self._name(client, round_))

    def _name(self, client: int, round_: int) -> str:
        """No Path: for states of a few kilobytes, to make one takes as long as to read the file."""
        digest = hashlib.blake2b(client.to_bytes(8, "little"), digest_size=2).hexdigest()
        return f"{self._folder}/{digest[:3]}/{client}-{round_:06d}.safetensors"

    def read(self, client: int, round_: int) -> dict[str, Tensor]:
        """The state that the client had after a round. UserError when it is not there or not whole."""
        name = self._name(client, round_)
        try:
            if os.stat(name).st_size >= MAPPED_BYTES:
                return load_file(name)
            with open(name, "rb", buffering=0) as file:
                return load(file.read())
        except FileNotFoundError:
            raise UserError(f"state {name}: missing: the folder is of another run") from None
        except (OSError, SafetensorError) as e:
            raise UserError(f"state {name}: cannot be read: {e}") from None

    def expect(self, client: int, round_: int) -> None:
        """Have the kernel bring the state from the disk while something else is computed. Nothing happens on errors:
        `read` will tell."""
        with contextlib.suppress(OSError):
            file = os.open(self._name(client, round_), os.O_RDONLY)
            try:
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(file)

    def write(self, client: int, round_: int, state: Mapping[str, Tensor]) -> int:
        """Keep a state; returns its bytes. UserError for a state that is no dict of tensors, or a full disk."""
        for name, value in state.items():
            if not isinstance(value, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]  a user's algorithm
                raise UserError(
                    f"algorithm: state {name!r} of client {client}: got {type(value).__name__}, expected a tensor"
                )
        name = self._name(client, round_)
        parts = [self._header(client, state), *(bytes_of(_flat(value)) for value in state.values())]
        try:
            self._write(name, parts)
        except OSError as e:
            raise UserError(f"state {name}: cannot be written: {e.strerror or e}") from None
        return sum(len(part) for part in parts)

    def _write(self, name: str, parts: Sequence[bytes | memoryview]) -> None:
        over = self._free.pop() if self._free else None
        try:
            file = self._open(name, over)
        except FileNotFoundError:
            os.makedirs(os.path.dirname(name), exist_ok=True)
            over = over if over is not None and os.path.exists(over) else None
            file = self._open(name, over)
        try:
            left = [memoryview(part) for part in parts if len(part)]
            while left:
                written = os.writev(file, left)
                while left and written >= len(left[0]):
                    written -= len(left.pop(0))
                if written:
                    left[0] = left[0][written:]
            if over is not None and os.fstat(file).st_size != (size := sum(len(part) for part in parts)):
                os.ftruncate(file, size)
        finally:
            os.close(file)

    def _open(self, name: str, over: str | None) -> int:
        if over is None:
            return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.rename(over, name)
        return os.open(name, os.O_WRONLY)

    def _header(self, client: int, state: Mapping[str, Tensor]) -> bytes:
        """All clients' states look alike, mostly."""
        form = tuple((name, value.dtype, value.shape) for name, value in state.items())
        if (known := self._headers.get(form)) is None:
            known = self._headers[form] = _header(client, state)
        return known

    def retire(self, entries: Iterable[tuple[int, int]]) -> None:
        """The states of (client, round) are of no use any more: their files are written over."""
        self._free += [self._name(client, round_) for client, round_ in entries]

    def drop(self, entries: Iterable[tuple[int, int]]) -> None:
        """Remove the states of (client, round), those that are there."""
        for client, round_ in entries:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._name(client, round_))

    def sweep(self, current: Mapping[int, int]) -> int:
        """Of these clients keep only the state of the given round; returns how many others were removed.

        For the clients of the rounds around a crash: all others have nothing to be removed.
        """
        removed = 0
        for client, round_ in current.items():
            kept = self.path(client, round_)
            for path in kept.parent.glob(f"{client}-*.safetensors"):
                if path != kept:
                    path.unlink()
                    removed += 1
        return removed


def _flat(value: Tensor) -> Tensor:
    return value.detach().resolve_neg().contiguous().view(-1)


def _header(client: int, state: Mapping[str, Tensor]) -> bytes:
    """A safetensors file up to its data. The library's own writers copy the data, or take ten times as long."""
    at, entries = 0, dict[str, dict[str, object]]()
    for name, value in state.items():
        if value.dtype not in _DTYPES:
            raise UserError(f"algorithm: state {name!r} of client {client}: got {value.dtype}, expected plain numbers")
        entries[name] = {
            "dtype": _DTYPES[value.dtype],
            "shape": list(value.shape),
            "data_offsets": [at, at + value.nbytes],
        }
        at += value.nbytes
    text = msgspec.json.encode(entries)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
