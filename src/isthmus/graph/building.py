"""Build a module without allocating its weights.

Everything large is fake. Small tensors are real while the constructor runs, because constructors read them:
`torch.linspace(0, rate, depth).tolist()` is how many vision models spread their drop rates.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple, cast
from unittest import mock

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from isthmus.errors import IsthmusError, UserError
from isthmus.graph.capture_errors import built_by, reason_of, user_line
from isthmus.graph.places import place_of
from isthmus.graph.schema import base_name, storage_of

SMALL = 1024  # elements of the largest real tensor that is made from nothing

LARGEST = 1 << 30  # bytes of storage in which views are compared element by element

GROWING = {"repeat", "tile", "new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"}
"""Operators whose results may be much larger than what they take."""


_DRAW = cast("Callable[..., Tensor]", nn.init._no_grad_trunc_normal_)  # pyright: ignore[reportPrivateUsage]


def _trunc_normal_of(draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Torch draws until all numbers are within the bounds, which cannot be seen of a fake tensor: it needs none."""

    def trunc_normal(tensor: Tensor, *args: object, **kwargs: object) -> Tensor:
        return tensor if isinstance(tensor, FakeTensor) else draw(tensor, *args, **kwargs)

    return trunc_normal


class Built(NamedTuple):
    made: Sequence[Tensor]  # the real tensors made on the way
    overlapping: Sequence[tuple[str, str]]  # names of tensors that share memory: see `overlapping`


class HeldTensors(NamedTuple):
    """Tensors that a module holds: each of their names -> the first name of the same tensor."""

    names: Mapping[str, str]
    storages: frozenset[int]
    """Storages of the real tensors made while it was built: their values are not those that a run starts from."""
    place_of: Callable[[Tensor], str]  # where another one is held, for people; empty where that is not known


class _SmallIsReal(TorchDispatchMode):
    """Above a FakeTensorMode: an operator on no fake tensor whose results are small runs for real."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Tensor] = []

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        named = kwargs or {}
        given = [a for a in tree_leaves((args, named)) if isinstance(a, Tensor)]
        if any(isinstance(t, FakeTensor) for t in given):
            return func(*args, **named)
        if not given or base_name(str(func)) in GROWING:
            result = func(*args, **named)
            if sum(t.numel() for t in tree_leaves(result) if isinstance(t, Tensor)) > SMALL:
                return result
        with unset_fake_temporarily():
            result = func(*args, **named)
        self.made += [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        return result


def build_fake(build: Callable[[], nn.Module], dtype: torch.dtype) -> tuple[nn.Module, Built]:
    """The module with fake parameters, buffers and tensor attributes.

    Floating-point parameters and buffers take the type `dtype`, unless it is float32: the builder may choose.
    Runs under a FakeTensorMode. UserError when the module cannot be built.
    """
    try:
        # `Module.to` refuses parameters that have weak references, and the fake mode's memory keeps some.
        unreferenced = mock.patch("weakref.getweakrefs", lambda _: ())
        truncated = mock.patch.object(nn.init, "_no_grad_trunc_normal_", _trunc_normal_of(_DRAW))
        with torch.random.fork_rng(devices=[]), _without_warning(), unreferenced, truncated, _SmallIsReal() as small:
            module = cast(object, build())
    except IsthmusError:
        raise
    except Exception as e:  # the user's constructor may raise anything
        raise UserError(f"model: building {built_by(e)} failed{user_line(e)}: {reason_of(e)}") from e
    if not isinstance(module, nn.Module):
        raise UserError(f"model: building it gave {type(module).__name__}, expected an nn.Module")
    shared = overlapping(named_tensors(module))
    fakes: dict[int, tuple[Tensor, Tensor]] = {}
    """Identity of a tensor -> itself, so that the identity stays its own, and what takes its place everywhere."""
    for path, part in module.named_modules():
        tables = (part._parameters, part._buffers, vars(part))  # pyright: ignore[reportPrivateUsage]
        for table in cast("tuple[dict[str, object], ...]", tables):
            for name, value in table.items():
                if isinstance(value, Tensor):
                    if is_lazy(value):
                        raise UserError(
                            f"model: parameter {name!r} of a {type(part).__name__} has no shape before the first "
                            "forward: give its sizes"
                        )
                    if value.layout is not torch.strided:
                        what = f"{path}.{name}" if path else name
                        got = str(value.layout).removeprefix("torch.")
                        raise UserError(f"model: tensor {what!r}: got {got}, expected a dense one: use .to_dense()")
                    converts = dtype is not torch.float32 and value.is_floating_point() and table is not vars(part)
                    new = _fake(value, dtype if converts else value.dtype)
                    table[name] = fakes.setdefault(id(value), (value, new))[1]
    return module, Built(small.made, shared)


@contextlib.contextmanager
def _without_warning() -> Generator[None]:
    """Torch warns of a number that is read from a weight; of a fake one, where our error says it with its place."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Converting a tensor with requires_grad", UserWarning)
        yield


def _fake(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if isinstance(tensor, FakeTensor) and tensor.dtype == dtype:
        return tensor
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype)
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


def held_by(module: nn.Module, built: Built) -> HeldTensors:
    """The names of all parameters, buffers and tensor attributes of a module from `build_fake`."""
    first: dict[int, str] = {}
    names = {name: first.setdefault(id(tensor), name) for name, tensor in named_tensors(module)}
    return HeldTensors(names, frozenset(storage_of(t) for t in built.made), partial(place_of, module))


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Its parameters, buffers and tensor attributes, by each of their names."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)
    for path, part in module.named_modules(remove_duplicate=False):
        for key, value in vars(part).items():
            if isinstance(value, Tensor):
                yield (f"{path}.{key}" if path else key), value


def overlapping(named: Iterable[tuple[str, Tensor]]) -> list[tuple[str, str]]:
    """Names of tensors that share memory and are not the same; a name twice where a tensor's own elements do."""
    found: list[tuple[str, str]] = []
    by_storage: dict[int, list[tuple[str, Tensor]]] = {}
    for name, tensor in named:
        if tensor.layout is not torch.strided or is_lazy(tensor) or not tensor.numel():
            continue
        if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
            found.append((name, name))
        others = by_storage.setdefault(storage_of(tensor), [])
        if not any(other is tensor for _, other in others):
            found += [(first, name) for first, other in others if _overlap(other, tensor)]
            others.append((name, tensor))
    return found


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors of one storage have an element in common."""
    starts = [t.storage_offset() * t.element_size() for t in (a, b)]
    ends = [start + _extent(t) * t.element_size() for start, t in zip(starts, (a, b), strict=True)]
    if max(starts) >= min(ends) or a.dtype != b.dtype or max(ends) > LARGEST:
        return max(starts) < min(ends)
    size = a.element_size()
    taken = np.zeros(max(ends) // size, dtype=np.bool_)
    views = [as_strided(taken[start // size :], t.shape, t.stride()) for start, t in zip(starts, (a, b), strict=True)]
    views[0][...] = True
    return bool(views[1].any())


def _extent(tensor: Tensor) -> int:
    """Elements from its first one in memory to its last one."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
