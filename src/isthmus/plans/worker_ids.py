"""Worker ids: under which name each stage of a plan takes part in a run.

A device has one worker id, its own name, for the first of its stages. Where it holds several, as a data holder where
labels stay, each further stage has a worker id made from it: to the protocol these are devices of their own, on
one machine.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

_FURTHER = re.compile(r"/stage [0-9]+$")


def worker_id(device: str, number: int) -> str:
    """Name a device's stage with this number, from 0."""
    return f"{device}/stage {number + 1}" if number else device


def device_of(name: str) -> str:
    return _FURTHER.sub("", name)


def is_first(name: str) -> bool:
    """Whether it is the one that every device has."""
    return device_of(name) == name


def worker_ids_of(devices: Sequence[str]) -> tuple[str, ...]:
    counted: Counter[str] = Counter()
    found: list[str] = []
    for device in devices:
        found.append(worker_id(device, counted[device]))
        counted[device] += 1
    return tuple(found)
