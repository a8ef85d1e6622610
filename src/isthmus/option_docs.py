"""A settings struct's options, in words: the source of `isthmus describe`, of the job reference and of its test."""

from __future__ import annotations

import ast
import functools
import inspect
import io
import textwrap
import tokenize
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import NODEFAULT, Meta

NAMES = {bool: "true or false", int: "integer", float: "number", str: "text", dict: "table", object: "value"}
LIMITS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
FAR = 1 << 20  # limits further from 0 are for what other machines send: no job comes near them


class OptionDoc(msgspec.Struct, frozen=True):
    """One key of a table."""

    key: str
    type: str
    default: str  # as TOML has it; `required`, or nothing where leaving the key out is a choice of its own
    meaning: str
    structs: tuple[type[msgspec.Struct], ...] = ()  # structs of the tables that the value may hold


def option_docs(struct: type[msgspec.Struct]) -> tuple[OptionDoc, ...]:
    """The keys of a struct, in the order of its fields. Meanings are what the source says of the fields."""
    hints, meanings = get_type_hints(struct, include_extras=True), _meanings(struct)
    return tuple(
        OptionDoc(
            key=field.encode_name,
            type=type_text(hints[field.name]),
            default=_default_text(field),
            meaning=meanings.get(field.name, ""),
            structs=tuple(dict.fromkeys(_structs(hints[field.name]))),
        )
        for field in msgspec.structs.fields(struct)
    )


def argument_docs(build: object) -> tuple[OptionDoc, ...]:
    """The arguments of a user's callable, as far as its signature shows them."""
    if not callable(build):
        return ()
    try:
        parameters = inspect.signature(build).parameters.values()
    except ValueError:
        return ()
    empty = inspect.Parameter.empty
    return tuple(
        OptionDoc(
            key=one.name,
            type="" if one.annotation is empty else type_text(one.annotation),
            default="required" if one.default is empty else toml_text(one.default),
            meaning="",
        )
        for one in parameters
        if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    )


def first_line(described: object) -> str:
    """Return the first line of the docstring."""
    return (inspect.getdoc(described) or "").partition("\n")[0]


def type_text(hint: Any) -> str:  # typing's forms have no common type
    """A type hint as a reader of TOML knows it: `integer at least 1`, `"adamw" or "sgd"`, `list of text`."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _limited(type_text(arguments[0]), [limit for limit in arguments[1:] if isinstance(limit, Meta)])
    if origin is Literal:
        return " or ".join(toml_text(value) for value in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(type_text(one) for one in arguments if one is not type(None)))
    if origin is tuple and arguments[-1:] != (Ellipsis,):
        return f"[{', '.join(type_text(one) for one in arguments)}]"
    if origin in (tuple, list, frozenset, set):
        return f"list of {_plural(type_text(arguments[0]))}"
    if origin is dict:
        of = "" if arguments[1] is object else f" of {_plural(type_text(arguments[1]))}"
        return f"table{of}"
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return "table"
    return NAMES.get(hint, getattr(hint, "__name__", str(hint)))


def toml_text(value: object) -> str:
    """A default as TOML writes it; nothing for None and for what has no place in TOML."""
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return f'"{value}"'
        case int() | float():
            return f"{value:g}" if isinstance(value, float) and abs(value) < 1 else str(value)
        case tuple() | list():
            return f"[{', '.join(toml_text(one) for one in value)}]"  # pyright: ignore[reportUnknownVariableType]
        case _:
            return ""


def _limited(kind: str, limits: list[Meta]) -> str:
    found = [
        f"{word} {getattr(limit, name)}"
        for limit in limits
        for name, word in LIMITS.items()
        if getattr(limit, name) is not None and abs(getattr(limit, name)) < FAR
    ]
    return " ".join([kind, " and ".join(found)]).strip()


def _plural(kind: str) -> str:
    first, space, rest = kind.partition(" ")
    return f"{first}s{space}{rest}" if first in ("table", "integer", "number", "list") else kind


def _default_text(field: msgspec.structs.FieldInfo) -> str:
    if field.default is not NODEFAULT:
        return toml_text(field.default)
    if field.default_factory is NODEFAULT:
        return "required"
    made: object = field.default_factory()
    if isinstance(made, (tuple, list)) and any(isinstance(one, msgspec.Struct) for one in made):
        return ""  # tables that stand for themselves
    return toml_text(made)


def _structs(hint: Any) -> Iterator[type[msgspec.Struct]]:
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        yield hint
    for argument in get_args(hint):
        yield from _structs(argument)


def field_docs(cls: type) -> Iterator[tuple[str, ast.expr, str]]:
    """Yield the fields that a class itself declares: name, annotation, and the comment behind or the string below."""
    source = textwrap.dedent(inspect.getsource(cls))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {token.start[0]: token.string[1:] for token in tokens if token.type == tokenize.COMMENT}
    body = ast.parse(source).body[0]
    assert isinstance(body, ast.ClassDef)
    for statement, after in zip(body.body, [*body.body[1:], None], strict=True):
        match statement, after:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                yield name, statement.annotation, " ".join(text.split())
            case ast.AnnAssign(target=ast.Name(id=name)), _:
                yield name, statement.annotation, comments.get(statement.lineno, "").strip()
            case _:
                pass


@functools.cache
def _meanings(struct: type[msgspec.Struct]) -> dict[str, str]:
    """Return the meanings by field; a subclass's replace those of its bases."""
    bases = [one for one in reversed(struct.__mro__) if msgspec.Struct in one.__mro__[1:]]
    return {name: text for one in bases for name, _, text in field_docs(one)}
