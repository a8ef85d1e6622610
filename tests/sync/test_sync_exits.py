"""Scripts end as any other, whether or not they call `close`: by real interpreters, which torch aborted.

`ISTHMUS_EXIT_RUNS=100` asks for every mode and every way to end, so often each: an hour.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.sync.torchrun import ROOT

SCRIPT = ROOT / "tests" / "sync" / "exits.py"
RUNS = int(os.environ.get("ISTHMUS_EXIT_RUNS", "0"))
EXPECTED = {
    "closed": {"0 0"},
    "left": {"0 0"},
    "destroyed": {"0 0"},
    "twice": {"0 0"},
    "late": {"0 0"},
    # What the other one still waits for is broken off when a worker fails.
    "raised": {"1 0", "1 1"},
    "exited": {"3 3"},
    "interrupted": {"-2 -2"},
    "gone": {"0 -9", "1 -9"},
}


@pytest.mark.long
def test_no_way_to_end_aborts_or_hangs() -> None:
    chosen = ["--runs", str(RUNS)] if RUNS else ["--modes", "streaming", "--endings", "late", "left", "raised", "gone"]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *chosen],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT / "src")},
    )
    found: dict[str, dict[str, int]] = json.loads(done.stdout)
    assert found
    wrong = {case: codes for case, codes in found.items() if not codes.keys() <= EXPECTED[case.split(", ")[1]]}
    assert not wrong, done.stderr
