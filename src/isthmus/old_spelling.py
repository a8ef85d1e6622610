"""Keys of jobs as versions before this one spelled them. This version reads them; the next one deletes this file."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from typing import cast

from isthmus.errors import UserError

MOVED = {
    "execution.engine": "runtime.backend",
    "execution": "runtime",
    "local.learning_rate": "learning_rate",
    "local.optimizer": "optimizer",
    "local": "training",
    "federated.seed": "training.seed",
    "federated.evaluate_every": "training.eval_every",
    "federated.evaluate_samples": "training.eval_samples",
    "federated.evaluate_clients": "training.eval_clients",
    "federated.save_every": "training.save_every",
    "partition": "federated.partition",
    "participation": "federated.participation",
    "admission": "federated.admission",
    "aggregation": "federated.aggregation",
    "deployment": "federated.deployment",
}
"""Old key or table: the new one. Keys of a table that are not listed themselves keep their names in the new table."""
_said: set[str] = set()


def new_key(key: str) -> str:
    """The new spelling of a key with its tables.

    >>> new_key("execution.engine"), new_key("execution.ray.cpus"), new_key("model.name")
    ('runtime.backend', 'runtime.ray.cpus', 'model.name')
    """
    old = next((old for old in MOVED if f"{key}.".startswith(f"{old}.")), "")
    return MOVED[old] + key.removeprefix(old) if old else key


def respelled(job: Mapping[str, object], source: str, told: list[str] | None = None) -> dict[str, object]:
    """The document of a job in the new spelling; `told` gets each old key that it has. UserError, which names the
    source, for one that it has in both spellings.

    >>> respelled({"execution": {"engine": "ray", "threads": 2}, "runtime": {"executors": 4}}, "job.toml")
    {'runtime': {'executors': 4, 'backend': 'ray', 'threads': 2}}
    """
    found = copy.deepcopy(dict(job))
    for old, new in MOVED.items():
        table, _, key = old.rpartition(".")
        inner = found.get(table) if table else found
        if not isinstance(inner, dict) or key not in inner:
            continue
        value = cast("dict[str, object]", inner).pop(key)
        whole = not table and isinstance(value, dict)
        for name, each in cast("dict[str, object]", value).items() if whole else [("", value)]:
            spelled = f"{old}.{name}".rstrip(".")
            _place(found, f"{new}.{name}".rstrip("."), each, spelled, source)
            (told if told is not None else []).append(spelled)
    return found


def respelled_overrides(overrides: Mapping[str, object], told: list[str]) -> dict[str, object]:
    """Return the same as `respelled`, of values by key with its tables."""
    told += overrides
    return {new_key(key): value for key, value in overrides.items()}


def say_new(told: list[str]) -> None:
    """Say the new spelling of the old ones of these keys in one line on standard error, once in this process."""
    if new := [key for key in dict.fromkeys(told) if key not in _said and new_key(key) != key]:
        _said.update(new)
        keys = ", ".join(f"{key} is now {new_key(key)}" for key in new)
        print(f"old spelling, which the next version does not read: {keys}", file=sys.stderr)


def _place(job: dict[str, object], key: str, value: object, old: str, source: str) -> None:
    *tables, last = key.split(".")
    for table in tables:
        inner = job.setdefault(table, {})
        if not isinstance(inner, dict):
            raise UserError(f"{source}: {table}: got {inner!r:.80}, expected a table")
        job = cast("dict[str, object]", inner)
    if last in job:
        raise UserError(f"{source}: {key}: got it in its old spelling {old} too, expected one of them")
    job[last] = value
