"""What docs/federated.md shows works as it stands there."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from isthmus.federated.cohorts import chooser
from isthmus.protocol.federated_participation import Participation, cohort
from tests.federated.test_run_folders import JOB, server_model
from tests.runtime.commands import isthmus

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "federated.md").read_text(encoding="utf-8")
CHOOSERS: list[str] = []
BLOCKS: list[str] = []
for block in re.findall(r"```python\n(.*?)```", PAGE, re.S):
    (BLOCKS if re.search(r"^class ", block, re.M) else CHOOSERS).append(block)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_an_algorithm_of_the_docs_trains(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "documented", raising=False)
    (tmp_path / "documented.py").write_text(BLOCKS[number])
    (name,) = re.findall(r"^class (\w+)\(", BLOCKS[number], re.M)
    text = JOB.format(folder=tmp_path)
    (tmp_path / "job.toml").write_text(text.replace('"fedavg"', f'"documented:{name}"'))
    monkeypatch.syspath_prepend(str(tmp_path))
    done = isthmus("train", tmp_path / "job.toml")
    assert done.code == 0, done.err
    if name == "FedAvg":
        (tmp_path / "ours.toml").write_text(text)
        assert isthmus("train", tmp_path / "ours.toml", "--run", tmp_path / "ours").code == 0
        assert server_model(tmp_path / "runs" / "small").equal(server_model(tmp_path / "ours"))


def test_clients_are_chosen_as_documented(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = CHOOSERS
    monkeypatch.delitem(sys.modules, "choice", raising=False)
    (tmp_path / "choice.py").write_text(block)
    monkeypatch.syspath_prepend(str(tmp_path))
    (name,) = re.findall(r'"(choice:\w+)"', PAGE)
    rules, sizes = Participation(clients=4, select=name), np.array([3, 9, 1, 8, 2, 2, 2, 2])
    rounds = [set(cohort(rules, sizes, 0, round_, choose=chooser(rules)).tolist()) for round_ in range(9)]
    assert all({1, 3} < clients and len(clients) == 4 for clients in rounds)
    assert set().union(*rounds) == set(range(8))


def test_there_is_one() -> None:
    assert BLOCKS


def test_the_job_is_the_example() -> None:
    example = (ROOT / "examples" / "fed-digits.toml").read_text(encoding="utf-8")
    assert example.partition("\n")[2] in PAGE
