"""Every mode against one process that does the work of all, under torchrun."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.sync.torchrun import torchrun

CASES = Path(__file__).parent / "parity_cases.py"
TOLERANCE = 1e-9


def test_modes_equal_one_process() -> None:
    *told, last = torchrun(4, CASES).splitlines()
    right = [float(share) for share in re.findall(r"worker \d: ([\d.]+)% of", "\n".join(told))]
    assert len(right) == 4, told
    assert min(right) > 75, told  # 10 by chance
    found = json.loads(last)
    for workers, cases in ((4, 35), (2, 80)):
        assert sum(name.startswith(f"{workers} workers") for name in found) >= cases
    wrong = {name: difference for name, difference in found.items() if not difference <= TOLERANCE}
    assert not wrong
