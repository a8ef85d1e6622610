"""The engines by name: ours, and those that other packages register under `isthmus.launchers`.

An engine of another package is a callable that takes its options, a mapping of names to values, and gives a `Launcher`.
Ours are imported when they are used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, cast

import msgspec

from isthmus.errors import IsthmusError, UserError, unknown_name
from isthmus.extensions import import_object, load_third_party, read_options, third_party
from isthmus.runtime.launchers.launcher import Launcher

ENTRY_POINTS = "isthmus.launchers"


class ClusterEngine(NamedTuple):
    """One of our engines, as `module:name`."""

    launcher: str  # a class that is built with the options
    options: str  # a struct of its options


def _ours(module: str, name: str) -> ClusterEngine:
    where = f"isthmus.runtime.launchers.{module}"
    return ClusterEngine(f"{where}:{name}Launcher", f"{where}:{name}Options")


_OURS: Mapping[str, ClusterEngine] = {
    "local": _ours("local", "Local"),
    "ray": _ours("ray", "Ray"),
    "ssh": _ours("ssh", "Ssh"),
    "slurm": _ours("slurm", "Slurm"),
    "kubernetes": _ours("kubernetes", "Kubernetes"),
    "skypilot": _ours("skypilot", "SkyPilot"),
}


def engine_names() -> list[str]:
    """Every name that `isthmus up --on` takes, sorted. Ours win over a third party's of the same name."""
    return sorted({*_OURS, *third_party(ENTRY_POINTS)})


def open_launcher(engine: str, options: Mapping[str, object]) -> Launcher:
    """The engine's launcher; nothing is started or checked. UserError for an unknown engine, option or value."""
    if engine in _OURS:
        ours = _OURS[engine]
        struct = cast("type[msgspec.Struct]", import_object("--on", ours.options))
        launcher = cast("Callable[[msgspec.Struct], Launcher]", import_object("--on", ours.launcher))
        return launcher(read_options(f"--on {engine}:", _with_text(options, struct), struct))
    others = third_party(ENTRY_POINTS)
    if engine not in others:
        raise unknown_name("--on", engine, engine_names())
    load = load_third_party(others[engine])
    if not callable(load):
        raise UserError(f"--on {engine}: got {load!r}, expected a callable that takes options")
    try:
        return cast("Callable[[Mapping[str, object]], Launcher]", load)(options)
    except IsthmusError:
        raise
    except Exception as e:
        raise UserError(f"--on {engine}: {type(e).__name__}: {e}") from e


def _with_text(options: Mapping[str, object], struct: type[msgspec.Struct]) -> dict[str, object]:
    """With numbers as text where an option is text: `cpu=4` on a command line is read as a number."""
    text = {field.encode_name for field in msgspec.structs.fields(struct) if field.type is str}
    return {
        key: str(value) if key in text and isinstance(value, int | float) and not isinstance(value, bool) else value
        for key, value in options.items()
    }
