"""What every benchmark has: its options, the machine's description, and the file with its figures."""

from __future__ import annotations

import argparse
import os
import platform
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import msgspec

T = TypeVar("T")


def options_of(description: str | None, figures: Path, quick: str = "") -> argparse.ArgumentParser:
    """A parser with `--json`, which is `figures` if not given, and with `--quick` for a benchmark that says what a
    quick run leaves out."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if quick:
        parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--json", type=Path, default=figures, metavar="PATH", help="where the figures go")
    return parser


def chosen(
    parser: argparse.ArgumentParser, option: str, pattern: str, items: Iterable[T], key: Callable[[T], str]
) -> list[T]:
    """The items whose key has a match of the pattern; the parser's error where there are none."""
    every = list(items)
    found = [item for item in every if re.search(pattern, key(item))]
    if not found:
        parser.error(f"{option}: got {pattern!r}, which matches none of {', '.join(map(key, every))}")
    return found


def in_time(seconds: float, most_s: float) -> bool:
    """Whether a time is within its limit. Where BENCHMARK_TIMES is "any" it always is: the machine has other work."""
    return os.environ.get("BENCHMARK_TIMES") == "any" or seconds <= most_s


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
