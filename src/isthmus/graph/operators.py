"""The operators of torch that a graph may call, and how they are called for a graph of an untrusted author.

A name on the allow-list stands for those of its overloads that compute tensors from tensors and numbers. Overloads
that write to an argument (`out=`) or give anything but tensors are refused.

A graph that came over a link can call the operators of `allowlist.txt` and nothing else. The file names PyTorch ATen
operators that compute tensors from tensors and numbers: none reads a file, prints, changes a storage or runs code. A
line is a name, which stands for all its overloads, or a name and an overload.

Not on it: operators that trust their arguments, such as indices into memory, to come from another part of torch
(most names that begin with an underscore, and what public functions are made of), and operators whose results have a
size that depends on data, which no graph can hold.

Versions of torch differ in schemas. A graph says those of its operators, so devices with other versions can work on it
as long as the operators that it calls are alike.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import resources
from typing import Literal, cast

import torch
from torch import Tensor
from torch._ops import OpOverload

from isthmus.errors import UserError
from isthmus.graph.operator_checks import CHECKS
from isthmus.graph.opgraph import DTYPE_BYTES, Affine, Arg, ArgList, Named, Op, Ref

ALLOWED = frozenset(resources.files("isthmus.graph").joinpath("allowlist.txt").read_text().split())


def is_allowed(target: str) -> bool:
    """Return whether an operator such as `aten.linear.default` is on the list."""
    namespace, _, overload = target.partition(".")
    return namespace == "aten" and (overload in ALLOWED or overload.partition(".")[0] in ALLOWED)


IN_PLACE = {  # operators that a forward may apply to a buffer in place; everything else is computed out of place
    "add_",
    "addcdiv_",
    "addcmul_",
    "copy_",
    "div_",
    "fill_",
    "lerp_",
    "mul_",
    "sub_",
    "zero_",
}

UNWRITTEN = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
"""Operators that return memory as they find it: what a device freed before would travel with the graph's values."""


def overload_of(target: str) -> OpOverload:
    """The torch operator called `target`, such as `aten.linear.default`; UserError unless a graph may call it."""
    overload = _find(target)
    if not is_allowed(target) or (overload is not None and not _is_tensor_function(overload)):
        raise UserError(f"operator graph: {target!r} is not on the allow-list of operators")
    if overload is None:
        raise UserError(f"operator graph: this torch ({torch.__version__}) has no operator {target!r}")
    return overload


def is_callable(target: str) -> bool:
    """Return whether this torch has the operator and a graph may call it."""
    overload = _find(target)
    return overload is not None and is_allowed(target) and _is_tensor_function(overload)


def operator_of(target: str) -> Callable[..., object]:
    """Return the operator that a graph calls as `target`, behind the checks that torch does not make.

    Memory that no operator has written is zero. Errors as `overload_of`; a call raises UserError for its arguments.
    """
    overload = overload_of(target)
    name = target.split(".")[1]
    if name in UNWRITTEN:
        return _Zeroed(overload)
    return _Checked(overload, CHECKS[name]) if name in CHECKS else overload


class _Zeroed:
    def __init__(self, overload: OpOverload) -> None:
        self._overload = overload

    def __call__(self, *args: object, **kwargs: object) -> Tensor:
        made = cast(Tensor, self._overload(*args, **kwargs))
        elements = made.untyped_storage().nbytes() // made.element_size()
        made.as_strided((elements,), (1,), 0).zero_()  # gaps between its elements too
        return made


class _Checked:
    def __init__(self, overload: OpOverload, check: Callable[[Mapping[str, object]], None]) -> None:
        self._overload = overload
        self._check = check
        self._names = [a.name for a in overload._schema.arguments]  # pyright: ignore[reportPrivateUsage]

    def __call__(self, *args: object, **kwargs: object) -> object:
        try:
            self._check({**dict(zip(self._names, args, strict=False)), **kwargs})
        except ValueError as e:
            raise UserError(f"operator graph: {self._overload}: expected {e}") from None
        return self._overload(*args, **kwargs)


def _find(target: str) -> OpOverload | None:
    namespace, _, rest = target.partition(".")
    name, _, overload = rest.partition(".")
    if namespace != "aten" or not overload.isidentifier():
        return None
    found: object = getattr(getattr(torch.ops.aten, name, None), overload, None)
    return found if isinstance(found, OpOverload) else None


def _is_tensor_function(overload: OpOverload) -> bool:
    schema = overload._schema  # pyright: ignore[reportPrivateUsage]  # torch has no public way to it
    gives = [str(r.type) for r in schema.returns]
    writes = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    allowed_writes: Sequence[str] = ["self"] if schema.name.removeprefix("aten::") in IN_PLACE else []
    return bool(gives) and all(t in ("Tensor", "List[Tensor]") for t in gives) and writes == allowed_writes


Argument = None | bool | int | float | str | torch.dtype | torch.device | Tensor | list["Argument"]

MEMORY_FORMATS = ("contiguous_format", "preserve_format", "channels_last", "channels_last_3d")
NAMED_TYPES = {
    "ScalarType": torch.dtype,
    "Layout": torch.layout,
    "MemoryFormat": torch.memory_format,
    "Device": torch.device,
}
"""Types by their names in a schema. It takes plain numbers for them, too, of kinds that a graph may not name."""
CODES = ("reduction", "interpolation_mode", "padding_mode")
"""Arguments that number one of three ways; kernels return unwritten memory for a fourth."""
LARGEST_SIZE = 1 << 40
"""Largest size, stride, padding and the like: kernels multiply them, or add them up, without a check of overflow."""
UNBOUNDED = ("start", "end", "low", "high", "from", "to")
"""Whole numbers that are no size: of a slice, which torch cuts to the tensor, and of random numbers."""


def bind(
    op: Op, tensor: Callable[[Ref], Tensor], batch: int, device: torch.device
) -> tuple[list[Argument], dict[str, Argument]]:
    """Arguments of a call: refs looked up, sizes evaluated at this batch, devices set to where the stage runs.

    UserError for a dtype, layout or device that a graph may not ask for, in whatever form.
    """

    def value(arg: Arg) -> Argument:
        if isinstance(arg, Ref):
            return tensor(arg)
        if isinstance(arg, Affine):
            return arg.at(batch)
        if isinstance(arg, ArgList):
            return [value(a) for a in arg.items]
        if isinstance(arg, Named):
            return named(arg, device)
        return arg

    args, kwargs = [value(a) for a in op.args], {k: value(v) for k, v in op.kwargs.items()}
    _check_constants(op.target, args, kwargs)
    return args, kwargs


def named(arg: Named, device: torch.device) -> Argument:
    """The torch object that a `Named` stands for."""
    if arg.kind == "device":
        return device
    if arg.kind == "float":
        return float(arg.name)
    known = {"dtype": DTYPE_BYTES, "layout": ("strided",), "memory_format": MEMORY_FORMATS}[arg.kind]
    if arg.name not in known:
        raise UserError(f"operator graph: unknown {arg.kind} {arg.name!r}, expected one of: {', '.join(known)}")
    return cast(Argument, getattr(torch, arg.name))


def _check_constants(target: str, args: Sequence[Argument], kwargs: Mapping[str, Argument]) -> None:
    """UserError unless what the schema has as a dtype, layout, memory format, device or code is given as one."""
    arguments = overload_of(target)._schema.arguments  # pyright: ignore[reportPrivateUsage]
    by_name = {a.name: a for a in arguments}
    given = [*zip(arguments, args, strict=False), *((by_name[k], v) for k, v in kwargs.items() if k in by_name)]
    for argument, value in given:
        kind = NAMED_TYPES.get(str(argument.real_type).removeprefix("Optional[").removesuffix("]"))
        if kind is not None and value is not None and not isinstance(value, kind):
            raise UserError(
                f"operator graph: {target}: argument {argument.name!r} is {value!r}, expected a {kind.__name__}"
            )
        if argument.name in CODES and str(argument.type) == "int" and not (type(value) is int and 0 <= value <= 2):
            raise UserError(f"operator graph: {target}: argument {argument.name!r} is {value!r}, expected 0, 1 or 2")
        numbers = value if isinstance(value, list) else [value] if "int" in str(argument.type) else []
        beyond = any(isinstance(v, int) and abs(v) > LARGEST_SIZE for v in numbers)
        if beyond and argument.name not in UNBOUNDED:
            raise UserError(f"operator graph: {target}: argument {argument.name!r} is {value!r}, beyond any memory")


def no_gradient(op: Op, inputs: Sequence[bool], mode: Literal["train", "eval"]) -> bool:
    """Return whether the op ran under no_grad when captured: an input needs a gradient and no output passes one on."""
    if mode == "eval":
        return True
    return bool(op.requires_grad) and any(inputs) and not any(op.requires_grad)


def schema_of(target: str) -> str:
    """In torch's words. UserError for an operator that a graph may not call, or that this torch does not have."""
    return str(overload_of(target)._schema)  # pyright: ignore[reportPrivateUsage]  # torch has no public way to it


def schemas_of(ops: Iterable[Op]) -> dict[str, str]:
    """Return the schemas by target, sorted."""
    return {target: schema_of(target) for target in sorted({op.target for op in ops if op.kind == "operator"})}


def digest(schema: str) -> str:
    """Short enough to say for each operator."""
    return hashlib.sha256(schema.encode()).hexdigest()[:8]


@functools.cache
def operators_here() -> Mapping[str, str]:
    """Every operator that a graph may call and this torch has, with the digest of its schema."""
    return {target: digest(schema_of(target)) for target in sorted(_targets())}


def _targets() -> Iterator[str]:
    for name in {allowed.partition(".")[0] for allowed in ALLOWED}:
        packet: object = getattr(torch.ops.aten, name, None)
        if isinstance(packet, torch._ops.OpOverloadPacket):  # pyright: ignore[reportPrivateUsage]
            yield from filter(is_callable, (f"aten.{name}.{overload}" for overload in packet.overloads()))


def lacking(schemas: Mapping[str, str], operators: Mapping[str, str]) -> tuple[str, ...]:
    """Return those operators of a graph, by `schemas`, that a device does not have, or has at another schema."""
    return tuple(target for target, schema in schemas.items() if operators.get(target) != digest(schema))
