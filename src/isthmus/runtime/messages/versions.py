"""The versions that must match before two machines train one model together."""

from __future__ import annotations

import functools
import platform
import sys

import msgspec
import torch

from isthmus.wire_types import Count, Id, Name

PROTOCOL = 34  # the version of the messages. It is raised whenever one of them changes.
_PROCESSORS = {"amd64": "x86_64", "arm64": "aarch64"}


class Versions(msgspec.Struct, frozen=True):
    protocol: Count
    torch: Name  # for people: operators are compared one by one, where a graph calls them
    processor: Name
    byteorder: Id


@functools.cache
def versions_here() -> Versions:
    machine = platform.machine().lower()
    return Versions(
        protocol=PROTOCOL,
        torch=str(torch.__version__),
        processor=_PROCESSORS.get(machine, machine),
        byteorder=sys.byteorder,
    )


def mismatch(coordinator: Versions, device: Versions) -> str | None:
    """Return why the two cannot work together, with both versions; None when they can.

    Versions of torch and kinds of processor may differ: results then agree to rounding, not bit for bit.
    """
    pairs = {
        "protocol": (str(coordinator.protocol), str(device.protocol)),
        "byte order": (coordinator.byteorder, device.byteorder),
    }
    for what, (ours, theirs) in pairs.items():
        if ours != theirs:
            both = f"the device has {theirs[:40]!r}, the coordinator {ours[:40]!r}"
            return f"{what}: {both}: install the same isthmus"
    return None
