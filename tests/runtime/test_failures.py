"""A device that cannot go on ends the run: one error that names it and says why, of the right family."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from isthmus.data import DataSpec
from isthmus.errors import PeerError, UserError
from isthmus.job import prepare
from isthmus.runtime.conducting.run import check_outcome
from isthmus.runtime.processes.launcher import Place

from .jobs import job_of, random_cut, run


def _data(folder: Path, classes: int) -> DataSpec:
    path = folder / "images.npz"
    np.savez(path, pixel_values=np.zeros((40, 64), np.float32), labels=np.arange(40) % classes)
    return DataSpec(kind="npz", options={"path": str(path)})


def test_data_that_a_device_does_not_have(tmp_path: Path) -> None:
    prepared = prepare(job_of("mlp", {}, _data(tmp_path, 10)))
    (tmp_path / "images.npz").unlink()
    with pytest.raises(UserError, match=r"^device 'd[01]': npz option 'path': no file .*images.npz$"):
        run(prepared, random_cut(prepared, 2, 0), tmp_path)


def test_what_an_operator_raises(tmp_path: Path) -> None:
    prepared = prepare(job_of("mlp", {}, _data(tmp_path, 40)))
    plan, outcome = run(prepared, random_cut(prepared, 2, 0), tmp_path)
    with pytest.raises(PeerError, match=r"^device 'd1': IndexError: Target \d+ is out of bounds\.$"):
        check_outcome(outcome)
    assert "Traceback" in (tmp_path / "logs" / "d1.log").read_text()
    assert plan.stages[1].device == "d1"


def test_a_process_that_does_not_start(tmp_path: Path) -> None:
    prepared = prepare(job_of("mlp", {}, _data(tmp_path, 10)))
    _, outcome = run(prepared, random_cut(prepared, 2, 0), tmp_path, places={"d1": Place(prefix=("false",))})
    with pytest.raises(PeerError, match=r"^device 'd1' was lost: its process ended with code 1, see .*d1\.log$"):
        check_outcome(outcome)
