"""The places in which a module, and the code that its forward may call, hold values from one forward to the next.

From a module's attributes, submodules and hooks the walk goes through containers, objects' fields, bound methods,
partials and the user's own functions: the variables that they hold of enclosing functions, their defaults and
attributes, and the globals that they name, of other modules of the user's too. Code of libraries is not looked through.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import sys
import sysconfig
import weakref
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from copy import copy
from enum import Enum
from io import IOBase
from pathlib import Path
from types import CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, cast

import numpy as np
from torch import Tensor, nn

from isthmus.graph.schema import storage_of

PLAIN = (bool, int, float, complex, str, bytes, type(None))
GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator)
MISSING = object()
_BYTES = (bytearray, array, np.ndarray)
_INTERNAL = frozenset(vars(nn.Module())) | {name for name in vars(nn.RNN(1, 1)) if name.startswith("_")}
"""Attributes in which torch keeps what it needs itself."""
_TABLES = ("_modules", "_buffers", "_parameters")
_HOOKS = (("attribute", "_forward_hooks"), ("attribute", "_forward_pre_hooks"))
_LOOKED_AT = ("training", *(name for _, name in _HOOKS))
"""Those of them that are looked at none the less; submodules are too."""
_FOREIGN = (  # packages whose objects and globals are not looked through
    "builtins",
    "importlib",
    "isthmus",
    "isthmus_testing",
    "logging",
    "numpy",
    "peft",
    "tokenizers",
    "torch",
    "transformers",
    "typing",
)
_FILES = (  # how names of libraries' files begin
    *(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    *(str(Path(file).parents[1]) for file in (nn.__file__, __file__)),
    "<frozen",
)
_WRAPPED: Mapping[type, tuple[str, ...]] = {  # types that hold functions, and the attributes that hold them
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    property: ("fget", "fset", "fdel"),
    functools.cached_property: ("func",),
    functools.partial: ("func", "args", "keywords"),
    MethodType: ("__func__", "__self__"),
}
_FUNCTIONS = ("__func__", "fget", "fset", "fdel", "func")
_MOST, _MOST_BYTES, _MOST_PLACES = 4096, 1 << 28, 100_000
"""Elements of the largest container, bytes of the largest array, and places, that are looked at."""
_COPIED = 1 << 20  # bytes of the largest array that is put back

Step = tuple[str, Any]  # from a holder to what it holds: how, and under which name, key or number


class Place:
    """A place that holds a value; without a holder, the beginning of the way to others."""

    __slots__ = ("content", "head", "holder", "kept", "parts", "step", "value", "where")

    def __init__(self, holder: Place | None, step: Step, value: object, head: str = "", where: str = "") -> None:
        self.holder, self.step, self.value, self.head = holder, step, value, head
        self.where: str = holder.where if holder is not None else where
        """For people: "module 'body'"; empty for globals."""
        self.content, self.kept = content_of(value)
        self.parts: dict[object, Place] = {}

    def __str__(self) -> str:
        """For people: "self.n"."""
        return "".join(self._label())

    def _label(self) -> tuple[str, str]:
        if self.holder is None:
            return self.head, ""
        (kind, key), holder, (head, tail) = self.step, self.holder.value, self.holder._label()
        name = _name_of(holder) if isinstance(holder, FunctionType) else head
        if kind == "variable":
            return f"'{key}", f"' that {name} holds from its enclosing function"
        if kind in ("default", "keyword default"):
            return f"the default '{key}", f"' of {name}"
        if self.holder.step in _HOOKS:
            return f"the hooks of {self.holder.holder}", tail
        if kind == "environment":
            return f"{head}[{os.fsdecode(key)!r}]", tail
        if kind == "item":
            return f"{head}[{repr(key) if isinstance(key, PLAIN) else type(key).__name__}]", tail
        if kind in ("element", "reference", "context") or key in _FUNCTIONS:
            return head, tail
        if key == "data" and type(holder).__module__ in ("weakref", "_weakrefset"):
            return head, tail
        return f"{name}.{key}", tail

    def get(self) -> object:
        return self.value if self.holder is None else _get(self.holder.get(), self.step)

    def put(self, value: object) -> None:
        if self.holder is not None:
            held = self.holder.get()
            if (another := _put(held, self.step, value)) is not held:
                self.holder.put(another)

    def restore(self) -> None:
        """Put back the value that was there, and what it held."""
        self.put(self.value)
        held: Any = self.value
        if isinstance(held, dict) and len(self.parts) == len(cast("dict[object, object]", held)):
            now = {part.step[1]: part.value for part in self.parts.values() if part.step[0] == "item"}
            held.clear()
            held.update(now)
        elif self.kept is None:
            return
        elif isinstance(held, set | deque):
            held.clear()
            (held.extend if isinstance(held, deque) else held.update)(self.kept)
        else:
            held[... if isinstance(held, np.ndarray) else slice(None)] = self.kept


class _Globals(Place):
    __slots__ = ("names", "whole")

    def __init__(self, variables: dict[str, Any]) -> None:
        super().__init__(None, ("", None), variables, head=str(variables.get("__name__", "globals()")))
        self.names: set[str] = set()  # those that functions name
        self.whole = False  # whether all that is state is looked at


class Places:
    """All places of a module and its code. `walked`: those of values that hold others, outer ones first."""

    def __init__(self, module: nn.Module) -> None:
        self.walked: list[Place] = []
        self._package = "" if _is_foreign(type(module).__module__) else type(module).__module__.partition(".")[0]
        """The user's, wherever it is installed."""
        self._known: dict[str, bool] = {}
        self._slots: dict[type, dict[str, MemberDescriptorType]] = {}
        self._seen: set[int] = set()
        self._globals: dict[int, _Globals] = {}
        self._todo: deque[Place] = deque()
        self._left = _MOST_PLACES
        kinds: dict[type, None] = {}
        for path, part in module.named_modules():
            self._begin(part, "self", f"module {path or type(part).__name__!r}")
            kinds |= dict.fromkeys(kind for kind in type(part).__mro__ if not _is_foreign(kind.__module__))
        for kind in kinds:
            self._begin(kind, kind.__name__)
        for name in dict.fromkeys(kind.__module__ for kind in kinds):
            if (own := sys.modules.get(name)) is not None:
                self._globals_of(vars(own)).whole = True
        self._begin(os.environ, "os.environ")
        while self._todo and self._left > 0:
            self._walk(self._todo.popleft())

    def parts(self, holder: Place) -> Iterator[tuple[Step, object]]:
        """Yield what the value of a place holds now, and how."""
        value: Any = holder.value
        if isinstance(holder, _Globals):
            for key, item in list(value.items()):
                state = holder.whole and not key.startswith("__") and _is_state(item)
                if state or (key in holder.names and not isinstance(item, ModuleType)):
                    yield ("global", key), item
        elif isinstance(value, nn.Module):
            for key, item in list(vars(value).items()):
                if key not in _INTERNAL or key in _LOOKED_AT:
                    yield ("attribute", key), item
            # Of the model's own modules parameters and buffers are compared elsewhere.
            for table in _TABLES if holder.holder is not None else _TABLES[:1]:
                yield from (((table, key), item) for key, item in list(vars(value)[table].items()))
        elif isinstance(value, type):
            for key, item in list(vars(value).items()):
                if not isinstance(item, MemberDescriptorType) and (not key.startswith("__") or callable(item)):
                    yield ("attribute", key), item
        elif isinstance(value, FunctionType):
            yield from self._parts_of_function(value)
        elif type(value) in _WRAPPED:
            yield from ((("wrapped", key), getattr(value, key)) for key in _WRAPPED[type(value)])
        elif isinstance(value, weakref.ref):
            yield ("reference", None), value()
        elif isinstance(value, ContextVar):
            with contextlib.suppress(LookupError):  # not set
                yield ("context", None), value.get()
        elif value is os.environ:
            yield from ((("environment", key), item) for key, item in list(value._data.items()))
        else:
            yield from self._parts_of_object(value)

    def _parts_of_function(self, function: FunctionType) -> Iterator[tuple[Step, object]]:
        if not self._is_own(function.__globals__.get("__name__", "")):  # a decorator of a library
            yield from ((("attribute", key), item) for key, item in vars(function).items() if key == "__wrapped__")
            return
        code = function.__code__
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # no value yet
                yield ("variable", name), cell.cell_contents
        given = function.__defaults__ or ()
        names = code.co_varnames[code.co_argcount - len(given) : code.co_argcount]
        yield from ((("default", name), item) for name, item in zip(names, given, strict=True))
        yield from ((("keyword default", name), item) for name, item in (function.__kwdefaults__ or {}).items())
        yield from ((("attribute", key), item) for key, item in vars(function).items())

    def _parts_of_object(self, value: Any) -> Iterator[tuple[Step, object]]:
        if isinstance(value, dict):
            # Not as a class of its own shows them, which may load or make what is not there yet.
            items = OrderedDict.items if isinstance(value, OrderedDict) else dict.items
            yield from ((("item", key), item) for key, item in list(items(cast("Any", value)))[:_MOST])
        elif isinstance(value, list | tuple | deque):
            yield from ((("item", n), item) for n, item in enumerate(tuple(cast("list[Any]", value))[:_MOST]))
        elif isinstance(value, set | frozenset):
            yield from ((("element", item), item) for item in tuple(cast("set[Any]", value))[:_MOST])
        if _is_own_object(value):
            yield from ((("attribute", key), item) for key, item in list(vars(value).items())[:_MOST])
        for key, slot in self._slots_of(type(value)).items():
            with contextlib.suppress(AttributeError):
                yield ("attribute", key), slot.__get__(value)

    def _begin(self, value: object, head: str, where: str = "") -> None:
        if id(value) not in self._seen:
            self._seen.add(id(value))
            self._todo.append(Place(None, ("", None), value, head, where))

    def _walk(self, holder: Place) -> None:
        self.walked.append(holder)
        for step, value in self.parts(holder):
            self._add(holder, step, value)
        if isinstance(holder.value, FunctionType) and self._is_own(holder.value.__globals__.get("__name__", "")):
            names = _names_in(holder.value.__code__)
            self._name(holder.value.__globals__, names, set())

    def _add(self, holder: Place, step: Step, value: object) -> None:
        if identity_of(step) in holder.parts:
            return
        place = holder.parts[identity_of(step)] = Place(holder, step, value)
        self._left -= 1
        if id(value) not in self._seen and self._holds(value):
            self._seen.add(id(value))
            self._todo.append(place)
            for kind in type(value).__mro__ if not isinstance(value, type) else ():
                if self._is_own(kind.__module__):
                    self._begin(kind, kind.__name__)

    def _name(self, variables: dict[str, Any], names: frozenset[str], done: set[int]) -> None:
        """A function names these globals, and what stands in modules of the user's that it names."""
        done.add(id(variables))
        holder = self._globals_of(variables)
        holder.names |= names
        for name in names:
            value = variables[name] if name in variables else sys.modules.get(name)
            if isinstance(value, ModuleType):
                if self._is_own(value.__name__) and id(vars(value)) not in done:
                    self._name(vars(value), names, done)
            elif name in variables:
                self._add(holder, ("global", name), value)

    def _globals_of(self, variables: dict[str, Any]) -> _Globals:
        if id(variables) not in self._globals:
            self._globals[id(variables)] = made = _Globals(variables)
            self._todo.append(made)
        return self._globals[id(variables)]

    def _holds(self, value: object) -> bool:
        """Return whether what is in a value is looked at."""
        if isinstance(value, (*PLAIN, *GENERATORS, Tensor, Enum, ModuleType, *_BYTES)):
            return False
        if isinstance(value, type):
            return self._is_own(value.__module__) and not issubclass(value, Enum)
        kinds = (dict, list, tuple, set, frozenset, deque, FunctionType, weakref.ref, ContextVar, nn.Module)
        known = isinstance(value, kinds) or type(value) in _WRAPPED
        return known or _is_own_object(value) or bool(self._slots_of(type(value)))

    def _slots_of(self, kind: type) -> dict[str, MemberDescriptorType]:
        if kind not in self._slots:
            found = [vars(base) for base in kind.__mro__ if self._is_own(base.__module__)]
            slots = {k: v for base in found for k, v in base.items() if isinstance(v, MemberDescriptorType)}
            self._slots[kind] = slots
        return self._slots[kind]

    def _is_own(self, name: str) -> bool:
        """Return whether a module of this name is the user's."""
        if name not in self._known:
            top, file = name.partition(".")[0], getattr(sys.modules.get(name), "__file__", None) or ""
            library = top in (*_FOREIGN, *sys.stdlib_module_names) or file.startswith(_FILES)
            self._known[name] = top == self._package or not library
        return self._known[name]


def place_of(module: nn.Module, tensor: Tensor) -> str:
    """Where a module and its code hold a tensor: "self.scales[0] of module 'body'"; empty if they do not."""
    storage = storage_of(tensor)
    for holder in Places(module).walked:
        for place in holder.parts.values():
            if isinstance(place.value, Tensor) and storage_of(place.value) == storage:
                return f"{place}{f' of {place.where}' if place.where else ''}"
    return ""


def content_of(value: object) -> tuple[object, Any]:
    """Differs where the value is another, or was changed in place; and what can be put back then."""
    if isinstance(value, PLAIN):
        return (type(value), repr(value) if isinstance(value, float | complex) else value), None
    if isinstance(value, GENERATORS):
        return _state_of(value), None
    if isinstance(value, list | tuple | set | frozenset | deque):
        items = tuple(cast("list[object]", value))
        ordered = isinstance(value, list | tuple)
        ids = () if ordered else tuple(map(id, items[:_MOST]))
        return (id(value), len(items), ids), None if isinstance(value, tuple | frozenset) else items
    if isinstance(value, _BYTES):
        held = cast("np.ndarray[Any, Any]", value) if isinstance(value, np.ndarray) else memoryview(value)
        content = hash(held.tobytes()) if held.nbytes <= _MOST_BYTES else 0
        return (id(value), held.nbytes, content), copy(value) if held.nbytes <= _COPIED else None
    return id(value), None


def identity_of(step: Step) -> object:
    """Identify an item among all that one value holds."""
    return step if isinstance(step[1], PLAIN) else (step[0], id(step[1]))


def is_iterator(value: object) -> bool:
    """Return whether it has a position that cannot be seen without moving it."""
    return hasattr(type(value), "__next__") and not isinstance(value, IOBase) and not _is_own_object(value)


def _get(holder: Any, step: Step) -> object:
    kind, key = step
    match kind:
        case "attribute" if isinstance(holder, type) or key in (getattr(holder, "__dict__", ())):
            return vars(holder)[key]
        case "attribute":
            if (slot := _slot(holder, key)) is None:
                raise KeyError(key)
            return slot.__get__(holder)
        case "_modules" | "_buffers" | "_parameters":
            return vars(holder)[kind][key]  # torch's exporter shows other modules as attributes
        case "wrapped":
            return getattr(holder, key)
        case "variable":
            return _cell(holder, key).cell_contents
        case "default":
            return holder.__defaults__[_number_of_default(holder, key)]
        case "keyword default":
            return holder.__kwdefaults__[key]
        case "element":
            return key
        case "reference":
            return holder()
        case "context":
            return holder.get()
        case "environment":
            return holder._data[key]
        case _ if isinstance(holder, dict) and not dict.__contains__(cast("dict[Any, Any]", holder), key):
            raise KeyError(key)
        case _:
            return holder[key]


def _put(holder: Any, step: Step, value: object) -> object:
    """The holder with another value in it: itself, or what takes its place."""
    kind, key = step
    with contextlib.suppress(LookupError, AttributeError, ValueError):
        if _get(holder, step) is value:
            return holder
    match kind:
        case "attribute" if isinstance(holder, type):
            delattr(holder, key) if value is MISSING else setattr(holder, key, value)
        case "attribute" if (slot := _slot(holder, key)) is not None:
            slot.__delete__(holder) if value is MISSING else slot.__set__(holder, value)
        case "attribute":
            _put_item(vars(holder), key, value)
        case "_modules" | "_buffers" | "_parameters":
            _put_item(vars(holder)[kind], key, value)
        case "variable" if value is MISSING:
            del _cell(holder, key).cell_contents
        case "variable":
            _cell(holder, key).cell_contents = value
        case "default":
            number = _number_of_default(holder, key)
            holder.__defaults__ = (*holder.__defaults__[:number], value, *holder.__defaults__[number + 1 :])
        case "keyword default":
            _put_item(holder.__kwdefaults__, key, value)
        case "wrapped" if isinstance(holder, functools.partial):
            state = {name: getattr(holder, name) for name in ("func", "args", "keywords")} | {key: value}
            cast(Any, holder).__setstate__((*state.values(), vars(holder)))
        case "context":
            holder.set(None if value is MISSING else value)
        case "environment" if value is MISSING:
            os.unsetenv(key)
            holder._data.pop(key, None)
        case "environment" if type(value) is bytes:
            holder[os.fsdecode(key)] = os.fsdecode(value)
        case "environment":
            holder._data[key] = value
        case "item" if isinstance(holder, tuple):
            items = (*holder[:key], value, *holder[key + 1 :])
            return items if type(holder) is tuple else getattr(type(holder), "_make", type(holder))(items)
        case "item" | "global":
            _put_item(holder, key, value)
        case _:  # what is held so is never another
            pass
    return holder


def _put_item(table: Any, key: object, value: object) -> None:
    if value is MISSING:
        table.pop(key, None)
    else:
        table[key] = value


def _slot(holder: object, key: str) -> MemberDescriptorType | None:
    found = (vars(kind).get(key) for kind in type(holder).__mro__)
    return next((slot for slot in found if isinstance(slot, MemberDescriptorType)), None)


def _cell(function: FunctionType, name: str) -> Any:
    return (function.__closure__ or ())[function.__code__.co_freevars.index(name)]


def _number_of_default(function: FunctionType, name: str) -> int:
    code, given = function.__code__, function.__defaults__ or ()
    return code.co_varnames.index(name) - code.co_argcount + len(given)


def _name_of(function: FunctionType) -> str:
    name, code = function.__qualname__.rpartition("<locals>.")[2], function.__code__
    return f"the lambda in {Path(code.co_filename).name}:{code.co_firstlineno}" if "<lambda>" in name else name


@functools.lru_cache(1024)
def _names_in(code: CodeType) -> frozenset[str]:
    """Globals, attributes and modules that a function's code names."""
    inner = (_names_in(part) for part in code.co_consts if isinstance(part, CodeType))
    return frozenset(code.co_names).union(*inner)


def _state_of(generator: object) -> object:
    try:
        if isinstance(generator, random.Random):
            return generator.getstate()
        return repr(cast(Any, getattr(generator, "bit_generator", generator)).state)
    except (AttributeError, NotImplementedError):  # of an operating system's generator
        return repr(cast(np.random.RandomState, generator).get_state()) if hasattr(generator, "get_state") else 0


def _is_foreign(module: str) -> bool:
    return module.partition(".")[0] in _FOREIGN


def _is_state(value: object) -> bool:
    """Return whether a module's global may be state and no part of the program."""
    kinds = (*PLAIN, *GENERATORS, Tensor, list, dict, set, deque, *_BYTES, ContextVar)
    return isinstance(value, kinds) or is_iterator(value) or (_is_own_object(value) and not callable(value))


def _is_own_object(value: object) -> bool:
    return (
        hasattr(value, "__dict__")
        and not isinstance(value, type | nn.Module | Tensor | ModuleType | FunctionType | MethodType)
        and not _is_foreign(type(value).__module__)
    )
