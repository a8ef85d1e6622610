"""The snippets of docs/python.md run, one after another."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "python.md"


def test_every_snippet_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for snippet in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE):
        exec(snippet, names)
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("done ") and said[1] == "24"
    assert said[-2].startswith("1 ") and said[-1].startswith("2 ")
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["linear", "sequential", "sequential-2"]
