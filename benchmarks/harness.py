"""What every benchmark has: its options, the machine's description, and the file with its figures."""

from __future__ import annotations

import argparse
import os
import platform
from pathlib import Path

import msgspec


def options_of(description: str | None, figures: Path, quick: str = "") -> argparse.ArgumentParser:
    """A parser with `--json`, which is `figures` if not given, and with `--quick` for a benchmark that says what a
    quick run leaves out."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if quick:
        parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--json", type=Path, default=figures, metavar="PATH", help="where the figures go")
    return parser


def machine() -> str:
    """System, processor and cores, for the figures."""
    return f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"


def write_figures(path: Path, figures: object) -> None:
    """As indented JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(figures), indent=1) + b"\n")


def own_status(field: str) -> int:
    """Of this process, as Linux counts it: memory (`VmRSS`, `VmHWM`) in bytes, `Threads`."""
    rows = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    number, *unit = rows[field].split()
    return int(number) << 10 if unit == ["kB"] else int(number)
