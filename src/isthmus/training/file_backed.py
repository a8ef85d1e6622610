"""Large tensors in a temporary file: a module that is built so is never whole in memory, as the system may write its
pages to the file and drop them."""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode

from isthmus.errors import UserError
from isthmus.training.draws import DrawRecorder
from isthmus.training.layout import TensorHeader, bytes_of, header_of, in_a_row
from isthmus.training.stored import PIECE_BYTES, StoredTensor

LARGE_BYTES = 1 << 20


class TensorSpace:
    """A temporary file in a folder, or in the nearest one above that exists. It is gone with this object, and with the
    process: on Linux it has no name."""

    def __init__(self, folder: Path, what: str = "first weights") -> None:
        """`what` it is for, in words."""
        self._what = what
        there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
        nameless = sys.platform == "linux"
        self._file = tempfile.TemporaryFile(dir=there) if nameless else tempfile.NamedTemporaryFile(dir=there)  # noqa: SIM115
        number = self._file.fileno()
        self.path = Path(f"/proc/{os.getpid()}/fd/{number}" if nameless else self._file.name)
        self._where = there
        self._size = 0
        self._places: dict[int, tuple[int, UntypedStorage]] = {}  # where storages are in the file, by their addresses

    def allocated(self, like: UntypedStorage) -> UntypedStorage:
        """Return as many bytes of the file, mapped."""
        mapped, at = self.row(int(like.nbytes()))
        found = mapped.untyped_storage()
        self._places[found.data_ptr()] = at, found
        return found

    def stored(self, name: str, tensor: Tensor) -> StoredTensor:
        """The tensor in the file, as it travels: it is written there unless it was made there."""
        row = in_a_row(tensor)
        place = self._place(row.untyped_storage()) if row.numel() else 0
        offset = place + int(row.storage_offset()) * row.itemsize
        return StoredTensor(header_of(name, tensor), self.path, offset, name)

    def row(self, nbytes: int) -> tuple[Tensor, int]:
        """Return so many bytes of the file, mapped, and where they begin in it. In memory are those that are read."""
        at = self._reserve(nbytes)
        return torch.frombuffer(mmap.mmap(self._file.fileno(), nbytes, offset=at), dtype=torch.uint8), at

    def write(self, row: Tensor, at: int) -> None:
        """Write a flat tensor at a place of the file."""
        whole = bytes_of(row)
        for start in range(0, whole.nbytes, PIECE_BYTES):
            os.pwrite(self._file.fileno(), whole[start : start + PIECE_BYTES], at + start)

    def stored_at(self, header: TensorHeader, at: int) -> StoredTensor:
        """The tensor whose elements are at a place of the file, which stays as long as this."""
        return _InSpace(header, self.path, at, header.name, space=self)

    def holds(self, storage: UntypedStorage) -> bool:
        return storage.data_ptr() in self._places

    def _place(self, storage: UntypedStorage) -> int:
        if not self.holds(storage):
            at = self._reserve(int(storage.nbytes()))
            self.write(torch.empty(0, dtype=torch.uint8).set_(storage), at)  # pyright: ignore[reportArgumentType]
            self._places[storage.data_ptr()] = at, storage
        return self._places[storage.data_ptr()][0]

    def _reserve(self, nbytes: int) -> int:
        at = -(-self._size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        self._size = at + nbytes
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._file.fileno(), at, nbytes)
            else:
                os.ftruncate(self._file.fileno(), self._size)
        except OSError as e:
            what = f"cannot write {self._size:,} bytes of {self._what}"
            raise UserError(f"{self._where}: {what}: {e.strerror or e}") from None
        return at


class _InSpace(StoredTensor, frozen=True, kw_only=True):
    space: TensorSpace


def disk_folder() -> Path:
    """Return where large temporary files go: where TMPDIR says, else on a disk, which `/tmp` often is not."""
    chosen, usual = os.environ.get("TMPDIR"), Path("/var/tmp")
    return usual if not chosen and os.access(usual, os.W_OK) else Path(tempfile.gettempdir())


class FileBacked(TorchDispatchMode):
    """While active, large tensors that are made on the CPU are in the file. Their values, strides and the order of
    random draws are what they would be: an operator's result is moved there, and at most that one is in memory.
    `recorded` are the draws."""

    def __init__(self, space: TensorSpace) -> None:
        super().__init__()
        self._space = space
        self.recorded = DrawRecorder()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, so nothing must be kept from it: torch would import its compiler to do so, which
        takes a second of a core at each start of a run."""
        return False

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,  # pyright: ignore
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        made = self._moved(func, func(*args, **(kwargs or {})))
        self.recorded.see(func, args, kwargs or {}, made)
        return made

    def _moved(self, func: torch._ops.OpOverload, made: object) -> object:  # pyright: ignore
        returns = func._schema.returns  # pyright: ignore
        if type(made) is not Tensor or made.device.type != "cpu" or made.layout != torch.strided:
            return made
        before = made.untyped_storage()
        if returns[0].alias_info is not None or before.nbytes() < LARGE_BYTES or self._space.holds(before):
            return made
        after = self._space.allocated(before)
        if not func._schema.name.removeprefix("aten::").startswith(("empty", "new_empty")):  # pyright: ignore
            after.copy_(before)
        found = torch.empty(0, dtype=made.dtype)
        return found.set_(after, made.storage_offset(), made.shape, made.stride())  # pyright: ignore
