"""Changes of a forward beside its results: state that the next forward may read, which a graph has no place for.

Registered buffers that are assigned become written buffers of the graph. All else is refused by name, wherever it is
held (see `isthmus.graph.places`). Three things are no state:

- a value that each forward assigns before it reads it, as a loss that a layer keeps for the outermost module. The
  forward is run again with a `_Poison` in its place. So is it for every iterator, which shows no position: one that is
  used is refused;
- a value that the first forward leaves and no later one changes, where their graph is that of the first one, as a flag
  that a warning was given (`isthmus.graph.capture`);
- a tensor that depends on nothing that changes, as a mask that the first forward makes and keeps. The graph makes it
  every time.
"""

from __future__ import annotations

import functools
import inspect
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from isthmus.errors import UserError
from isthmus.graph.places import GENERATORS, MISSING, PLAIN, Place, Places, Step, content_of, identity_of, is_iterator

LARGE = 1_000_000_000  # a number above may be a time or an identity, which differs each time
USE_TORCH = (
    "a graph would hold the first random numbers for the whole run: draw them with torch (torch.rand, F.dropout)"
)


class StateChange(NamedTuple):
    """A place that a forward changed, beside registered buffers; or may have, of an iterator."""

    place: Place
    is_new: bool
    value: object  # the value that the forward left there

    @property
    def is_guess(self) -> bool:
        return not self.is_new and self.value is self.place.value and is_iterator(self.value)

    def put_back(self) -> None:
        if self.is_new:
            self.place.put(MISSING)
        else:
            self.place.restore()

    def refusal(self) -> UserError:
        where, label, new = self.place.where and f"in {self.place.where}: ", str(self.place), self.value
        if isinstance(new, GENERATORS):
            return UserError(f"model: {where}forward draws from {label}: {USE_TORCH}")
        does = "takes from the iterator" if self.is_guess else "changes"
        old = None if self.is_new else self.place.value
        plain = all(isinstance(v, (bool, int, float, str)) for v in (old, new))
        how = f"{',' * (' ' in label)} from {old!r} to {new!r}" if plain else ""
        return UserError(
            f"model: {where}forward {does} {label}{how}, which a graph cannot follow: "
            "make it a buffer (register_buffer in __init__) and assign a tensor, or leave it out"
        )


class ForwardState:
    """The state of a module before a forward, and what the forward made of it."""

    def __init__(self, module: nn.Module) -> None:
        self._places = Places(module)
        self._tables = [(path, part, name, dict(table)) for path, part, name, table in _tables(module)]
        self._random = _global_states()

    def check_random(self) -> None:
        """UserError where a generator of Python's or numpy's was drawn from."""
        for name, before, after in zip(("random", "numpy.random"), self._random, _global_states(), strict=True):
            if before != after:
                raise UserError(f"model: forward draws from Python's module {name}: {USE_TORCH}")

    def assigned(self) -> dict[str, Tensor]:
        """Registered buffers that were assigned, and what, by name; they hold what they held before again. UserError
        for parameters that were, and for parameters and buffers that came or went."""
        found: dict[str, Tensor] = {}
        for path, part, name, before in self._tables:
            now = cast("dict[str, Tensor | None]", getattr(part, name))
            for key in [k for k in {**before, **now} if before.get(k) is not now.get(k)]:
                full, old, new = f"{path}.{key}" if path else key, before.get(key), now.get(key)
                if name == "_parameters":
                    raise UserError(f"model: forward assigns parameter {full!r}: only the optimizer may")
                if old is None or new is None:
                    what = "which has no value before its first forward" if old is None else "to None"
                    raise UserError(
                        f"model: forward assigns buffer {full!r}, {what}, which a graph cannot follow: give it a "
                        "tensor in __init__ (register_buffer), and assign one of the same shape and type"
                    )
                found[full] = new
                now[key] = old
        return found

    def changes(self) -> list[StateChange]:
        """Everything else that was changed, outer places first, and every iterator."""
        return [change for holder in self._places.walked for change in self._changes_in(holder)]

    def _changes_in(self, holder: Place) -> Iterator[StateChange]:
        now = {identity_of(step): (step, value) for step, value in self._places.parts(holder)}
        if isinstance(holder.value, (list, set, deque)) and content_of(holder.value)[0] != holder.content:
            return  # its own place is another
        moved = list(now) != list(holder.parts) and now.keys() == holder.parts.keys()
        if moved and isinstance(holder.value, dict) and holder.holder is not None:
            yield StateChange(holder, False, cast("object", holder.value))
        for key in {**holder.parts, **now}:
            place = holder.parts.get(key)
            step, value = now.get(key, (("", None), MISSING))
            if place is None:
                if not _is_made_once(holder.value, step, value):
                    yield StateChange(Place(holder, step, value), True, value)
            elif value is MISSING or content_of(value)[0] != place.content or is_iterator(value):
                yield StateChange(place, False, value)


def check_changes(changes: Sequence[StateChange], forward: Callable[[], object]) -> list[StateChange]:
    """Those with a tensor that `forward` reads when it is run again, and leaves as it is: one that it made once.
    UserError where it reads any other value that the forward before left."""
    read: list[StateChange] = []
    rest = list(changes)
    for change in changes:
        if isinstance(change.value, GENERATORS):
            raise change.refusal()
    while rest and (touched := _first_read(rest, forward)) is not None:
        if not isinstance(touched.value, Tensor):
            raise touched.refusal()
        rest.remove(touched)
        read.append(touched)
    if read:
        try:
            left = [(forward(), [change.place.get() for change in read])[1] for _ in range(2)]
        finally:
            for change in changes:
                change.put_back()
        for change, first, second in zip(read, *left, strict=True):
            if first is not second:
                raise change.refusal()
    return read


def _first_read(changes: Sequence[StateChange], forward: Callable[[], object]) -> StateChange | None:
    """The first of them that `forward` depends on: it reads the value there, does not assign it again, or assigns
    another (a comparison with None cannot be seen)."""
    poisoned = [(change, _Poison()) for change in changes]
    try:
        for change, poison in reversed(poisoned):  # inner ones first: a poison is no way to them
            change.place.put(poison)
            if change.place.get() is not poison:
                return change
        failed = False
        try:
            forward()
        except Exception:  # ours, or what a library made of it
            failed = True
        read = [change for change, poison in poisoned if poison.is_read]
        return next(iter(read or (changes if failed else (c for c, p in poisoned if _depends(c, p)))), None)
    finally:
        for change in changes:
            change.put_back()


def _depends(change: StateChange, poison: _Poison) -> bool:
    try:
        left = change.place.get()
    except Exception:  # a holder is another by now
        return False
    if left is poison:
        return not change.is_guess
    plain = isinstance(change.value, bool | str | None) or (type(change.value) is int and abs(change.value) < LARGE)
    return plain and type(left) in (bool, int, str, type(None)) and left != change.value


def _is_made_once(holder: object, step: Step, value: object) -> bool:
    """A property that keeps its value, and would have the same one for ever."""
    found = inspect.getattr_static(type(holder), step[1], None) if step[0] == "attribute" else None
    return isinstance(found, functools.cached_property) and isinstance(value, PLAIN)


class _PoisonRead(Exception):
    pass


def _raise(self: _Poison, *_: object, **__: object) -> Any:
    object.__setattr__(self, "is_read", True)
    raise _PoisonRead


class _Poison:
    """Notes that it is used, and raises."""

    is_read = False
    __class__ = property(_raise)  # pyright: ignore[reportIncompatibleMethodOverride]  # isinstance asks for it

    @classmethod
    def __torch_function__(cls, function: object, types: object, args: Any = (), kwargs: Any = None) -> Any:
        _raise(next(a for a in tree_leaves((args, kwargs)) if isinstance(a, _Poison)))


_BINARY = "add sub mul truediv floordiv mod divmod pow matmul and or xor lshift rshift"
_OTHERS = (
    "getattr setattr delattr eq ne lt le gt ge bool len iter next reversed contains getitem setitem delitem int float "
    "complex index str repr format bytes call neg pos abs invert round hash enter exit copy deepcopy reduce_ex"
)
for _name in (*(f"{side}{name}" for name in _BINARY.split() for side in ("", "r", "i")), *_OTHERS.split()):
    setattr(_Poison, f"__{_name}__", _raise)


def _global_states() -> tuple[object, object]:
    kind, keys, *rest = cast("tuple[object, ...]", np.random.get_state())
    return random.getstate(), (kind, cast("np.ndarray[Any, Any]", keys).tobytes(), *rest)


def _tables(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, dict[str, Tensor | None]]]:
    for path, part in module.named_modules():
        for name in ("_parameters", "_buffers"):
            yield path, part, name, getattr(part, name)
