"""What is not part of the core: optional libraries, third-party entries, and options checked against a struct."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Mapping
from importlib.metadata import EntryPoint
from types import ModuleType
from typing import TypeVar

import msgspec

from isthmus.errors import UserError, check_choice, unknown_name

Options = TypeVar("Options", bound=msgspec.Struct)


def import_extra(module: str, extra: str) -> ModuleType:
    """Imports an optional library on first use, so that nothing here needs it to be installed.

    Raises `UserError` with the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"{module} cannot be imported ({error}): pip install isthmus[{extra}]") from error


def third_party(group: str) -> dict[str, EntryPoint]:
    """The entry points that installed packages registered under `group`, by name."""
    return {entry.name: entry for entry in importlib.metadata.entry_points(group=group)}


def load_third_party(entry: EntryPoint) -> object:
    """What the entry point names. Any failure is the other package's, so it becomes a `UserError`."""
    try:
        return entry.load()
    except Exception as error:
        raise UserError(f"{entry.group} entry {entry.name!r} ({entry.value}) cannot be loaded: {error}") from error


def import_object(owner: str, name: str) -> object:
    """What `package.module:name` names; dots after the colon go into classes. `owner` is who asks, for messages.

    The module is the user's own and may raise anything while it is imported: that becomes a `UserError` too.
    """
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise UserError(f"{owner} {name!r}: expected 'package.module:callable'")
    try:
        found: object = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise UserError(f"{owner} {name!r}: cannot import {module_name}: {type(error).__name__}: {error}") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise UserError(f"{owner} {name!r}: {module_name} has no {attribute!r}")
        found = getattr(found, part)
    return found


def read_options(owner: str, options: Mapping[str, object], struct: type[Options]) -> Options:
    """`options` as a checked `struct`. Raises `UserError` that names the wrong option and its owner."""
    valid = {field.encode_name: field.type for field in msgspec.structs.fields(struct)}
    for key, value in options.items():
        if key not in valid:
            raise unknown_name(f"{owner} option", key, valid)
        check_choice(f"{owner} option {key!r}:", value, valid[key])
    try:
        return msgspec.convert(dict(options), struct)
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `$.")
        where = f" option {path.rstrip('`')!r}" if path else ""
        raise UserError(f"{owner}{where}: {reason}") from error
