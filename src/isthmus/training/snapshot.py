"""A stage's state in memory: copied at once into one flat buffer, taken apart by parts, sent in stretches.

A part is a parameter or buffer by its own name, with the optimizer's state of it.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

import msgspec
import torch
from torch import Tensor

from isthmus.accelerators import HOST, DeviceEvent
from isthmus.accelerators.copies import CopyLabel, CopyStream
from isthmus.errors import PeerError, UserError
from isthmus.training.checkpoint import OPTIMIZER
from isthmus.training.file_backed import TensorSpace, disk_folder
from isthmus.training.layout import TensorHeader, check_header, header_of, in_a_row, unpack
from isthmus.training.stored import Sent

SNAPSHOT = CopyLabel("snapshot")  # how its copy is called in a trace
LARGE_BYTES = 1 << 26  # of a state, from which its copy may be worth a file
MOST_HELD = 4  # copies that a device has at once: two of its own state, two of a neighbour's
ALIGNED_BYTES = 64  # where tensors begin in the buffer: any type can be viewed there

MOST_KEPT = 6  # tensors that optimizers may keep of a parameter, the outer one among them
Part = Mapping[str, Tensor]  # tensors of one part, under the names that a checkpoint has


class Snapshot(msgspec.Struct, frozen=True):
    headers: tuple[TensorHeader, ...]
    flat: Tensor  # uint8; each tensor's elements as they would travel, from an aligned place on
    copied: DeviceEvent | None = None  # the event after which `flat` may be read; None where all of it is here
    space: TensorSpace | None = None  # the temporary file that `flat` is a mapping of, from its beginning on

    @property
    def whole(self) -> bool:
        """Return whether all of it is here; never waits."""
        return self.copied is None or self.copied.done()

    def wait(self) -> None:
        if self.copied is not None:
            self.copied.synchronize()

    def tensors(self) -> dict[str, Tensor]:
        """Views of the buffer, with the strides of what was copied."""
        found: dict[str, Tensor] = {}
        for header, at in zip(self.headers, _places(self.headers), strict=True):
            elements = self.flat[at : at + header.nbytes].view(getattr(torch, header.dtype))
            found[header.name] = unpack(elements, header)
        return found

    def sent(self) -> dict[str, Sent]:
        """The tensors to send or to write: those of a file are in memory a piece at a time."""
        if self.space is None:
            return {**self.tensors()}
        places = zip(self.headers, _places(self.headers), strict=True)
        return {header.name: self.space.stored_at(header, at) for header, at in places}


def snapshot(state: Mapping[str, Tensor], way: CopyStream | None = None, *, on_disk: bool = False) -> Snapshot:
    """A copy of the state, in host memory or, if it is large and can be, in a temporary file.

    From an accelerator it goes `way`, behind what the current stream has been given so far: neither the host nor the
    stream waits. What overwrites the state must, by `CopyStream.hold`: a step rarely comes to its update before the
    copy is done. (Rejected: a copy on the accelerator first, since memory for a second state is what it has least of.)
    """
    headers = tuple(header_of(name, t) for name, t in state.items())
    if way is None:
        flat, space = _room(size_bytes(headers), on_disk=on_disk)
        for header, at, tensor in zip(headers, _places(headers), state.values(), strict=True):
            _put(_source(tensor, header), flat, space, at)
        return Snapshot(headers, flat, space=space)
    flat = way.accelerator.host_buffer(size_bytes(headers))
    with way.down(SNAPSHOT, way.accelerator.record()) as trip:
        trip.size_bytes = flat.numel()
        # First what the host writes: afterwards the buffer is the copies'.
        there = [one for one in _targets(headers, flat, state) if one[0].nbytes]
        for header, target, tensor in sorted(there, key=lambda one: one[2].device == way.accelerator.device):
            if tensor.device == way.accelerator.device:
                way.accelerator.used_here(tensor)
            target.copy_(_source(tensor, header), non_blocking=True)
    return Snapshot(headers, flat, trip.done)


def _room(nbytes: int, *, on_disk: bool) -> tuple[Tensor, TensorSpace | None]:
    """Return a buffer of so many bytes; in a file where that is asked for, worth it, and possible."""
    if on_disk and nbytes >= LARGE_BYTES:
        with contextlib.suppress(UserError, OSError):
            space = TensorSpace(disk_folder(), "a copy of the state")
            return space.row(nbytes)[0], space
    return torch.empty(nbytes, dtype=torch.uint8), None


def _put(row: Tensor, flat: Tensor, space: TensorSpace | None, at: int) -> None:
    """Copy a flat tensor to a place of such a buffer; into a file so that its pages are not in memory."""
    if space is not None:
        space.write(row, at)
    else:
        flat[at : at + row.nbytes].view(row.dtype).copy_(row)


def scarce(nbytes: int) -> bool:
    """Return whether memory has no room for all copies of a state of so many bytes that a device may hold."""
    return nbytes >= LARGE_BYTES and HOST.memory().free < MOST_HELD * nbytes


def _targets(
    headers: Sequence[TensorHeader], flat: Tensor, state: Mapping[str, Tensor]
) -> Iterator[tuple[TensorHeader, Tensor, Tensor]]:
    """Each tensor of a state with its header and its place in the buffer."""
    for header, at, tensor in zip(headers, _places(headers), state.values(), strict=True):
        yield header, flat[at : at + header.nbytes].view(getattr(torch, header.dtype)), tensor


def _source(tensor: Tensor, header: TensorHeader) -> Tensor:
    return in_a_row(tensor if header.stride == tuple(tensor.stride()) else tensor.contiguous())


def size_bytes(headers: Sequence[TensorHeader]) -> int:
    return sum(_aligned(h.nbytes) for h in headers)


def _places(headers: Sequence[TensorHeader]) -> list[int]:
    places, at = [], 0
    for header in headers:
        places.append(at)
        at += _aligned(header.nbytes)
    return places


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNED_BYTES) * ALIGNED_BYTES


def part_of(name: str) -> str:
    """The parameter or buffer that a tensor of a state belongs to."""
    return name.removeprefix(OPTIMIZER).rpartition(".")[0] if name.startswith(OPTIMIZER) else name


def by_part(state: Mapping[str, Tensor]) -> dict[str, Part]:
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in state.items():
        found.setdefault(part_of(name), {})[name] = tensor
    return dict(found)


def joined(parts: Collection[Part]) -> dict[str, Tensor]:
    return {name: tensor for part in parts for name, tensor in part.items()}


def check_state(shapes: Mapping[str, tuple[int, ...]], headers: Sequence[TensorHeader]) -> None:
    """PeerError unless these are a state of parts of these shapes: each part's own tensor, once, and the optimizer's,
    which have its shape or none."""
    expected = dict(shapes)
    kept: Counter[str] = Counter()
    names = [h.name for h in headers]
    for header in headers:
        check_header(header)
        part = part_of(header.name)
        if header.name in expected:
            fits = header.shape == expected.pop(header.name)
        else:
            kept[part] += 1
            known = header.name.startswith(OPTIMIZER) and part in shapes and kept[part] <= MOST_KEPT
            fits = known and header.shape in ((), shapes[part])
        if not fits or header.packing is not None:
            raise PeerError(f"sent {header.name!r} of shape {list(header.shape)}, which is not of its stage")
    if expected or len(set(names)) < len(names):
        raise PeerError(f"sent no {min(expected)!r}, which is of its stage" if expected else "sent a tensor twice")


STRETCH = "stretch"  # name of a stretch in the header of its message


def stretches(flat: Tensor, most_bytes: int) -> Iterator[tuple[int, Tensor, tuple[TensorHeader, ...]]]:
    """The buffer in pieces of at most `most_bytes`: offset, bytes, and the headers of their message."""
    for offset in range(0, flat.numel(), most_bytes):
        stretch = flat[offset : offset + most_bytes]
        yield offset, stretch, (header_of(STRETCH, stretch),)


def stretch_bytes(headers: Sequence[TensorHeader]) -> int | None:
    """Size of the stretch in a message with these headers; None unless it carries one row of bytes and no more."""
    if len(headers) != 1:
        return None
    header = headers[0]
    plain = header.dtype == "uint8" and len(header.shape) == 1 and header.packing is None
    return header.shape[0] if plain else None


class IncomingSnapshot:
    """A snapshot of which a part has arrived."""

    def __init__(self, headers: tuple[TensorHeader, ...]) -> None:
        """Allocates its buffer: check the headers first."""
        nbytes = size_bytes(headers)
        flat, space = _room(nbytes, on_disk=scarce(nbytes))
        self.snapshot = Snapshot(headers, flat, space=space)
        self._received_bytes = 0

    @property
    def whole(self) -> bool:
        return self._received_bytes == self.snapshot.flat.numel()

    def expects(self, offset: int, headers: Sequence[TensorHeader]) -> bool:
        """Return whether a message with this offset and these headers carries the next stretch."""
        size = stretch_bytes(headers)
        within = size is not None and self._received_bytes + size <= self.snapshot.flat.numel()
        return within and offset == self._received_bytes

    def add(self, stretch: Tensor) -> None:
        """The next stretch: uint8 of shape (bytes,), as `expects` said."""
        _put(stretch, self.snapshot.flat, self.snapshot.space, self._received_bytes)
        self._received_bytes += stretch.numel()
