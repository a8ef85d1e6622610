"""The examples under real torchrun: three lines changed; killed and resumed within a period."""

from __future__ import annotations

import difflib
import shutil
import time
from pathlib import Path

from safetensors.torch import load_file

from isthmus.sync import mode_names
from tests.sync.torchrun import ROOT, kill_a_worker, start_torchrun, torchrun

EXAMPLES = ROOT / "examples" / "torchrun"
CASES = Path(__file__).parent / "resume_cases.py"


def test_three_lines_are_changed() -> None:
    ours, theirs = ((EXAMPLES / name).read_text().partition('"""\n\n')[2] for name in ("synced.py", "ddp.py"))
    changes = difflib.ndiff(theirs.splitlines(), ours.splitlines())
    added = [line[2:].strip() for line in changes if line.startswith("+ ") and line[2:].strip()]
    assert len(added) == 3, added


def _same(folder: Path, other: Path) -> bool:
    files = sorted(path.relative_to(folder) for path in folder.rglob("*.safetensors"))
    assert files
    for file in files:
        one, two = load_file(folder / file), load_file(other / file)
        assert one.keys() == two.keys()
        if not all(one[name].equal(two[name]) for name in one if name != "sync.dream"):
            return False
    return True


def test_killed_and_resumed_within_a_period(tmp_path: Path) -> None:
    """As if it had not been killed, in every mode. Saved after 8 and 16 steps of periods of 5."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    with start_torchrun(2, CASES, str(whole), str(killed)) as running:
        deadline_s = time.monotonic() + 120
        while not (killed / "dream" / "step-000024").exists() and time.monotonic() < deadline_s:
            time.sleep(0.02)
        kill_a_worker(running)
    for later in sorted((killed / "dream").iterdir())[2:]:
        shutil.rmtree(later)
    told = torchrun(2, CASES, str(killed))
    assert told.count("from step 16 to 24") == 2
    assert told.count("from step 8 to 24") == 2 * (len(mode_names()) - 1)
    assert _same(whole, killed)
    # What was compared does differ between workers: they are between averages.
    one, two = (load_file(whole / "local" / "step-000024" / f"worker-{n}.safetensors") for n in (0, 1))
    assert not one["model.0.weight"].equal(two["model.0.weight"])
