"""Tensors of the device over memory of the host, and back."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from isthmus.errors import InternalError
from isthmus_testing.emulated_accelerator.devices import KIND, CheckedDevice, device
from isthmus_testing.emulated_accelerator.internals import ON_CPU, first_tensor, storage_at
from isthmus_testing.emulated_accelerator.order import LOCK, DeviceAllocation, Point

_aten = torch.ops.aten
UNWRITTEN = 0xFF  # a byte of memory that holds nothing yet: floating-point numbers of such bytes are NaN
_allocations: dict[int, DeviceAllocation] = {}  # allocations of tensors, by address
_host_buffers: dict[int, DeviceAllocation] = {}
_seeds: dict[tuple[int, torch.dtype], Tensor] = {}


def is_checked(value: object) -> bool:
    return isinstance(value, Tensor) and value.device.type == KIND


def allocation_of(tensor: Tensor) -> DeviceAllocation:
    return _allocations[tensor.untyped_storage().data_ptr()]


def host_buffer_of(tensor: Tensor) -> DeviceAllocation | None:
    """The host buffer whose memory the tensor uses; None for other memory."""
    address = tensor.data_ptr()
    for start, found in _host_buffers.copy().items():  # finalizers of other threads and of this one remove buffers
        if start <= address < start + found.size:
            return found
    return None


def host_buffer(size: int) -> Tensor:
    tensor = torch.full((max(size, 1),), UNWRITTEN, dtype=torch.uint8)
    storage = tensor.untyped_storage()
    _host_buffers[storage.data_ptr()] = DeviceAllocation(size, None)
    weakref.finalize(storage, _host_buffers.pop, storage.data_ptr(), None).atexit = False
    return tensor[:size]


def as_host(tensor: Tensor) -> Tensor:
    """The same memory as a tensor of the CPU."""
    return _over(allocation_of(tensor), tensor)


def _over(allocation: DeviceAllocation, like: Tensor) -> Tensor:
    storage = cast(torch.UntypedStorage, allocation.storage)
    bare = torch.empty(0, dtype=like.dtype)
    return bare.set_(storage, like.storage_offset(), like.shape, like.stride())  # pyright: ignore[reportArgumentType]


def as_device(host: Tensor, on: CheckedDevice, point: Point | None) -> Tensor:
    """A tensor of the device in the memory of `host`, which nobody else keeps: `point` writes it."""
    storage = host.untyped_storage()
    address = storage.data_ptr()
    if address not in _allocations:
        if storage.nbytes() == 0:
            storage = torch.empty(1, dtype=torch.uint8).untyped_storage()
            address = storage.data_ptr()
        with LOCK:
            owner, block = on.allocate(storage.nbytes())
        return _placed(_owned(storage, on, DeviceAllocation(storage.nbytes(), storage, owner, block), point), host)
    raise InternalError("an operator's result lies in memory that is in use")


def _owned(
    storage: torch.UntypedStorage, on: CheckedDevice, allocation: DeviceAllocation, point: Point | None
) -> torch.UntypedStorage:
    address = storage.data_ptr()
    allocation.made(point)
    made = storage_at(address, storage.nbytes(), torch.device(KIND, on.index))
    _allocations[address] = allocation
    weakref.finalize(made, _drop, address, on).atexit = False
    return made


def _drop(address: int, on: CheckedDevice) -> None:
    allocation = _allocations.pop(address)
    allocation.storage = None
    on.dropped.append(allocation)


def _placed(storage: torch.UntypedStorage, like: Tensor) -> Tensor:
    bare = _aten.as_strided.default.redispatch(ON_CPU, _seed(storage.device.index, like.dtype), [0], [1])
    return rebind(bare, storage, int(like.storage_offset()), like.shape, like.stride())


def view_of(base: Tensor, like: Tensor) -> Tensor:
    """Return the view of `base` that `like` is of the host's memory."""
    return _placed(base.untyped_storage(), like)


def rebind(
    tensor: Tensor, storage: torch.UntypedStorage, offset: int, size: Sequence[int], stride: Sequence[int]
) -> Tensor:
    _aten.set_.source_Storage_storage_offset.redispatch(ON_CPU, tensor, storage, offset, size, stride)
    return tensor


def grown(tensor: Tensor, host: Tensor) -> Tensor:
    """An operator has given its output a new shape, and more memory where it had too little."""
    index = tensor.device.index
    storage = host.untyped_storage()
    held = tensor.untyped_storage()
    if storage.data_ptr() != held.data_ptr() or storage.nbytes() > held.nbytes():
        held = as_device(host.clone(), device(index), allocation_of(tensor).written).untyped_storage()
    return rebind(tensor, held, int(host.storage_offset()), host.shape, host.stride())


def _seed(index: int, dtype: torch.dtype) -> Tensor:
    """An empty tensor of the device."""
    found = _seeds.get((index, dtype))
    if found is None:
        first = _seeds.get((index, torch.uint8))
        if first is None:
            first = _seeds[index, torch.uint8] = first_tensor(index)
        found = _seeds[index, dtype] = _aten.view.dtype.redispatch(ON_CPU, first, dtype)
    return found
