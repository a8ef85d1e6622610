"""TOML documents checked against structs, with errors that a person can act on."""

from __future__ import annotations

import itertools
import math
import os
import re
import tomllib
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar, cast

import msgspec

from isthmus.combinations import refusals, refused
from isthmus.errors import UserError, check_choice, plain_types, unknown_name
from isthmus.reading import parse_json, read_file

Document = TypeVar("Document", bound=msgspec.Struct)
JOB_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"  # pattern of a job's name, which names its folder too


def check_is_local(field: str, path: str) -> None:
    """UserError for an address such as s3://bucket, of which pathlib would make a folder `s3:`."""
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", path):
        raise UserError(f"{field}: got {path!r}, expected a path of this machine: `store.url` names a remote store")


def follow_umask(path: Path) -> None:
    """Give a file the permissions of one that this process creates in the ordinary way: safetensors makes its files
    readable by their owner alone."""
    probe = path.with_name(f".{path.name}.mode")
    probe.touch()
    path.chmod(probe.stat().st_mode & 0o777)
    probe.unlink()


def beside(path: str, folder: str) -> str:
    """A path that a file in `folder` names, for who does not run in that folder: what is no relative path stays, as do
    names such as "stdlib", to which nothing in the folder corresponds."""
    if not (folder and path) or "://" in path or path.startswith("~") or os.path.isabs(path):
        return path
    there = os.path.join(folder, path)
    is_name = os.path.basename(path) == path and "." not in path and not os.path.lexists(there)
    return path if is_name else there


def folder_of(file: Path) -> str:
    """The folder from which the file's relative paths count, absolute; empty where this process runs in it."""
    folder = os.path.abspath(file.parent)
    return "" if os.path.realpath(folder) == os.getcwd() else folder


def read_toml(path: Path, kind: str) -> dict[str, object]:
    """The tables of a TOML file; UserError for a missing file or a syntax error, with its line."""
    try:
        return parse_toml(path.read_text(encoding="utf-8"), f"{kind} {path}")
    except FileNotFoundError:
        raise UserError(f"{kind} {path}: not found") from None
    except UnicodeDecodeError as e:
        raise UserError(f"{kind} {path}: cannot be read: not UTF-8 text (byte {e.start})") from None
    except OSError as e:
        raise UserError(f"{kind} {path}: cannot be read: {e.strerror or e}") from None


def parse_toml(text: str, source: str) -> dict[str, object]:
    """The tables of a TOML text; UserError for a syntax error, with its line."""
    try:
        tables = tomllib.loads(text)
    except (ValueError, RecursionError) as e:  # wider than TOMLDecodeError: integers of 5,000 digits, deep nesting
        raise UserError(f"{source}: not valid TOML: {e}") from None
    level: list[object] = [tables]
    for _ in range(DEEPEST):
        level = [inner for each in level for inner in _inside(each)]
    if level:
        raise UserError(f"{source}: got tables and lists {DEEPEST} deep and more, expected fewer")
    return tables


DEEPEST = 50  # tables and lists inside each other; those of jobs have about five


def _inside(value: object) -> Iterable[object]:
    """Return the values in a table or a list."""
    if isinstance(value, dict):
        return cast("dict[str, object]", value).values()
    return cast("list[object]", value) if isinstance(value, list) else ()


def convert(tables: Mapping[str, object], struct: type[Document], source: str) -> Document:
    """The tables as a struct. Raises UserError naming the field, with the nearest valid key for an unknown one, and
    what the struct's `HINTS` say in its place; and of a key that the table of combinations refuses beside the struct's
    `BESIDE`, its reason."""
    top = {field.encode_name for field in msgspec.structs.fields(struct)}
    _check_together(tables, struct, source)
    _check_names(tables, struct, source, "", top)  # first, because msgspec's message would not offer the nearest name
    try:
        return msgspec.convert(tables, struct)
    except msgspec.ValidationError as e:
        raise UserError(f"{source}: {_plain(str(e), tables)}") from None


def _check_together(tables: Mapping[str, object], struct: type[msgspec.Struct], source: str) -> None:
    """UserError for a key that the struct does not have, since it is of another program."""
    beside: str = getattr(struct, "BESIDE", "")
    for row in refusals().values() if beside in tables else ():
        value: object = tables
        kind: object = struct
        for key in row.field.split(".") if row.beside == beside else ():
            fields = (
                {f.encode_name: f.type for f in msgspec.structs.fields(owner)} if (owner := _struct_of(kind)) else {}
            )
            value, kind = value.get(key) if isinstance(value, Mapping) else None, fields.get(key)
        if value is not tables and value is not None and kind is None:
            got = "a table" if isinstance(value, Mapping) else value if value is True else repr(value)
            raise UserError(f"{source}: {refused(row.what, beside, got)}")


def _plain(message: str, tables: Mapping[str, object]) -> str:
    """msgspec's message in TOML's words, "key: expected ..., got ..." instead of "... - at `$.key`"."""
    text, _, path = message.partition(" - at `$.")
    path = path.rstrip("`")
    text = text.replace("Object missing required field", "missing key").replace("`", "'")
    text = plain_types(text)
    text = text[:1].lower() + text[1:]
    if path and text.startswith("expected") and ", got" not in text:
        text = f"{text}, got {_at(tables, path)!r}"
    return f"{path}: {text}" if path else text


def _at(tables: object, path: str) -> object:
    found = tables
    for key in re.findall(r"[^.\[\]]+", path):
        if isinstance(found, list):
            found = typing.cast("list[object]", found)[int(key)]
        elif isinstance(found, Mapping):
            found = typing.cast("Mapping[str, object]", found)[key]
    return found


def differences(before: object, now: object, key: str = "") -> Iterator[str]:
    """Each key at which two documents differ, as "model.options.width was 16, is now 32"."""
    if isinstance(before, dict) and isinstance(now, dict):
        was, becomes = cast("dict[str, object]", before), cast("dict[str, object]", now)
        for name in {**was, **becomes}:
            yield from differences(was.get(name), becomes.get(name), f"{key}.{name}".lstrip("."))
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        pairs = zip(cast("list[object]", before), cast("list[object]", now), strict=True)
        for number, (was_one, is_one) in enumerate(pairs):
            yield from differences(was_one, is_one, f"{key}.{number}")
    elif before != now:
        yield f"{key} was {_shown(before)}, is now {_shown(now)}"


def _shown(value: object) -> str:
    return "not set" if value is None else repr(value)


def _check_names(value: object, expected: object, source: str, path: str, top: Collection[str]) -> None:
    """Keys of tables, and texts of which a few are valid. `top`: keys of the whole document."""
    struct = _struct_of(expected)
    if struct is not None and isinstance(value, Mapping):
        fields = {f.encode_name: f.type for f in msgspec.structs.fields(struct)}
        defaults = {f.encode_name: f.default for f in msgspec.structs.fields(struct)}
        dot = f"{path}." if path else ""
        for key, inner in typing.cast("Mapping[str, object]", value).items():
            if key not in fields:
                hints: Mapping[str, str] = getattr(struct, "HINTS", {})
                hint = f": {key!r} belongs to the top of the file, not to {path!r}" if key in top else ""
                unknown = f"unknown key {dot + key!r}{hints.get(key, hint)}" if key in hints or hint else ""
                raise UserError(f"{source}: {unknown or unknown_name('key', key, fields, prefix=dot)}")
            if isinstance(inner, int | float) and not isinstance(inner, bool) and _is_quantity(defaults[key]):
                unit = str(defaults[key]).partition(" ")[2]
                hint = f'expected a text with a unit, as "{inner} {unit}"'
                raise UserError(f"{source}: {dot}{key}: got {inner}, {hint}")
            _check_names(inner, fields[key], source, f"{dot}{key}", top)
    elif isinstance(value, list):
        item = _item_of(expected)
        for number, inner in enumerate(typing.cast("list[object]", value)):
            _check_names(inner, item, source, f"{path}[{number}]", top)
    elif isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{source}: {path}: got {value}, expected a finite number")
    try:
        check_choice(path, value, _choice_of(expected) if isinstance(value, str) else expected)
    except UserError as e:
        raise UserError(f"{source}: {e}") from None


def _is_quantity(default: object) -> bool:
    """Return whether it is a text such as "60 s"."""
    return isinstance(default, str) and re.fullmatch(r"[0-9.]+ [A-Za-z/]+", default) is not None


def _choice_of(expected: object) -> object:
    """Return the type of a text: in a type such as `Literal["a", "b"] | tuple[Item, ...]` the first part."""
    inner = typing.get_args(expected)
    if typing.get_origin(expected) not in (typing.Union, types.UnionType) or str in inner:
        return expected
    return next((one for one in inner if typing.get_origin(one) is typing.Literal), expected)


def _item_of(expected: object) -> object:
    """The type of a list's items in a type such as `tuple[Item, ...]`, or one of several."""
    origin, inner = typing.get_origin(expected), typing.get_args(expected)
    if origin in (typing.Union, types.UnionType, typing.Annotated):
        return next((item for one in inner if (item := _item_of(one)) is not None), None)
    return inner[0] if origin in (tuple, list, frozenset) and inner else None


def _struct_of(expected: object) -> type[msgspec.Struct] | None:
    """The struct in a type such as `Struct`, `Struct | None` or `Annotated[Struct, ...]`."""
    if isinstance(expected, type) and issubclass(expected, msgspec.Struct):
        return expected
    if typing.get_origin(expected) in (typing.Union, types.UnionType, typing.Annotated):
        return next((s for a in typing.get_args(expected) if (s := _struct_of(a)) is not None), None)
    return None


def read_lines(path: Path, kind: type[Document], note: Callable[[str], None] = lambda _: None) -> list[Document]:
    """Every line of JSON that was written whole: a killed run may leave half a one. Nothing where there is no file.
    `note` gets, in one sentence, which lines cannot be read."""
    found: list[Document] = []
    unread: list[int] = []
    lines = read_file(path).splitlines() if path.is_file() else []
    for number, line in enumerate(lines, 1):
        try:
            found.append(parse_json(line, kind, ""))
        except UserError:
            unread.append(number)
    if unread:
        what = "is the last one and is not whole" if unread == [len(lines)] else "cannot be read"
        note(f"{path}: {numbered('line', unread)} {what}: passed over")
    return found


def numbered(what: str, numbers: Sequence[int]) -> str:
    """Ascending numbers, as "rounds 2, 5 to 9"."""
    parts: list[str] = []
    for first in (n for n in numbers if n - 1 not in numbers):
        last = next(n for n in itertools.count(first) if n + 1 not in numbers)
        parts.append(str(first) if first == last else f"{first} to {last}")
    return f"{what}{'s' if len(numbers) > 1 else ''} {', '.join(parts)}"
