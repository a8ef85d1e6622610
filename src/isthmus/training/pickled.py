"""Pickles that are read and never run: a few opcodes are interpreted here, and nothing is imported or called. An object
becomes a dictionary: what would be called (`kind`), its `arguments`, its state. A table becomes a list of pairs."""

from __future__ import annotations

import pickletools
from collections.abc import Collection
from typing import Any

_LITERALS = {"BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE", "SHORT_BINUNICODE"}
_CONSTANTS: dict[str, object] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}


def read_pickled(text: bytes, known: Collection[str]) -> object:
    """The value; `known` are the classes and functions that it may name. ValueError for any other, for an opcode that
    is not known here, and for what is no pickle."""
    try:
        return _interpreted(text, known)
    except (IndexError, TypeError, AttributeError) as e:
        raise ValueError("no sound pickle") from e


def _interpreted(text: bytes, known: Collection[str]) -> object:
    stack: list[Any] = []
    marks: list[int] = []
    memo: list[Any] = []

    def taken(count: int) -> list[Any]:
        if count > len(stack):
            raise IndexError
        found = stack[len(stack) - count :]
        del stack[len(stack) - count :]
        return found

    for op, argument, _ in pickletools.genops(text):
        match op.name:
            case "PROTO" | "FRAME":
                pass
            case "STOP":
                return stack[-1]
            case name if name in _LITERALS:
                stack.append(argument)
            case name if name in _CONSTANTS:
                stack.append(_CONSTANTS[name])
            case "EMPTY_LIST" | "EMPTY_DICT":
                stack.append([])
            case "MARK":
                marks.append(len(stack))
            case "TUPLE1" | "TUPLE2" | "TUPLE3" as name:
                stack.append(tuple(taken(int(name[-1]))))
            case "TUPLE":
                stack.append(tuple(taken(len(stack) - marks.pop())))
            case "APPEND" | "APPENDS":
                found = taken(1 if op.name == "APPEND" else len(stack) - marks.pop())
                stack[-1].extend(found)
            case "SETITEM" | "SETITEMS":
                found = taken(2 if op.name == "SETITEM" else len(stack) - marks.pop())
                stack[-1].extend(zip(found[::2], found[1::2], strict=True))
            case "MEMOIZE" | "BINPUT" | "LONG_BINPUT":
                if argument not in (None, len(memo)):
                    raise ValueError("its memory is out of order")
                memo.append(stack[-1])
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument or 0])
            case "GLOBAL" | "STACK_GLOBAL":
                named = ".".join(taken(2)) if argument is None else str(argument).replace(" ", ".")
                if named not in known:
                    raise ValueError(f"it names {named[:200]!r}, which is not expected in it")
                stack.append(named)
            case "REDUCE" | "NEWOBJ":
                kind, arguments = taken(2)
                stack.append({"kind": kind, "arguments": arguments})
            case "BINPERSID":
                stack.append({"kind": "persistent", "arguments": taken(1)})
            case "BUILD":
                state, made = taken(1)[0], stack[-1]
                fields = {"state": state} if isinstance(state, tuple) else dict(state)
                made.update({name: field for name, field in fields.items() if name not in made})
            case name:
                raise ValueError(f"opcode {name} is not expected in it")
    raise ValueError("no sound pickle")
