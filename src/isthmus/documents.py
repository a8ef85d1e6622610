"""TOML documents checked against structs, with errors that a person can act on."""

from __future__ import annotations

import re
import tomllib
import types
import typing
from pathlib import Path
from typing import TypeVar

import msgspec

from isthmus.errors import UserError, unknown_name

Document = TypeVar("Document", bound=msgspec.Struct)


def read_toml(path: Path, kind: str) -> dict[str, object]:
    """The tables of a TOML file; UserError for a missing file or a syntax error, with its line."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{kind} {path}: not found") from None
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"{kind} {path}: cannot be read: {e}") from None
    except tomllib.TOMLDecodeError as e:
        raise UserError(f"{kind} {path}: not valid TOML: {e}") from None


def convert(tables: dict[str, object], struct: type[Document], source: str) -> Document:
    """The tables as a struct. Raises UserError naming the field, with the nearest valid key for an unknown one."""
    _check_keys(tables, struct, source, "")
    try:
        return msgspec.convert(tables, struct)
    except msgspec.ValidationError as e:
        reason, _, path = str(e).partition(" - at `$.")
        raise UserError(f"{source}: {path.rstrip('`') or 'document'}: {reason}") from None


def _check_keys(value: object, expected: object, source: str, path: str) -> None:
    struct = _struct_of(expected)
    if struct is not None and isinstance(value, dict):
        fields = {f.encode_name: f.type for f in msgspec.structs.fields(struct)}
        for key, inner in typing.cast("dict[str, object]", value).items():
            if key not in fields:
                raise UserError(f"{source}: {unknown_name('key', f'{path}{key}', [f'{path}{f}' for f in fields])}")
            _check_keys(inner, fields[key], source, f"{path}{key}.")
    elif isinstance(value, list):
        (item, *_) = typing.get_args(expected) or (None,)
        for inner in typing.cast("list[object]", value):
            _check_keys(inner, item, source, re.sub(r"\.$", "[].", path))


def _struct_of(expected: object) -> type[msgspec.Struct] | None:
    """The struct in a type such as `Struct`, `Struct | None` or `Annotated[Struct, ...]`."""
    if isinstance(expected, type) and issubclass(expected, msgspec.Struct):
        return expected
    if typing.get_origin(expected) in (typing.Union, types.UnionType, typing.Annotated):
        return next((s for a in typing.get_args(expected) if (s := _struct_of(a)) is not None), None)
    return None
