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
from pathlib import Path

import msgspec
import pytest
import torch

from isthmus.accelerators import AUTO, open_accelerator

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/gpu/results"
PATHS = ("tests/accelerators", "tests/training/test_codecs_on_devices.py", "tests/gpu")


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


class Table:
    """A plugin of pytest."""

    def __init__(self) -> None:
        self.rows: dict[str, Row] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            module = item.getparent(pytest.Module)
            said = (module.obj.__doc__ or "").strip().splitlines() if module is not None else []
            self.rows.setdefault(item.nodeid.partition("::")[0], Row(said[0] if said else item.path.name))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        row = self.rows[report.nodeid.partition("::")[0]]
        row.seconds += report.duration
        row.failed += report.failed
        row.skipped += report.skipped
        if report.when == "call":
            row.passed += report.passed
            row.figures |= {name: str(value) for name, value in report.user_properties}


def main() -> int:
    table = Table()
    code = pytest.main([*(path for path in PATHS if (ROOT / path).exists()), "-q"], plugins=[table])
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
        *(row.line(hardware=device.asynchronous) for row in table.rows.values()),
    ]
    print("\n".join(lines))
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "test-gpu.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    written = {"about": about, "rows": [msgspec.to_builtins(row) for row in table.rows.values()]}
    (RESULTS / "test-gpu.json").write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
