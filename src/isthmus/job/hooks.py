"""The user's own functions that a run calls."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from isthmus.errors import UserError, unknown_name
from isthmus.extensions import import_object, load_third_party, third_party


class Hooks(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Callables as `package.module:name`, or names registered under the entry-point group `isthmus.hooks`."""

    step: str = ""
    """Called as hook(done: isthmus.StepDone) after each optimizer step."""
    checkpoint: str = ""
    """Called as hook(step: int, directory: pathlib.Path) when a checkpoint is complete."""
    finish: str = ""
    """Called as hook(run: pathlib.Path, outcome: str) at the end."""


def load_hooks(hooks: Hooks) -> dict[str, Callable[..., object]]:
    """Those that the job names, by what they are called for."""
    named = {"step": hooks.step, "checkpoint": hooks.checkpoint, "finish": hooks.finish}
    found: dict[str, Callable[..., object]] = {}
    for kind, name in named.items():
        if name:
            try:
                found[kind] = load_hook(name)
            except UserError as e:
                raise UserError(f"hooks.{kind}: {e}") from None
    return found


def load_hook(name: str) -> Callable[..., object]:
    """A callable named in a job: `package.module:name`, or an entry point of `isthmus.hooks`."""
    registered = third_party("isthmus.hooks")
    if name not in registered and ":" not in name:
        raise unknown_name("hook", name, [*registered, "package.module:callable"])
    found = load_third_party(registered[name]) if name in registered else import_object("hook", name)
    if not callable(found):
        raise UserError(f"hook {name!r}: expected a callable, got {found!r}")
    return found
