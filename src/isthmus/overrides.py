"""Values in place of a document's: `training.steps=50`."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from typing import TypeVar, cast

import msgspec

from isthmus.documents import beside, convert
from isthmus.errors import UserError
from isthmus.old_spelling import respelled, respelled_overrides, say_new
from isthmus.units import whole_number

Config = TypeVar("Config", bound=msgspec.Struct)


def read_overrides(
    texts: Sequence[str], option: str = "--set", example: str = "training.steps=50"
) -> dict[str, object]:
    """Read texts `KEY=VALUE`, with values as in TOML, or null for none; what is no value there is text. UserError for
    one that is no such pair.

    >>> read_overrides(["training.steps=50", "fleet=laptop", "plan.micro_batches=[2, 4]", "plan.max_price=null"])
    {'training.steps': 50, 'fleet': 'laptop', 'plan.micro_batches': [2, 4], 'plan.max_price': None}
    """
    found: dict[str, object] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not all(key.strip().split(".")):
            raise UserError(f"{option}: got {text!r}, expected KEY=VALUE, as {example}")
        try:
            found[key.strip()] = tomllib.loads(f"value = {value}")["value"]
        except (ValueError, RecursionError):  # wider than TOMLDecodeError: integers of 5,000 digits, deep nesting
            found[key.strip()] = None if value.strip() == "null" else value.strip()
    return found


def overridden(tables: Mapping[str, object], overrides: Mapping[str, object], source: str) -> dict[str, object]:
    """The tables of a job with these values: by key with its tables, as `training.steps`; of lists by number, as
    `optimizer.0.lr`. UserError for a key inside of what is no table.

    >>> overridden({"training": {"steps": 9}}, {"training.steps": 2, "data.kind": "text"}, "job.toml")
    {'training': {'steps': 2}, 'data': {'kind': 'text'}}
    """
    told: list[str] = []
    found = respelled(tables, source, told)
    for key, value in respelled_overrides(overrides, told).items():
        *path, last = key.split(".")
        at: object = found
        for number, part in enumerate(path):
            at = _inside(at, part, ".".join(path[: number + 1]))
        _place(at, last, value, key)
    say_new(told)
    return found


def overridden_struct(config: Config, overrides: Mapping[str, object], source: str) -> Config:
    """Return the same as `overridden`, of a struct, whose own values are checked too: it may come from Python."""
    tables = cast("dict[str, object]", msgspec.to_builtins(config))
    return convert(overridden(tables, overrides, source), type(config), source)


def _inside(at: object, part: str, key: str) -> object:
    if isinstance(at, dict):
        table = cast("dict[str, object]", at)
        if table.get(part) is None:  # an optional table of a struct
            table[part] = {}
        return table[part]
    entries = _entries(at, part, key)
    return entries[int(part)]


def _place(at: object, last: str, value: object, key: str) -> None:
    if isinstance(at, dict):
        cast("dict[str, object]", at)[last] = value
    else:
        _entries(at, last, key)[int(last)] = value


def _entries(at: object, part: str, key: str) -> list[object]:
    """Return a list's entries, among which is one of this number."""
    entries = cast("list[object]", at) if isinstance(at, list) else []
    number = whole_number(part)
    if number is None or number >= len(entries):
        raise UserError(f"{key}: got {part!r}, expected a key of a table, or the number of one of {len(entries)}")
    return entries


PATHS = re.compile(  # keys of jobs whose values are paths, or lists of paths
    r"fleet|federated\.participation\.availability|data\.description|data\.heldout|(model|data)\.(.+\.)?(path|heldout_path|files|tokenizer)"
)


def counted_from(overrides: Mapping[str, object], folder: str) -> dict[str, object]:
    """With paths that count from a folder, in place of the folder of the job's file."""

    def located(value: object) -> object:
        if isinstance(value, list):
            return [located(each) for each in cast("list[object]", value)]
        return beside(value, folder) if isinstance(value, str) else value

    return {key: located(value) if PATHS.fullmatch(key) else value for key, value in overrides.items()}
