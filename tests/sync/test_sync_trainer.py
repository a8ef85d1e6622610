"""An unchanged script of the Trainer of transformers with one callback, by torchrun's launcher."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sync.torchrun import environment


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed")
@pytest.mark.long
def test_the_trainer_with_the_callback_is_the_loop_with_sync_bit_for_bit(tmp_path: Path) -> None:
    cases = Path(__file__).parent / "trainer_cases.py"
    done = subprocess.run(
        [sys.executable, str(cases), str(tmp_path)], env=environment(), capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert "got max_grad_norm=1.0 in a mode that updates inside backward" in found.pop("clipped")
        assert found.pop("plans of dream") == 1
        assert len(found) == 6 and all(value is True for value in found.values()), found


@pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="lightning is not installed")
@pytest.mark.long
def test_lightning_with_the_strategy_is_the_loop_with_sync_bit_for_bit(tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2"]
    cases = Path(__file__).parent / "lightning_cases.py"
    done = subprocess.run(
        [sys.executable, *torchrun, str(cases), str(tmp_path)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert len(found) == 4 and all(value is True for value in found.values()), found
