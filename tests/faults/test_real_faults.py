"""Real processes, real faults. Equal cuts give equal bits: what is done again leaves no trace in the weights."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from isthmus.runtime.coordinator.backend import LocalBackend

from .history import History
from .real import Act, Run, job, pid_of, run


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(tmp_path_factory.mktemp("undisturbed"), job(), spares=0)


def _same_weights(found: Run, expected: Run) -> None:
    assert found.weights.keys() == expected.weights.keys()
    for name, value in expected.weights.items():
        assert torch.equal(found.weights[name], value), name
    last = dict(found.losses)
    assert last == dict(expected.losses)


def _killed(device: str) -> Act:
    return lambda _: os.kill(pid_of(device), signal.SIGKILL)


def test_a_spare_device_takes_the_place_of_one_that_was_killed(tmp_path: Path, undisturbed: Run) -> None:
    found = run(tmp_path, job(), act=(10, _killed("d1")))
    assert found.outcome.outcome == "done", found.notes
    (recovery,) = found.outcome.recoveries
    assert "'d1' was lost: its process was killed by SIGKILL" in recovery.reason
    assert not recovery.from_checkpoint and recovery.step >= 4
    _same_weights(found, undisturbed)


@pytest.mark.long
def test_who_is_left_goes_on_alone_from_the_copies_that_it_kept(tmp_path: Path) -> None:
    found = run(tmp_path, job(), spares=0, act=(10, _killed("d0")))
    assert found.outcome.outcome == "done", found.notes
    (recovery,) = found.outcome.recoveries
    assert not recovery.from_checkpoint and 4 <= recovery.step <= 12
    assert sorted({step for step, _ in found.losses}) == list(range(24))


@pytest.mark.long
def test_without_snapshots_the_last_checkpoint_is_gone_back_to(tmp_path: Path, undisturbed: Run) -> None:
    made = job(snapshots=False, save_every=6)
    found = run(tmp_path, made, act=(10, _killed("d0")))
    (recovery,) = found.outcome.recoveries
    assert recovery.from_checkpoint and recovery.step == 6
    _same_weights(found, undisturbed)


@pytest.mark.long
def test_a_device_that_is_stopped_is_evicted_and_comes_back(tmp_path: Path, undisturbed: Run) -> None:
    def stop(history: History) -> None:
        pid = pid_of("d1")
        os.kill(pid, signal.SIGSTOP)
        time.sleep(14)
        with contextlib.suppress(ProcessLookupError):  # the run may be over
            os.kill(pid, signal.SIGCONT)

    found = run(tmp_path, job(steps=40, timeout="4 s"), act=(8, stop))
    assert found.outcome.outcome == "done", found.notes
    assert "silent for 4 s" in found.outcome.recoveries[0].reason
    expected = run(tmp_path / "undisturbed", job(steps=40), spares=0)
    _same_weights(found, expected)


@pytest.mark.long
def test_a_run_with_nobody_left_says_why_and_how_far_it_came(tmp_path: Path) -> None:
    found = run(tmp_path, job(save_every=4), devices=1, spares=0, act=(6, _killed("d0")))
    assert found.outcome.outcome == "lost"
    assert "killed by SIGKILL; no other device is left" in found.outcome.reason


def test_processes_that_all_die_at_once_are_started_again(tmp_path: Path, undisturbed: Run) -> None:
    def kill(history: History) -> None:
        for name in ("d0", "d1"):
            _killed(name)(history)

    made = job(snapshots=False, save_every=4)
    found = run(tmp_path, made, spares=0, backend=LocalBackend(starts_again=True), act=(6, kill))
    assert found.outcome.outcome == "done", found.outcome.reason
    assert any(note.endswith("again, attempt 1 of 3") for note in found.notes), found.notes
    _same_weights(found, undisturbed)


@pytest.mark.long
def test_one_process_that_dies_alone_is_not_started_again(tmp_path: Path) -> None:
    found = run(tmp_path, job(), spares=0, backend=LocalBackend(starts_again=True), act=(3, _killed("d0")))
    assert "d0" not in found.outcome.periods[-1].plan.devices


@pytest.mark.long
def test_a_kill_again_and_again(tmp_path: Path) -> None:
    """Devices start anew a second after they were killed."""
    over = threading.Event()

    def kill(history: History) -> None:
        for name in ("d0", "d1", "d0"):
            _killed(name)(history)
            if over.wait(6):
                break  # or it would be devices of another test's run

    try:
        found = run(tmp_path, job(steps=30), spares=0, backend=LocalBackend(respawn_after_s=1.0), act=(4, kill))
    finally:
        over.set()
    assert found.outcome.outcome == "done", found.notes
    assert found.outcome.recoveries
    assert sorted({step for step, _ in found.losses}) == list(range(30))
