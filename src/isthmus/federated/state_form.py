"""The form of a client's state, in memory and on disk: the names, types and shapes that `init_client` gives.

All clients' states have one form, so a place on disk has a size, and states of many clients are read and written as
one.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from isthmus.errors import UserError

_DTYPES = {
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_CLIENT, _ROUND, _SHA256 = b"0" * 12, b"0" * 9, b"0" * 64
"""Room for these in a header: with it, headers of a form are of one length."""


class _Part(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]
    at: int  # in bytes, from the beginning of the state's own

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


class StateForm:
    """Names, shapes and types of a state such as `like`; `len` is the size of its header in bytes. Raises UserError for
    tensors that a file cannot hold.

    A state is laid out as a safetensors file, with the client, the round and a digest in its metadata.
    """

    def __init__(self, like: Mapping[str, Tensor]) -> None:
        self._parts: dict[str, _Part] = {}
        at, entries = 0, dict[str, dict[str, object]]()
        # Of wide types first: numbers lie where the processor wants them.
        for name, value in sorted(like.items(), key=lambda entry: -_checked(entry[0], entry[1]).dtype.itemsize):
            part = self._parts[name] = _Part(value.dtype, tuple(value.shape), at)
            offsets = [at, at + part.size_bytes]
            entries[name] = {"dtype": _DTYPES[part.dtype], "shape": list(part.shape), "data_offsets": offsets}
            at += part.size_bytes
        metadata = {"client": _CLIENT.decode(), "round": _ROUND.decode(), "sha256": _SHA256.decode()}
        text = msgspec.json.encode({"__metadata__": metadata, **entries})
        text += b" " * (-len(text) % 8)
        header = len(text).to_bytes(8, "little") + text
        client = header.index(_CLIENT)
        round_ = header.index(_ROUND, client + len(_CLIENT))
        self._digest_at = header.index(_SHA256, round_ + len(_ROUND))
        self._lead = header[:client]
        self._between = header[client + len(_CLIENT) : round_]
        self._before_digest = header[round_ + len(_ROUND) : self._digest_at]
        self._tail = header[self._digest_at + len(_SHA256) :]
        self._length = len(header)
        self.size_bytes = self._length + at  # bytes of a whole state on disk

    def __len__(self) -> int:
        return self._length

    @property
    def names(self) -> Sequence[str]:
        return list(self._parts)

    def _opening(self, client: int, round_: int) -> bytes:
        """A header up to its digest."""
        return b"%b%012d%b%09d%b" % (self._lead, client, self._between, round_, self._before_digest)

    def _digest(self, opening: bytes, state: NDArray[np.uint8]) -> bytes:
        """Over who it is of, and the tensors."""
        digest = hashlib.sha256(opening)
        digest.update(state[self._length : self.size_bytes].data)
        return digest.hexdigest().encode()

    def is_of(self, client: int, state: NDArray[np.uint8], round_: int | None = None) -> bool:
        """Return whether a state, uint8 [bytes], is of this form and client, and of a round where one is given."""
        header = state[: self._length].tobytes()
        begin = len(self._lead) + len(_CLIENT) + len(self._between)
        digits = header[begin : begin + len(_ROUND)]
        if not digits.isdigit() or (round_ is not None and int(digits) != round_):
            return False
        opening = self._opening(client, int(digits))
        return header.startswith(opening) and header.endswith(self._tail)

    def is_whole(self, state: NDArray[np.uint8]) -> bool:
        """Return whether every byte of a state, uint8 [bytes], is as it was signed."""
        opening, digest = state[: self._digest_at].tobytes(), self._digest_at + len(_SHA256)
        return state[self._digest_at : digest].tobytes() == self._digest(opening, state)

    def views(self, memory: Tensor) -> dict[str, Tensor]:
        """The tensors [states, ...] in the memory of states, uint8 [states, bytes]."""
        found: dict[str, Tensor] = {}
        for name, part in self._parts.items():
            begin = self._length + part.at
            numbers = memory[:, begin : begin + part.size_bytes].view(part.dtype)
            found[name] = numbers.view(len(memory), *part.shape)
        return found

    def fill(
        self, views: Mapping[str, Tensor], rows: slice, clients: Sequence[int], states: Mapping[str, Tensor]
    ) -> None:
        """Copy the clients' states, stacked, to rows of a memory whose tensors are `views`. UserError for states of
        another form."""
        if states.keys() != self._parts.keys():
            raise self._other(clients[0], states)
        for name, part in self._parts.items():
            value, shape = states[name], (len(clients), *part.shape)
            if not isinstance(value, Tensor) or value.dtype != part.dtype or value.shape != shape:  # pyright: ignore[reportUnnecessaryIsInstance]  a user's algorithm
                raise self._other(clients[0], states)
            if value.layout is not torch.strided:
                text = f"state {name!r} of client {clients[0]}"
                raise UserError(f"algorithm: {text}: got {value.layout}, expected strided")
            views[name][rows].copy_(value.detach())

    def sign(self, memory: NDArray[np.uint8], clients: Sequence[int], round_: int) -> None:
        """Make whole states on disk of the tensors in memory, uint8 [states, bytes]."""
        memory[:, self.size_bytes :] = 0
        for client, state in zip(clients, memory, strict=True):
            opening = self._opening(client, round_)
            header = opening + self._digest(opening, state) + self._tail
            state[: self._length] = np.frombuffer(header, dtype=np.uint8)

    def _other(self, client: int, states: Mapping[str, Tensor]) -> UserError:
        for name, value in states.items():
            if not isinstance(value, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]  a user's algorithm
                what = f"state {name!r} of client {client}: got {type(value).__name__}"
                return UserError(f"algorithm: {what}, expected a tensor")
        got = {name: _Part(value.dtype, tuple(value.shape[1:]), 0) for name, value in states.items()}
        text, expected = (
            ", ".join(f"{name} {part}" for name, part in sorted(parts.items())) or "nothing"
            for parts in (got, self._parts)
        )
        what = f"state of client {client}: got {text}, expected {expected}, as init_client gives"
        return UserError(f"algorithm: {what}")


def _checked(name: str, value: Tensor) -> Tensor:
    if not isinstance(value, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]  a user's algorithm
        raise UserError(f"algorithm: init_client's {name!r}: got {type(value).__name__}, expected a tensor")
    if value.dtype not in _DTYPES:
        raise UserError(f"algorithm: init_client's {name!r}: got {value.dtype}, expected plain numbers")
    if value.layout is not torch.strided:
        raise UserError(f"algorithm: init_client's {name!r}: got {value.layout}, expected strided")
    return value
