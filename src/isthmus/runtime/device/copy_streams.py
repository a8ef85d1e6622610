"""Tensors that cross a link are copied down from the accelerator before they leave, and up when they have arrived."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Literal

from torch import Tensor

from isthmus.accelerators import Accelerator, DeviceEvent
from isthmus.accelerators.accelerator import DeviceClock
from isthmus.accelerators.copies import CopyBatch, CopyLabel, CopyStream, Fill
from isthmus.runtime.messages.all_messages import AnyMessage
from isthmus.runtime.transport.lanes import PackedMessage, Packer
from isthmus.trace import Span
from isthmus.training.layout import TensorHeader, bytes_of, dtype_of, unpack

Encode = Callable[[], tuple[AnyMessage, list[Tensor]]]
"""A message, and what is sent of each of its tensors: flat, on the accelerator."""


class CopyStreams:
    """Makes the ways of a device's stage, whose trips are spans of a trace."""

    def __init__(
        self, accelerator: Accelerator, clock: DeviceClock | None, device: str, record: Callable[[Span], None]
    ):
        """`clock` is None where nothing is traced."""
        self.accelerator = accelerator
        self._clock = clock
        self._device = device
        self._record = record

    def way(self, direction: Literal["down", "up"], other: str = "") -> CopyStream:
        """`other` is the device at the other end of the link that it serves."""

        def record_trip(trip: CopyBatch, start_s: float, end_s: float) -> None:
            name, item, micro_batch = trip.cargo
            self._record(
                Span(
                    device=self._device,
                    track=direction,
                    name=name,
                    start_s=start_s,
                    end_s=end_s,
                    step=item,
                    micro_batch=micro_batch,
                    size_bytes=trip.size_bytes,
                    other=other,
                )
            )

        return CopyStream(self.accelerator, self._clock, record_trip)


class LinkCopyStreams:
    def __init__(self, ways: CopyStreams, other: str) -> None:
        self._accelerator = ways.accelerator
        self.down = ways.way("down", other)
        self.up = ways.way("up", other)
        self.landed: DeviceEvent | None = None  # behind what landed last; of the receiving thread

    def lowering(self, cargo: CopyLabel, tensors: Sequence[Tensor], encode: Encode) -> Packer:
        """A packer for what the current stream has computed once it has done what it was given so far."""
        return partial(self._lowered, cargo, tensors, encode, self._accelerator.record())

    def _lowered(
        self, cargo: CopyLabel, tensors: Sequence[Tensor], encode: Encode, computed: DeviceEvent
    ) -> PackedMessage:
        with self.down.down(cargo, computed) as trip:
            for tensor in tensors:
                self._accelerator.used_here(tensor)
            message, flats = encode()
            buffers = [trip.down(flat) for flat in flats]
        trip.done.synchronize()
        self.down.tell()
        return PackedMessage(message, [bytes_of(buffer) for buffer in buffers], trip.release)

    def landing(self) -> AbstractContextManager[object]:
        """Inside of it, the receiving thread's work is queued behind what landed."""
        return self.up.on()

    def land(self, cargo: CopyLabel, headers: Sequence[TensorHeader], fill: Fill) -> list[Tensor]:
        """Tensors on the accelerator, for who waits for `landed`."""
        with self.up.up(cargo) as trip:
            found: list[Tensor] = []
            for header in headers:
                flat = trip.up(header.nbytes, fill)
                found.append(unpack(flat if header.packing is not None else flat.view(dtype_of(header)), header))
        self.landed = trip.done
        return found
