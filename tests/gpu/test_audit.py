"""Steps of a run on the device, computed again there on the run's own cut and on another one: the same digests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.commands import isthmus

from .test_pipeline import FLEET, JOB


@pytest.mark.parametrize("stages", [2, 1])
def test_steps_are_computed_again(stages: int, gpu_name: str, tmp_path: Path) -> None:
    (tmp_path / "fleet.toml").write_text(FLEET, encoding="utf-8")
    (tmp_path / "again.toml").write_text(FLEET.replace("count = 2", f"count = {stages}"), encoding="utf-8")
    job = JOB.format(name="a", folder=tmp_path, width=32, precision="fp32", device=gpu_name, compile="false")
    kept = "fingerprints = true\ndeterministic = true\n"
    (tmp_path / "job.toml").write_text(job.replace("steps = 12", "steps = 3") + kept, encoding="utf-8")
    done = isthmus("train", tmp_path / "job.toml")
    assert done.code == 0, done.err
    other = ["--fleet", tmp_path / "again.toml"] if stages == 1 else []
    found = isthmus("audit", tmp_path / "a", "--step", "3", *other)
    assert found.code == 0, found
    assert "steps 1 to 3: as computed again" in found.out
