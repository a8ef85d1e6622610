"""The operators of torch that a graph may call, and how they are called for a graph of an untrusted author.

A name on the allow-list stands for those of its overloads that compute tensors from tensors and numbers. Overloads
that write to an argument (`out=`) or give anything but tensors are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor
from torch._ops import OpOverload

from isthmus.errors import UserError
from isthmus.graph.allowlist import is_allowed
from isthmus.graph.operator_checks import CHECKS

IN_PLACE = {
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
"""What a forward may do to a buffer; everything else is computed out of place."""

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
    """Whether this torch has the operator and a graph may call it."""
    overload = _find(target)
    return overload is not None and is_allowed(target) and _is_tensor_function(overload)


def operator_of(target: str) -> Callable[..., object]:
    """What a graph calls as `target`: the operator, behind the checks that torch does not make.

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
