"""How torch's operators run on the emulated device: each by the CPU's own kernel, on the same memory."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import cache
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch._ops import OpOverload

from isthmus.accelerators.accelerator import GENERATOR
from isthmus_testing.emulated_accelerator.copies import copy_between, host_waits
from isthmus_testing.emulated_accelerator.devices import KIND, CheckedDevice, device, seed_all
from isthmus_testing.emulated_accelerator.gpu_kernels import fused_adamw, fused_sgd, gru_cell, lstm_cell
from isthmus_testing.emulated_accelerator.internals import (
    ON_CPU,
    add_device_type,
    add_kernels,
    arguments_of,
    backward_in_this_thread,
    cpu_takes_flash,
    name_of,
    numbers_refused,
)
from isthmus_testing.emulated_accelerator.order import LOCK, Point, span_of
from isthmus_testing.emulated_accelerator.tensors import (
    UNWRITTEN,
    allocation_of,
    as_device,
    as_host,
    grown,
    host_buffer,
    is_checked,
    view_of,
)

_aten = torch.ops.aten
_VIEWS = {"as_strided", "view", "_reshape_alias", "unfold", "set_", "_unsafe_view"}
"""Operators of backends that compute nothing."""
_INDEXED = {"index", "index_put_", "_index_put_impl_"}
"""Their indices may lie on the host. Where they are of bools, the host waits to know how many are true."""


def _index(where: torch.device | None) -> int:
    index: int | None = where.index if where is not None else None  # torch's types forget that it may be None
    return index or 0


class _Facts(NamedTuple):
    """Facts of an operator, from its schema."""

    writes: tuple[bool, ...]  # whether the operator writes each argument, in turn
    tensors: tuple[bool, ...]  # where a number must be made a tensor
    names: dict[str, int]
    view: bool
    waits: bool  # whether the host must know values to go on
    random: bool
    indexed: bool


@cache
def _facts(op: OpOverload) -> _Facts:
    name = name_of(op)
    arguments = arguments_of(op)
    indexed = name in _INDEXED
    dynamic = torch.Tag.data_dependent_output in op.tags or torch.Tag.dynamic_output_shape in op.tags
    return _Facts(
        tuple(write for _, write in arguments),
        tuple(numbers_refused(op)),
        {name: i for i, (name, _) in enumerate(arguments)},
        name in _VIEWS,
        dynamic and not indexed,
        torch.Tag.nondeterministic_seeded in op.tags,
        indexed,
    )


class _Call:
    """One operator on its way to the CPU and back."""

    def __init__(self, op: OpOverload, facts: _Facts) -> None:
        self._op = op
        self._facts = facts
        self._waits = facts.waits
        self._host_tensor: Tensor | None = None
        self._lowered: list[tuple[Tensor, Tensor, bool]] = []
        """(the device's, the host's, whether it is written)."""
        self.device: CheckedDevice | None = None

    def lower(self, value: object, write: bool) -> object:
        if isinstance(value, Tensor):
            return self._lower_tensor(value, write)
        if isinstance(value, (list, tuple)):
            return [self.lower(v, write) for v in cast("Sequence[object]", value)]
        if isinstance(value, torch.device) and value.type == KIND:
            self._of(device(_index(value)))
            return torch.device("cpu")
        if isinstance(value, torch.Generator):
            raise RuntimeError(f"Expected a '{KIND}' device type for generator but found '{value.device.type}'")
        return value

    def _lower_tensor(self, value: Tensor, write: bool) -> Tensor:
        if not is_checked(value):
            if value.dim() > 0 and self._facts.indexed:
                return self._index(value)
            if value.dim() > 0 or write:
                self._host_tensor = value
            return value
        self._of(device(value.device.index))
        if self._facts.indexed and value.dtype in (torch.bool, torch.uint8) and self._lowered:
            self._waits = True
        # What an operator gives its shape gets new memory: to enlarge the tensor's own would move it.
        host = torch.empty_like(value, device="cpu") if write and not value.numel() else as_host(value)
        self._lowered.append((value, host, write))
        return host

    def _index(self, value: Tensor) -> Tensor:
        with LOCK:
            found = cast(CheckedDevice, self.device)
            found.counters.wait("implicit copy", f"indices of {self._op}", value.numel() * value.element_size())
        return value

    def _of(self, found: CheckedDevice) -> None:
        if self.device is not None and self.device is not found:
            raise _mixed(self._op, f"{KIND}:{self.device.index}", f"{KIND}:{found.index}")
        self.device = found

    def place(self) -> CheckedDevice:
        """Where it runs, once all arguments are lowered."""
        on = self.device
        if on is None:
            raise RuntimeError(f"{self._op}: no argument says on which device it is to run")
        if self._host_tensor is not None:
            raise _mixed(self._op, f"{KIND}:{on.index}", str(self._host_tensor.device))
        return on

    def begin(self, on: CheckedDevice) -> Point:
        """Queues it, in its order among the accesses to its tensors."""
        with LOCK:
            point = on.launch(str(self._op))
            for tensor, _, write in self._lowered:
                allocation_of(tensor).access(on.current, point, write=write, span=span_of(tensor))
            if self._waits:
                host_waits(on.current.clock)
                on.counters.wait("host synchronization", str(self._op))
        return point

    def lift(self, value: object, point: Point) -> object:
        if isinstance(value, (list, tuple)):
            return [self.lift(v, point) for v in cast("Sequence[object]", value)]
        if not isinstance(value, Tensor):
            return value
        for tensor, host, _ in self._lowered:
            if value is host:
                return tensor
        address = value.untyped_storage().data_ptr()
        for tensor, host, _ in self._lowered:
            if address and host.untyped_storage().data_ptr() == address:
                return view_of(tensor, value)
        made = as_device(value, cast(CheckedDevice, self.device), point)
        self._lowered.append((made, value, False))
        return made

    def reshape_outputs(self) -> None:
        for tensor, host, write in self._lowered:
            if write and host.shape != tensor.shape:
                grown(tensor, host)


def _mixed(op: OpOverload, one: str, other: str) -> RuntimeError:
    return RuntimeError(
        f"Expected all tensors to be on the same device, but found at least two devices, {one} and {other}! ({op})"
    )


def run(op: OpOverload, *args: object, **kwargs: object) -> object:
    """The kernel of every operator that has no other."""
    backward_in_this_thread()
    facts = _facts(op)
    if facts.view:
        return op.redispatch(ON_CPU, *args, **kwargs)
    return _on_cpu(op, op, args, kwargs)


def _on_cpu(
    op: OpOverload, kernel: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
) -> object:
    """`kernel` is what the CPU has for it."""
    facts = _facts(op)
    call = _Call(op, facts)
    given = [_tensor_of(a) if tensor else a for a, tensor in zip(args, facts.tensors, strict=False)]
    host_args = [call.lower(a, w) for a, w in zip(given, facts.writes, strict=False)]
    host_kwargs = {k: call.lower(v, facts.writes[facts.names[k]]) for k, v in kwargs.items()}
    on = call.place()
    with drawing(on) if facts.random else contextlib.nullcontext(), on.current.working:
        point = call.begin(on)
        result = kernel(*host_args, **host_kwargs)
        call.reshape_outputs()
        return call.lift(result, point)


def _tensor_of(value: object) -> object:
    """Return a number as a tensor without dims, which therefore does not affect the result's type; else the value
    itself."""
    if isinstance(value, bool | int | float):
        return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
    return value


@contextlib.contextmanager
def drawing(on: CheckedDevice) -> Generator[None]:
    """The CPU's generator stands for the device's."""
    with contextlib.nullcontext() if on.drawing == threading.get_ident() else GENERATOR:
        before = torch.default_generator.get_state()
        torch.default_generator.set_state(on.random_state)
        try:
            yield
        finally:
            on.random_state = torch.default_generator.get_state()
            torch.default_generator.set_state(before)


def _empty(
    size: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    memory_format: torch.memory_format | None = None,
) -> Tensor:
    return _unwritten(torch.empty(size, dtype=dtype, memory_format=memory_format or torch.contiguous_format), device)


def _empty_strided(
    size: Sequence[int],
    stride: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> Tensor:
    return _unwritten(torch.empty_strided(size, stride, dtype=dtype), device)


def _unwritten(host: Tensor, where: torch.device | None) -> Tensor:
    """Nobody may rely on what it holds."""
    backward_in_this_thread()
    on = device(_index(where))
    with LOCK:
        on.check_alive()
    storage = host.untyped_storage()
    if storage.nbytes():
        torch.empty(0, dtype=torch.uint8).set_(storage).fill_(UNWRITTEN)
    return as_device(host, on, None)


def _resize(tensor: Tensor, size: Sequence[int], memory_format: torch.memory_format | None = None) -> Tensor:
    host = as_host(tensor).clone().resize_(size)
    return grown(tensor, host)


def _to_copy(
    tensor: Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
) -> Tensor:
    """Torch takes a host buffer for what does not wait; it would look for one in a place that Python cannot fill."""
    made = torch.empty_like(
        tensor, dtype=dtype, device=device or tensor.device, memory_format=memory_format or torch.preserve_format
    )
    if non_blocking and not is_checked(made):
        buffer = host_buffer(made.numel() * made.element_size()).view(made.dtype)
        made = buffer.as_strided(made.shape, made.stride())
    return made.copy_(tensor, non_blocking=non_blocking)


def _item(tensor: Tensor) -> object:
    return _on_cpu(_aten._local_scalar_dense.default, torch.Tensor.item, (tensor,), {})


def _conj(tensor: Tensor) -> Tensor:
    """Conjugates at once. Torch only marks a view as conjugated and leaves the work to the kernels that read it. Those
    kernels are in C++, and crash over tensors of a device that is written in Python."""
    return _aten.conj_physical.default(tensor)


def _convolution(*args: object) -> object:
    return _on_cpu(_aten.convolution_overrideable.default, _aten.convolution.default, args, {})


def _convolution_backward(gradient: Tensor, inputs: Tensor, weight: Tensor, *settings: object) -> object:
    def kernel(*args: object) -> object:
        # the CPU's wants the bias's sizes beside the weight: all of the output's channels
        return _aten.convolution_backward.default(*args[:3], [gradient.shape[1]], *args[3:])

    args = (gradient, inputs, weight, *settings)
    return _on_cpu(_aten.convolution_backward_overrideable.default, kernel, args, {})


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute attention by the algorithm that torch takes on the CPU for such tensors."""
    inputs = [as_host(t).requires_grad_(t.requires_grad) for t in (query, key, value)]
    mask = None if attn_mask is None else as_host(attn_mask)
    flash = cpu_takes_flash(inputs, mask, dropout_p, is_causal, scale, enable_gqa)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, -torch.inf)
    if flash:
        return _aten._scaled_dot_product_flash_attention_for_cpu.default(
            query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
        )[0]
    return _aten._scaled_dot_product_attention_math.default(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]


def _dropout(values: Tensor, p: float, train: bool) -> Tensor:
    """The CPU's: torch takes another formula for accelerators, which rounds otherwise."""
    if not train or p == 0 or values.numel() == 0:
        return values
    if p == 1:
        return values * 0
    return values * torch.empty_like(values).bernoulli_(1 - p).div_(1 - p)


def _adamw(*args: object, **kwargs: object) -> object:
    return _on_cpu(_aten._fused_adamw_.default, fused_adamw, args, kwargs)


def _sgd(*args: object, **kwargs: object) -> object:
    return _on_cpu(_aten._fused_sgd_.default, fused_sgd, args, kwargs)


_KERNELS: dict[str, Callable[..., object]] = {
    "empty.memory_format": _empty,
    "empty_strided": _empty_strided,
    "resize_": _resize,
    "_to_copy": _to_copy,
    "_copy_from": copy_between,
    "_copy_from_and_resize": copy_between,
    "_local_scalar_dense": _item,
    "_conj": _conj,
    "convolution_overrideable": _convolution,
    "convolution_backward_overrideable": _convolution_backward,
    "_fused_adamw_": _adamw,
    "_fused_sgd_": _sgd,
}


_COMPOSED: dict[str, Callable[..., object]] = {
    "scaled_dot_product_attention": _attention,
    "dropout": _dropout,
    "_thnn_fused_lstm_cell": lstm_cell,
    "_thnn_fused_gru_cell": gru_cell,
}


def add_device() -> None:
    """Tells torch of the device type and how it computes, once per process."""
    if add_device_type(KIND, seed_all):
        add_kernels(run, _KERNELS, _COMPOSED)
