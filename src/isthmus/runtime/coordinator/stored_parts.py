"""Parts of checkpoints that devices write to the run's store: where, and whether they are what the devices say.

The coordinator never reads a part whole. It looks at the file's size and version, reads the header and some of the
tensors, drawn at random, and compares their digests. Each tensor's digest is compared when it is read.
"""

from __future__ import annotations

import hashlib
import random
import secrets
import time
from collections.abc import Sequence

from isthmus.errors import UserError
from isthmus.protocol.run_messages import FileTensor, WrittenPart
from isthmus.run_files import checkpoint_file
from isthmus.runtime.messages.assignment import StorePlace
from isthmus.stores import RemoteStoreError, StoreFile
from isthmus.training.layout import TensorHeader, row_stride
from isthmus.training.stored import file_head, other_bytes

SAMPLE_BYTES = 1 << 16  # of tensors that are read of each part: small ones, all of a small model's
TRIES, WAIT_S = 3, 1.0  # where the store does not answer the coordinator


class StoredParts:
    """The parts of one run."""

    def __init__(self, url: str) -> None:
        """`url` of the run's store, empty where it has none for devices."""
        self._url = url
        self._token = ""
        self.opened = bool(url)  # whether devices may write their parts to the store now

    def begin(self) -> None:
        """A plan epoch begins. Its files have names of their own: what is still written under a former one harms
        nothing."""
        self._token, self.opened = secrets.token_hex(4), bool(self._url)

    def place(self, part: str, prefix: str) -> StorePlace | None:
        return StorePlace(url=self._url, name=self.name(part), prefix=prefix) if self._url else None

    def name(self, part: str) -> str:
        """Return the name of a part's file."""
        return f"{part}.{self._token}.safetensors"

    def doubt(self, step: int, part: tuple[str, str], written: WrittenPart) -> str:
        """Return why a device's part is not what it says; empty if it is. Takes some requests to the store."""
        (name, prefix), file = part, written.file
        expected = checkpoint_file(step, self.name(name))
        if (file.model, file.file) != (self._url, expected):
            return f"wrote {file.model}/{file.file}, expected {self._url}/{expected}"
        for left in reversed(range(TRIES)):
            try:
                return _doubt_of(written, prefix)
            except RemoteStoreError as e:
                if not left:
                    return f"its part cannot be looked at: {e}"
                time.sleep(WAIT_S)
        raise AssertionError("the last try returns")


def written_headers(written: WrittenPart) -> list[TensorHeader]:
    """Headers as they would come with the report."""
    return [TensorHeader(t.name, t.dtype, t.shape, row_stride(t.shape)) for t in written.file.tensors]


def _doubt_of(written: WrittenPart, prefix: str) -> str:
    file = written.file
    url = f"{file.model}/{file.file}"
    try:
        head, places = file_head(TensorHeader(t.key, h.dtype, h.shape, h.stride) for t, h in _paired(written))
    except UserError as e:
        return f"{url}: {e}"
    sizes = {t.key: h.nbytes for t, h in _paired(written)}
    named = all(t.key == f"{prefix}{t.name}" and t.offset == places[t.key] for t in file.tensors)
    if not named or file.size != len(head) + sum(sizes.values()):
        return f"{url}: of {file.size} bytes, which is not what its tensors take"
    there = StoreFile.found(file.model, file.file)
    if there is None:
        return f"says that it wrote {url}, which the store has not"
    if (there.size, there.version) != (file.size, file.version):
        said = f"{file.size} bytes, {file.version}"
        return f"says that it wrote {url} of {said}, and the store has {there.size} bytes, {there.version}"
    if b"".join(there.pieces(0, len(head))) != head:
        return f"{url}: its header is not that of the tensors"
    for tensor in _sample(file.tensors, sizes):
        found = hashlib.sha256()
        for piece in there.pieces(tensor.offset, tensor.offset + sizes[tensor.key]):
            found.update(piece)
        if found.hexdigest() != tensor.sha256:
            return f"{url}: {other_bytes(tensor.key)}"
    return ""


def _paired(written: WrittenPart) -> list[tuple[FileTensor, TensorHeader]]:
    return list(zip(written.file.tensors, written_headers(written), strict=True))


def _sample(tensors: Sequence[FileTensor], sizes: dict[str, int]) -> list[FileTensor]:
    """Return tensors drawn at random, as many as `SAMPLE_BYTES` have room for."""
    left, found = SAMPLE_BYTES, list[FileTensor]()
    for tensor in random.sample(tensors, len(tensors)):
        if 0 < sizes[tensor.key] <= left:
            left -= sizes[tensor.key]
            found.append(tensor)
    return found
