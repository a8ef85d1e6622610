"""Copies between the device and the host.

One that does not wait goes between the device and a host buffer. It is put off until something that must come after it
needs it: early readers of the host buffer find NaN (all bits set), and a host buffer that is written before its copy
is done is found out.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from isthmus_testing.emulated_accelerator.devices import CheckedDevice, device
from isthmus_testing.emulated_accelerator.misuse import HostBufferInUse, Misuse
from isthmus_testing.emulated_accelerator.order import HOST_ORDER, LOCK, Clock, DeviceAllocation, Point, join, span_of
from isthmus_testing.emulated_accelerator.tensors import UNWRITTEN, allocation_of, as_host, host_buffer_of, is_checked


class _Deferred:
    """A copy that has been queued, until the host knows that it is done."""

    def __init__(self, point: Point, buffer: Tensor, memory: Tensor, used: tuple[DeviceAllocation, ...]) -> None:
        self.point = point
        self.buffer = buffer
        self.memory = memory
        self._used = used
        self.landed = False
        self._found = False
        for allocation in used:
            allocation.pending.append(self)

    def land(self) -> None:
        if self.landed:
            return
        self.landed = True
        for allocation in self._used:
            allocation.pending.remove(self)
        self.transfer()

    def transfer(self) -> None:
        raise NotImplementedError

    def finish(self) -> None:
        """The host knows that it is done."""
        self.land()

    def expect(self, expected: Tensor, doing: str) -> None:
        if not self._found and not torch.equal(_bits(self.buffer), expected):
            self._found = True
            raise HostBufferInUse(
                f"the host wrote to a host buffer that {self.point} still {doing}: expected a wait for its event first"
            )


class _Up(_Deferred):
    def __init__(self, point: Point, buffer: Tensor, memory: Tensor, used: tuple[DeviceAllocation, ...]) -> None:
        super().__init__(point, buffer, memory, used)
        self._sent = _bits(buffer).clone()
        self._written = used[0].written

    def transfer(self) -> None:
        self.expect(self._sent, "reads")
        self.memory.copy_(self.buffer)

    def finish(self) -> None:
        super().finish()
        if self._used[0].written is self._written:  # no copy from the device has come after it
            self.expect(self._sent, "reads")


class _Down(_Deferred):
    """`memory` keeps the values that it had when the copy was queued. A later write without an order shows as a
    difference."""

    def __init__(self, point: Point, buffer: Tensor, memory: Tensor, used: tuple[DeviceAllocation, ...]) -> None:
        super().__init__(point, buffer, memory.to(buffer.dtype, copy=True), used)
        bits = torch.full((buffer.numel() * buffer.element_size(),), UNWRITTEN, dtype=torch.uint8)
        buffer.copy_(bits.view(buffer.dtype).view(buffer.shape))
        self._poison = _bits(buffer).clone()

    def transfer(self) -> None:
        self.expect(self._poison, "writes")
        self.buffer.copy_(self.memory)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


_deferred: list[_Deferred] = []


def forget() -> None:
    """Forget the copies of devices that are no longer there."""
    _deferred.clear()


def host_waits(clock: Clock) -> None:
    """The host has waited for what `clock` says. The caller holds the lock."""
    HOST_ORDER.reach(clock)
    known = HOST_ORDER.clock
    done = [c for c in _deferred if known.get(c.point.stream, 0) >= c.point.tick]
    _deferred[:] = [c for c in _deferred if known.get(c.point.stream, 0) < c.point.tick]
    errors: list[Misuse] = []
    for copy in done:
        try:
            copy.finish()
        except Misuse as e:
            errors.append(e)
    if errors:
        raise errors[0]


def copy_between(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """aten::_copy_from: at least one of them is of a device."""
    streams = {device(t.device.index).current for t in (source, target) if is_checked(t)}
    with contextlib.ExitStack() as stack:
        for stream in sorted(streams, key=lambda s: s.number):
            stack.enter_context(stream.working)
        if not is_checked(source):
            _up(source, target, non_blocking)
        elif not is_checked(target):
            _down(source, target, non_blocking)
        else:
            _across(source, target)
    return target


def _up(source: Tensor, target: Tensor, non_blocking: bool) -> None:
    on = device(target.device.index)
    memory = as_host(target)
    with LOCK:
        buffer = host_buffer_of(source)
        point = on.launch("copy to the device", kernel=False)
        stream = on.current
        allocation_of(target).access(stream, point, write=True, span=span_of(target))
        if buffer is not None:
            buffer.access(stream, point, write=False)
        if non_blocking and buffer is not None and source.shape == target.shape:
            _explicit(on, source)
            _deferred.append(_Up(point, source.detach(), memory, (buffer, allocation_of(target))))
            return
    memory.copy_(source)
    _implicit(on, "to the device", source)


def _down(source: Tensor, target: Tensor, non_blocking: bool) -> None:
    on = device(source.device.index)
    memory = as_host(source)
    with LOCK:
        buffer = host_buffer_of(target)
        point = on.launch("copy to the host", kernel=False)
        stream = on.current
        allocation_of(source).access(stream, point, write=False, span=span_of(source))
        if buffer is not None:
            buffer.access(stream, point, write=True)
        if non_blocking and buffer is not None and source.shape == target.shape:
            _explicit(on, target)
            _deferred.append(_Down(point, target.detach(), memory, (buffer,)))
            return
    target.copy_(memory)
    _implicit(on, "to the host", target)


def _explicit(on: CheckedDevice, what: Tensor) -> None:
    on.counters.add("copy")
    on.counters.add("copied bytes", what.numel() * what.element_size())


def _implicit(on: CheckedDevice, direction: str, what: Tensor) -> None:
    """Hardware would wait for the whole stream."""
    with LOCK:
        size = what.numel() * what.element_size()
        host_waits(on.current.clock)
        on.counters.wait("implicit copy", f"{size} bytes {direction}", size)
        on.counters.wait("host synchronization", f"copy {direction}")


def _across(source: Tensor, target: Tensor) -> None:
    """On one device an operator like others; between two, both wait for each other."""
    here, there = device(source.device.index), device(target.device.index)
    with LOCK:
        point = here.launch("copy_", kernel=True)
        if there is not here:
            there.check_alive()
            there.current.catch_up()
            join(here.current.clock, there.current.clock)
            join(there.current.clock, here.current.clock)
            here.counters.wait("implicit copy", f"to device {there.index}", source.numel() * source.element_size())
        allocation_of(source).access(here.current, point, write=False, span=span_of(source))
        allocation_of(target).access(here.current, point, write=True, span=span_of(target))
    as_host(target).copy_(as_host(source))
