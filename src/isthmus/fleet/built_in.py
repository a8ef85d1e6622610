"""The built-in fleets: a TOML file each, in `builtin/`, or drawn from a seed (`drawn`).

A new fleet is a new file there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache, partial
from importlib import resources

from isthmus.errors import UserError, unknown_name
from isthmus.fleet.fleet import Fleet
from isthmus.fleet.random_fleets import MOST_DEVICES, fusionllm_testbed, random_fleet, sky
from isthmus.fleet.toml import load_fleet, parse_fleet

_FOLDER = resources.files("isthmus.fleet").joinpath("builtin")
_DRAWN: Mapping[str, Callable[[], Fleet]] = {
    **{f"fusionllm-testbed{n}": partial(fusionllm_testbed, n) for n in (1, 2)},
    **{f"sky-{n}": partial(sky, n) for n in (16, 32, 64)},
}
RANDOM = "random:N:seed"
"""How a random fleet is asked for: `random:100:7` has 100 devices, drawn from seed 7."""
_RANDOM = re.compile(r"random:([0-9]{1,9}):([0-9]{1,18})")


@cache
def built_in_fleet(name: str) -> Fleet:
    """The built-in fleet called `name`, or a random one. Raises `UserError` with the nearest name."""
    if (asked := _RANDOM.fullmatch(name)) is not None:
        return random_fleet(int(asked[1]), int(asked[2]))
    if name in _DRAWN:
        return _DRAWN[name]()
    if name not in built_in_names():
        raise unknown_name("fleet", name, [*built_in_names(), RANDOM])
    return parse_fleet((_FOLDER / f"{name}.toml").read_text(encoding="utf-8"), f"{name}.toml")


@cache
def built_in_names() -> tuple[str, ...]:
    """The names of the built-in fleets, sorted. Random ones have names of the form `random:N:seed` besides."""
    files = (file.name.removesuffix(".toml") for file in _FOLDER.iterdir() if file.name.endswith(".toml"))
    return tuple(sorted([*files, *_DRAWN]))


def describe(name: str) -> str:
    """One line on what the built-in fleet called `name` is. Raises `UserError` with the nearest name."""
    if name == RANDOM:
        return f"N devices, at most {MOST_DEVICES:,}, drawn from the seed: regions on a globe, heavy-tailed speeds"
    return built_in_fleet(name).description


def resolve_fleet(name_or_path: str) -> Fleet:
    """The fleet of a path that ends in ".toml", else the built-in one of that name. Raises `UserError`."""
    if name_or_path.endswith(".toml"):
        return load_fleet(name_or_path)
    try:
        return built_in_fleet(name_or_path)
    except UserError as error:
        raise UserError(f"{error}; or the path of a file that ends in .toml") from None
