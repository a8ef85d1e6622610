"""The versions that must match before two machines train one model together."""

from __future__ import annotations

import functools
import hashlib
import platform
import re
import sys

import msgspec
import torch

from isthmus.graph.allowlist import ALLOWED

PROTOCOL = 20
"""Of the messages. Raised whenever one of them changes."""
_PROCESSORS = {"amd64": "x86_64", "arm64": "aarch64"}


class Versions(msgspec.Struct, frozen=True):
    protocol: int
    torch: str
    operators: str
    """Hash of the schemas of all operators that may travel, as this torch knows them."""
    processor: str
    byteorder: str


@functools.cache
def versions_here() -> Versions:
    machine = platform.machine().lower()
    return Versions(
        protocol=PROTOCOL,
        torch=str(torch.__version__),
        operators=_operators(),
        processor=_PROCESSORS.get(machine, machine),
        byteorder=sys.byteorder,
    )


def mismatch(coordinator: Versions, device: Versions) -> str | None:
    """Why the two cannot work together, with both versions; None when they can.

    Patch releases of torch and kinds of processor may differ: results then agree to rounding, not bit for bit.
    """
    pairs = {
        "protocol": (str(coordinator.protocol), str(device.protocol)),
        "torch": (_minor(coordinator.torch), _minor(device.torch)),
        "operators": (coordinator.operators, device.operators),
        "byte order": (coordinator.byteorder, device.byteorder),
    }
    for what, (ours, theirs) in pairs.items():
        if ours != theirs:
            both = f"the device has {theirs[:40]!r}, the coordinator {ours[:40]!r}"
            return f"{what}: {both}: install the same isthmus and torch"
    return None


def _minor(version: str) -> str:
    """2.13 of 2.13.0+cu130."""
    found = re.match(r"\d+\.\d+", version)
    return found.group() if found else version


def _operators() -> str:
    found = torch._C._jit_get_schemas_for_operator  # pyright: ignore[reportPrivateUsage]  # there is no public way
    schemas = sorted(str(schema) for name in ALLOWED for schema in found(f"aten::{name}"))
    return hashlib.sha256("\n".join(schemas).encode()).hexdigest()[:16]
