"""The built-in fleets: one TOML file each, in `builtin/`. A new topology is a new file there."""

from __future__ import annotations

from functools import cache
from importlib import resources

from isthmus.errors import UserError, unknown_name
from isthmus.fleet.fleet import Fleet
from isthmus.fleet.toml import load_fleet, parse_fleet

_FOLDER = resources.files("isthmus.fleet").joinpath("builtin")


@cache
def topology(name: str) -> Fleet:
    """The built-in fleet called `name`. Raises `UserError` with the nearest name."""
    if name not in topology_names():
        raise unknown_name("topology", name, topology_names())
    return parse_fleet((_FOLDER / f"{name}.toml").read_text(encoding="utf-8"), f"{name}.toml")


@cache
def topology_names() -> tuple[str, ...]:
    """The names of the built-in fleets, sorted."""
    return tuple(sorted(file.name.removesuffix(".toml") for file in _FOLDER.iterdir() if file.name.endswith(".toml")))


def describe(name: str) -> str:
    """One line on what the built-in fleet called `name` is. Raises `UserError` with the nearest name."""
    return topology(name).description


def resolve_fleet(name_or_path: str) -> Fleet:
    """The fleet of a path that ends in ".toml", else the built-in one of that name. Raises `UserError`."""
    if name_or_path.endswith(".toml"):
        return load_fleet(name_or_path)
    try:
        return topology(name_or_path)
    except UserError as error:
        raise UserError(f"{error}; or the path of a file that ends in .toml") from None
