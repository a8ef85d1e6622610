"""Every mode against one process that does the work of all, under torchrun."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.sync.torchrun import torchrun

CASES = Path(__file__).parent / "parity_cases.py"
TOLERANCE = 1e-9


@pytest.mark.parametrize(
    ("workers", "parts"),
    [
        (2, ("parity", "periods", "planned", "shared", "lbfgs", "different", "unequal", "packed")),
        (4, ("parity", "planned")),
    ],
)
def test_modes_equal_one_process(workers: int, parts: tuple[str, ...]) -> None:
    *told, last = torchrun(workers, CASES, *parts).splitlines()
    right = [float(share) for share in re.findall(r"worker \d: ([\d.]+)% of", "\n".join(told))]
    assert len(right) == workers, told
    assert min(right) > 75, told  # 10 by chance
    found = json.loads(last)
    assert len(found) >= 13
    wrong = {name: difference for name, difference in found.items() if not difference <= TOLERANCE}
    assert not wrong
