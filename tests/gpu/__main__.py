"""`make test-gpu`: everything that has a GPU side, on this machine's accelerator. Prints one table and writes it.

A row is a file of tests. Its figures are what the tests recorded (`record_property`). Without an accelerator a row says
"not run", or that it ran on the emulated one. `ISTHMUS_GPU` names another device than the first one.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
import torch

from isthmus.accelerators import AUTO, open_accelerator

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/gpu/results"
PATHS = ("tests/accelerators", "tests/training/test_codecs_on_devices.py", "tests/gpu")


JOBS = max(1, min(8, (os.cpu_count() or 1) // 2))
"""Processes of tests at a time. Each file has its own: one that computed on hardware cannot be forked any more."""


class Row(msgspec.Struct):
    what: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    figures: dict[str, str] = {}

    def line(self, *, hardware: bool) -> str:
        figures = "; ".join(f"{name} {value}" for name, value in self.figures.items())
        return f"| {self.what} | {self._result(hardware)} | {figures} | {self.seconds:.1f} |"

    def _result(self, hardware: bool) -> str:
        where = "" if hardware else ", emulated; on hardware: not run"
        if self.failed:
            return f"{self.failed} of {self.failed + self.passed} failed{where}"
        return f"{self.passed} passed{where}" if self.passed else "not run"


class Recorder:
    """A plugin of pytest that fills one row."""

    def __init__(self) -> None:
        self.row = Row("")

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items[:1]:
            module = item.getparent(pytest.Module)
            said = (module.obj.__doc__ or "").strip().splitlines() if module is not None else []
            self.row.what = said[0] if said else item.path.name

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        row = self.row
        row.seconds += report.duration
        row.failed += report.failed
        row.skipped += report.skipped
        if report.when == "call":
            row.passed += report.passed
            row.figures |= {name: str(value) for name, value in report.user_properties}


def run_file(path: str, result: str) -> int:
    """One file of tests in this process; its row goes to `result`."""
    recorder = Recorder()
    code = pytest.main([path, "-q", "-p", "no:cacheprovider"], plugins=[recorder])
    Path(result).write_bytes(msgspec.json.encode(recorder.row))
    return int(code)


def row_of(path: Path) -> tuple[Row, str]:
    """A file's row, and what pytest printed where a test failed."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "row.json"
        command = [sys.executable, "-m", "tests.gpu", str(path), str(result)]
        environment = {**os.environ, "ISTHMUS_FAULTS": "1"}  # with what is marked long
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if not result.is_file():
            return Row(path.name, failed=1), done.stdout
        row = msgspec.json.decode(result.read_bytes(), type=Row)
        return row, done.stdout if row.failed else ""


def main() -> int:
    given = [ROOT / path for path in PATHS]
    files = [file for path in given for file in (sorted(path.glob("test_*.py")) if path.is_dir() else [path])]
    rows: list[Row] = []
    with ThreadPoolExecutor(JOBS) as pool:
        for row, printed in pool.map(row_of, files):
            print(printed, end="", flush=True)
            rows.append(row)
    device = open_accelerator(os.environ.get("ISTHMUS_GPU", AUTO), "ISTHMUS_GPU")
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    about = {
        "device": device.name if device.asynchronous else "none: no accelerator here",
        "torch": torch.__version__,
        "commit": commit,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
    lines = [
        f"Last run: {', '.join(f'{name} {value}' for name, value in about.items())}.",
        "",
        "| what | result | figures | seconds |",
        "|---|---|---|---|",
        *(row.line(hardware=device.asynchronous) for row in rows),
    ]
    print("\n".join(lines))
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "test-gpu.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    written = {"about": about, "rows": [msgspec.to_builtins(row) for row in rows]}
    (RESULTS / "test-gpu.json").write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    return 1 if any(row.failed for row in rows) else 0


if __name__ == "__main__":
    sys.exit(run_file(*sys.argv[1:]) if sys.argv[1:] else main())
