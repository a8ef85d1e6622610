"""What the examples show, read off their text; `test_sync_torchrun.py` runs them."""

from __future__ import annotations

import difflib

from tests.sync.torchrun import ROOT

EXAMPLES = ROOT / "examples" / "torchrun"


def test_three_lines_are_changed() -> None:
    ours, theirs = ((EXAMPLES / name).read_text().partition('"""\n\n')[2] for name in ("synced.py", "ddp.py"))
    changes = difflib.ndiff(theirs.splitlines(), ours.splitlines())
    added = [line[2:].strip() for line in changes if line.startswith("+ ") and line[2:].strip()]
    assert len(added) == 3, added
