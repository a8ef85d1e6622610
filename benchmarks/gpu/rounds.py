"""Federated rounds on the accelerator, on the CPU, and by Flower on the same accelerator: `benchmarks/federated`."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

FEDERATED = Path(__file__).parents[1] / "federated" / "run.py"
OURS = ("ours, 1 executor", "ours, 2 executors")
TORCHS_OWN = ("cuda", "mps", "xpu", "cpu")
"""Kinds of devices that a bare loop and Flower know too."""
WORKLOADS = {"full": "ResNet-18", "small": "MLP, 100 clients"}


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the table."""

    key: str
    size: str
    when: str
    device: str
    side: str
    round_s: float
    """Median."""


class _Row(msgspec.Struct):
    side: str
    round_s: float


class _Report(msgspec.Struct):
    rows: list[_Row]


def sides_of(device: str, peers: bool) -> tuple[str, ...]:
    if device.partition(":")[0] not in TORCHS_OWN:
        return OURS
    return ("bare loop", *OURS, *(("Flower",) if peers else ()))


def measure(size: str, device: str, hardware: str, when: str, *, peers: bool) -> list[Round]:
    """All sides in turn. CalledProcessError where one fails."""
    workload = WORKLOADS[size]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rounds.json"
        subprocess.run(
            [
                sys.executable,
                str(FEDERATED),
                "--only",
                workload,
                "--sides",
                ";".join(sides_of(device, peers)),
                "--device",
                device,
                "--repeats",
                "1",
                "--json",
                str(path),
            ],
            check=True,
            stdout=sys.stderr,
        )
        found = msgspec.json.decode(path.read_bytes(), type=_Report).rows
    return [
        Round(key=workload, size=size, when=when, device=hardware, side=row.side, round_s=row.round_s) for row in found
    ]
