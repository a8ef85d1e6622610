"""`isthmus simulate` measures clients as the run will train them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.federated.test_run_folders import JOB
from tests.runtime.commands import isthmus


class Noting(nn.Linear):
    """Writes down how many threads it computes with, and for how many clients at once."""

    def __init__(self, path: str) -> None:
        super().__init__(64, 10)
        self._path = path

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        with Path(self._path).open("a") as file:
            file.write(f"{torch.get_num_threads()}\n")
        return nn.functional.cross_entropy(super().forward(pixel_values), labels)


@pytest.mark.parametrize("scheme", ["sp", "ours"])
def test_clients_are_measured_with_the_runs_threads_and_scheme(scheme: str, tmp_path: Path) -> None:
    text = JOB.format(folder=tmp_path).replace('name = "mlp"', 'name = "tests.federated.test_foretelling:Noting"')
    text = text.replace("{ features = 64, width = 4, layers = 1, classes = 10 }", f'{{ path = "{tmp_path}/threads" }}')
    (tmp_path / "job.toml").write_text(text.replace('scheme = "sp"', f'scheme = "{scheme}"\nexecutors = 2'))
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        done = isthmus("simulate", tmp_path / "job.toml", "--json")
    finally:
        torch.set_num_threads(before)
    assert done.code == 0, done.err
    broadcast = json.loads(done.out)
    assert (broadcast["rounds"], broadcast["executors"]) == (3, 1 if scheme == "sp" else 2)
    assert broadcast["overhead_s"] > 0 and broadcast["fixed_s"] + broadcast["seconds_per_sample"] > 0
    assert set((tmp_path / "threads").read_text().split()) == {"1"}
    assert not (tmp_path / "runs").exists(), "nothing is left behind"
