"""The data of this device that somebody else's job may name: kinds that its owner allows, files in one folder."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import cast

import msgspec

from isthmus.data.callables import is_callable_name
from isthmus.data.hugging_face import HUB
from isthmus.data.registry import DataSpec
from isthmus.data.streams.files import KIND as STREAM
from isthmus.data.within import check_pattern_within, confined_to
from isthmus.errors import UserError


@contextlib.contextmanager
def allowed(data: DataSpec, kinds: Collection[str] | None, *, foreign: bool) -> Generator[DataSpec]:
    """While inside, the data that are given may be opened. With `foreign` somebody else's coordinator asks, and only
    what lies in the folder where this process runs is for it. UserError for a kind that is not among those that the
    device's owner allows, None for all that are installed; and for options that lead out of that folder, by themselves
    or by a link in it."""
    check_kind(data, kinds, foreign=foreign)
    if not foreign:
        yield data
        return
    with _own_folder(data):
        yield msgspec.structs.replace(data, folder="")


@contextlib.contextmanager
def _own_folder(data: DataSpec) -> Generator[None]:
    refuse_paths(data)
    with confined_to(Path.cwd()):
        for _, text in _texts("data", data.options):
            check_pattern_within(text)
        yield


def check_kind(data: DataSpec, allowed: Collection[str] | None, *, foreign: bool) -> None:
    """UserError for a kind that this device's owner does not allow. Nothing of it has been imported.

    `allowed` None allows all that are installed; with `foreign` a callable, and what is fetched from the hub, has to
    be among those that are listed.
    """
    if allowed is not None and data.kind not in allowed:
        raise UserError(
            f"data.kind: got {data.kind!r}, expected one of: {', '.join(sorted(allowed))}: the owner of this device "
            "allows no others (`isthmus join --data-kinds`)"
        )
    if allowed is None and foreign and data.kind == HUB:
        raise UserError(
            f"data.kind: got {HUB!r}, expected data that are here: nothing is fetched for somebody else unless the "
            "owner of this device names it (`isthmus join --data-kinds`)"
        )
    fetches = data.kind == STREAM and any("://" in text for _, text in _texts("", data.options))
    if allowed is None and foreign and fetches:
        raise UserError(
            f"data.kind: got {STREAM!r} with a URL, expected data that are here: nothing is fetched for somebody else "
            "unless the owner of this device names the kind (`isthmus join --data-kinds`)"
        )
    if allowed is None and foreign and is_callable_name(data.kind):
        raise UserError(
            f"data.kind: got {data.kind!r}, expected an installed kind: a callable is imported for nobody else unless "
            "the owner of this device names it (`isthmus join --data-kinds`)"
        )


def refuse_paths(data: DataSpec) -> None:
    """UserError for options that name something outside of the folder where this process runs."""
    for name, text in _texts("data", data.options):
        if "\0" in text or text.startswith("~") or PurePath(text).is_absolute() or ".." in PurePath(text).parts:
            raise UserError(
                f"{name}: got {text!r}, expected a relative path: devices of a fleet read from the folder that their "
                "owner named (`isthmus join --data`)"
            )


def _texts(name: str, value: object) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield name, value
    elif isinstance(value, Mapping):
        for key, inner in cast("Mapping[object, object]", value).items():
            yield from _texts(name, key)
            yield from _texts(f"{name}.{key}", inner)
    elif isinstance(value, Sequence):
        for inner in cast("Sequence[object]", value):
            yield from _texts(name, inner)
