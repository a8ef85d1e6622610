"""Under torchrun's launcher, in two launches: every mode against one process that does it all; killed and resumed.

Starting processes takes longer than what they do: two workers train, save and are killed; then four come, of which two
go on with what was saved when all the rest is done.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from safetensors.torch import load_file

from tests.sync.small import MEETING
from tests.sync.torchrun import environment

HERE = Path(__file__).parent
TOLERANCE = 1e-9


class Launched(NamedTuple):
    whole: Path
    """Checkpoints of runs to the end."""
    killed: Path
    """Of the same runs, broken off and resumed."""
    description: list[str]
    """What their workers printed."""


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Launched:
    whole, killed = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("killed")
    done = subprocess.run(
        [sys.executable, str(HERE / "launches.py"), str(whole), str(killed)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, f"ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return Launched(whole, killed, done.stdout.splitlines())


@pytest.mark.long
def test_the_changed_script_learns(launched: Launched) -> None:
    right = [float(share) for share in re.findall(r"worker \d: ([\d.]+)% of", "\n".join(launched.description))]
    assert len(right) == 4, launched.description
    assert min(right) > 75, launched.description  # 10 by chance


@pytest.mark.long
def test_modes_equal_one_process(launched: Launched) -> None:
    found = json.loads(launched.killed.with_suffix(".json").read_text())
    for workers, cases in ((4, 28), (2, 81)):
        assert sum(name.startswith(f"{workers} workers") for name in found) >= cases
    wrong = {name: difference for name, difference in found.items() if not difference <= TOLERANCE}
    assert not wrong


@pytest.mark.long
def test_killed_and_resumed_within_a_period(launched: Launched) -> None:
    """As if it had not been killed, in every mode. Saved after 8 and 16 steps of periods of 5."""
    whole, killed, lines = launched
    told = "\n".join(lines)
    assert told.count("from step 16 to 24") == 2
    assert told.count("from step 8 to 24") == 2 * (len(MEETING) - 1)
    assert _same(whole, killed)
    # What was compared does differ between workers: they are between averages.
    one, two = (load_file(whole / "local" / "step-000024" / f"worker-{n}.safetensors") for n in (0, 1))
    assert not one["model.0.weight"].equal(two["model.0.weight"])


def _same(folder: Path, other: Path) -> bool:
    files = sorted(path.relative_to(folder) for path in folder.rglob("*.safetensors"))
    assert files
    for file in files:
        one, two = load_file(folder / file), load_file(other / file)
        assert one.keys() == two.keys()
        if not all(one[name].equal(two[name]) for name in one if name != "sync.dream"):
            return False
    return True
