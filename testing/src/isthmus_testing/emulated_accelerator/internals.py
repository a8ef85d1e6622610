"""Torch internals that this package uses, to define a device type in Python.

torch.utils.backend_registration has the pieces; they know one device of the type. All else is here so that another
version of torch changes one page.
"""
# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false, reportUntypedBaseClass=false

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils.backend_registration import _DummyDeviceGuard

from isthmus.errors import InternalError

MOST_DEVICES = 64
ON_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_EXTENSION_DEVICE, _UNSIGNED = 12, 1
_FLASH = 1
_COMPOSED = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional", "CompositeImplicitAutograd")
_registered: list[object] = []  # libraries of kernels, and the memory of the first tensor of each device: for good


class _Hooks(torch._C._acc.PrivateUse1Hooks):
    """Answers to autograd's questions."""

    def is_built(self) -> bool:
        return True

    def is_available(self) -> bool:
        return False

    def has_primary_context(self, index: int) -> bool:
        return False  # autograd knows of no streams, and waits for none


class _DeviceModule:
    """The type's module, with the functions that torch asks of it."""

    def __init__(self, seed_all: Callable[[int], None]) -> None:
        self._seed_all = seed_all

    def is_available(self) -> bool:
        return False  # nobody finds it who does not ask for it by name

    def is_initialized(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return MOST_DEVICES

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        self._seed_all(seed)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


def add_device_type(kind: str, seed_all: Callable[[int], None]) -> bool:
    """Tells torch of the device type; whether it did not know it. `torch.manual_seed` calls `seed_all`."""
    if torch._C._get_privateuse1_backend_name() == kind:
        return False
    # Autograd starts its threads at the first backward, one for each device of the types that it then knows. One
    # before this type is known keeps it from starting any: the process stays one that can be forked.
    torch.ones((), requires_grad=True).backward()
    torch.utils.rename_privateuse1_backend(kind)
    torch._register_device_module(kind, _DeviceModule(seed_all))
    hooked = torch._C._acc.register_python_privateuseone_hook(_Hooks())
    if not hooked or not torch._C._acc.register_python_privateuseone_device_guard(_DummyDeviceGuard()):
        raise InternalError("another device type of this process is torch's PrivateUse1 already")
    return True


def add_kernels(
    fallback: Callable[..., object],
    kernels: dict[str, Callable[..., object]],
    composed: dict[str, Callable[..., object]],
) -> None:
    """`kernels` and `composed` are of operators of aten, by name; the second replace what is made of other operators,
    with its gradients. `fallback` takes an operator and its arguments, and serves what has no other kernel, and what
    the CPU has a kernel for but other devices compose of other operators: those bits differ."""
    everything, own = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    everything.fallback(fallback, "PrivateUse1")
    for name, kernel in (kernels | composed).items():
        own.impl(name, kernel, "PrivateUse1")
    for name, kernel in composed.items():
        own.impl(name, kernel, "AutogradPrivateUse1")
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    for full in torch._C._dispatch_get_registrations_for_dispatch_key("CPU"):
        name = full.removeprefix("aten::")
        if name not in kernels and name != full and any(has(full, key) for key in _COMPOSED):
            own.impl(name, _bound(fallback, name), "PrivateUse1")
    _registered.extend((everything, own))


def _bound(fallback: Callable[..., object], name: str) -> Callable[..., object]:
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, packet), overload or "default")
    return lambda *args, **kwargs: fallback(op, *args, **kwargs)


def numbers_refused(op: OpOverload) -> list[bool]:
    """Return for each argument whether it is a tensor, and torch takes no number in its place. Torch hands over a
    number that was made a tensor as a number."""
    takes = torch._C._should_allow_numbers_as_tensors(name_of(op))
    return [not takes and isinstance(a.type, torch.TensorType) for a in op._schema.arguments]


def arguments_of(op: OpOverload) -> list[tuple[str, bool]]:
    """(name, whether the operator writes to it) of each."""
    return [(a.name, a.alias_info is not None and a.alias_info.is_write) for a in op._schema.arguments]


def name_of(op: OpOverload) -> str:
    """Without the overload."""
    return op._schema.name.removeprefix("aten::")


def backward_in_this_thread() -> None:
    """Torch's own threads know of one device of the type at most."""
    torch._C._set_multithreading_enabled(False)


def cpu_takes_flash(
    inputs: Sequence[Tensor], mask: Tensor | None, dropout: float, causal: bool, scale: float | None, grouped: bool
) -> bool:
    """Return whether the CPU takes the flash algorithm of attention, of its two."""
    choose: Callable[..., int] = torch._fused_sdp_choice
    return choose(*inputs, mask, dropout, causal, scale=scale, enable_gqa=grouped) == _FLASH


def storage_at(address: int, size: int, where: torch.device) -> torch.UntypedStorage:
    return torch._C._construct_storage_from_data_pointer(address, where, size)  # pyright: ignore[reportReturnType]


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_index", ctypes.c_int32),
        ("dimensions", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("offset", ctypes.c_uint64),
    )


class _DLManagedTensor(ctypes.Structure):
    _fields_ = (("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


def first_tensor(index: int) -> Tensor:
    """uint8 [0] on a device, from which others come. By DLPack, since what torch offers for this knows device 0."""
    shape, strides, memory = (ctypes.c_int64 * 1)(0), (ctypes.c_int64 * 1)(1), ctypes.create_string_buffer(64)
    described = _DLTensor(
        ctypes.addressof(memory),
        _EXTENSION_DEVICE,
        index,
        1,
        _UNSIGNED,
        8,
        1,
        ctypes.cast(shape, ctypes.POINTER(ctypes.c_int64)),
        ctypes.cast(strides, ctypes.POINTER(ctypes.c_int64)),
        0,
    )
    managed = _DLManagedTensor(described, None, None)
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    name = b"dltensor"
    _registered.append((shape, strides, memory, managed, name))
    return torch._C._from_dlpack(new(ctypes.addressof(managed), name, None))
