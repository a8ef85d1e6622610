"""What fails for load is tried again, then skipped; what fails on a quiet machine fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import quiet
from .quiet import when_quiet


@pytest.mark.parametrize(("waits", "outcome", "tries"), [(True, pytest.skip.Exception, 5), (False, ValueError, 1)])
def test_only_load_excuses(
    waits: bool, outcome: type[BaseException], tries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    total_s, calls = 0.0, 0

    def core_waits_s() -> float:
        nonlocal total_s
        total_s += 10.0 * waits
        return total_s

    @when_quiet
    def fails() -> None:
        nonlocal calls
        calls += 1
        raise ValueError("too late")

    monkeypatch.setattr(quiet, "core_waits_s", core_waits_s)
    with pytest.raises(outcome):
        fails()
    assert calls == tries


def test_the_kernel_s_count_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpu").write_text("some avg10=1.00 avg60=2.00 avg300=3.00 total=1500000\nfull avg10=0.00 total=0\n")
    monkeypatch.setattr(quiet, "PRESSURE", tmp_path / "cpu")
    assert quiet.core_waits_s() == 1.5
    monkeypatch.setattr(quiet, "PRESSURE", tmp_path / "none")
    assert quiet.core_waits_s() == 0
