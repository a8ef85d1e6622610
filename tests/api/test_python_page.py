"""The snippets of docs/python.md run, one after another, and those of docs/parity.md and the README."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import isthmus

ROOT = Path(__file__).parents[2]


def run_snippets(page: str) -> dict[str, object]:
    """The names that they leave."""
    names: dict[str, object] = {}
    for snippet in re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE):
        exec(snippet, names)
    return names


@pytest.mark.long
def test_every_snippet_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run_snippets("docs/python.md")
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("done ") and said[1] == "24"
    assert said[-2].startswith("1 ") and said[-1].startswith("2 ")
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["linear", "sequential", "sequential-2"]


@pytest.mark.long
def test_a_plain_loop_over_a_runs_batches_has_its_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As docs/parity.md shows it, in float32 and in bf16."""
    monkeypatch.chdir(tmp_path)
    names = run_snippets("docs/parity.md")
    assert capsys.readouterr().out.splitlines()[-2:] == ["True", "True"]
    run = names["run"]
    assert isinstance(run, isthmus.Run) and len(run.plan.used) == 2 and run.plan.micro_batches > 1
    assert names["losses"] == [point.loss for point in run.losses]


def test_the_snippet_of_the_readme_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process; `make test-long` types it on a newcomer's machine (`tests/docs/test_pages.py`)."""
    monkeypatch.chdir(tmp_path)
    run = run_snippets("README.md")["run"]
    assert isinstance(run, isthmus.Run) and len(run.losses) == 20
    step_s, loss, checkpoint = capsys.readouterr().out.splitlines()[-1].split()
    assert float(step_s) > 0 and float(loss) == run.losses[-1].loss and Path(checkpoint).is_dir()
