"""Slurm: the script that is submitted, what its programs answer, and preempted agents that come back.

submitit's local executor starts the tasks here; programs of Slurm are stand-ins.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import stat
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from isthmus.errors import PeerError, UserError
from isthmus.runtime.launchers.launcher import AgentSpec, AgentState, open_launcher
from isthmus.runtime.launchers.slurm import MODULE, SlurmLauncher
from isthmus.runtime.launchers.slurm_task import AgentFolder
from isthmus.runtime.service import fleet_coordinator
from tests.fleet_service.parties import serving, soon

from .agents import processes_with
from .stand_ins import StandIns

WITHIN_S = 120.0
RUNNING, QUEUED, STARTING, LOST = AgentState.RUNNING, AgentState.QUEUED, AgentState.STARTING, AgentState.LOST
SCRIPT = """\
#!/bin/bash

# Parameters
#SBATCH --account=physics
#SBATCH --constraint=a100
#SBATCH --gpus-per-node=8
#SBATCH --job-name=isthmus
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output={folder}/%j_0_log.out
#SBATCH --partition=gpu
#SBATCH --qos=normal
#SBATCH --requeue
#SBATCH --signal=USR2@120
#SBATCH --time=90

# command
export SUBMITIT_EXECUTOR=slurm
srun --unbuffered --output {folder}/%j_%t_log.out {python} -u -m {module} {folder}/tasks-1.json
"""
OPTIONS = {
    "partition": "gpu",
    "account": "physics",
    "qos": "normal",
    "time": "90 min",
    "gpus_per_node": 8,
    "warning": "2 min",
    "parameters": {"constraint": "a100"},
}


def _specs(*names: str) -> list[AgentSpec]:
    return [AgentSpec(name=name, arguments=("--device", "cpu"), ticket=f"isthmus1-{name}") for name in names]


def _launcher(**options: object) -> SlurmLauncher:
    found = open_launcher("slurm", options)
    assert isinstance(found, SlurmLauncher)
    return found


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIns:
    """Slurm with the partitions cpu and gpu, which accepts each job as number 7."""
    found = StandIns(tmp_path, monkeypatch, sys.executable)
    found.say("sinfo", "cpu\ngpu\n")
    found.say("sbatch", "Submitted batch job 7\n")
    found.say("squeue", "PENDING\n")
    for name in ("srun", "scancel"):
        found.say(name)
    return found


def test_the_script_is_shown_without_slurm_and_is_what_is_submitted(programs: StandIns, tmp_path: Path) -> None:
    launcher, specs = _launcher(**OPTIONS), _specs("desk", "rack/1")
    shown = launcher.render(specs, tmp_path)
    folder = str(Path(shown.split()[-1]).parent)
    assert shown == SCRIPT.format(folder=folder, python=sys.executable, module=MODULE)
    assert not Path(folder).exists() and not programs.calls("sbatch")

    launcher.check()
    launcher.start(specs, tmp_path, lambda *_: None)
    (submitted,) = tmp_path.glob("slurm-*/7_submission.sh")
    assert submitted.read_text() == SCRIPT.format(folder=submitted.parent, python=sys.executable, module=MODULE)
    assert stat.S_IMODE(submitted.parent.stat().st_mode) == 0o700
    tickets = sorted(submitted.parent.glob("agents/*/ticket"))
    assert [path.read_text() for path in tickets] == ["isthmus1-desk", "isthmus1-rack/1"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in tickets} == {0o600}
    held = [path for path in submitted.parent.rglob("*") if path.is_file() and b"isthmus1-" in path.read_bytes()]
    assert sorted(held) == tickets, "neither the script nor the list of agents has a ticket"
    assert not list(submitted.parent.rglob("*.pkl"))

    programs.say("squeue", "CANCELLED\n")
    launcher.stop()
    assert programs.calls("scancel") == [["7"]] and not submitted.parent.exists()


def test_states_follow_the_job_and_its_tasks(
    programs: StandIns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("isthmus.runtime.launchers.slurm.ASK_S", -1.0)
    launcher = _launcher()
    launcher.start(_specs("desk"), tmp_path, lambda *_: None)
    (folder,) = tmp_path.glob("slurm-*")
    task = AgentFolder(folder, "desk")

    def state(job: str, error: str = "") -> AgentState:
        programs.say("squeue", f"{job}\n" if job else "", error, 1 if error else 0)
        return launcher.states()["desk"]

    assert [state("PENDING"), state("RUNNING")] == [QUEUED, STARTING], "no task has begun"
    task.note(type(task.status()).RUNNING)
    assert [state("RUNNING"), state("COMPLETING"), state("PENDING")] == [RUNNING, RUNNING, QUEUED], "requeued"
    assert state("RUNNING") is RUNNING
    assert state("", "slurm_load_jobs error: Unable to contact slurm controller") is RUNNING, "as it was"
    assert state("NODE_FAIL") is LOST and state("RUNNING") is LOST, "a job that is over is not asked for again"

    programs.say("sbatch", "Submitted batch job 8\n")
    programs.say("squeue", "RUNNING\n")
    launcher.restart(_specs("desk")[0])
    assert (task.attempt(), launcher.states()["desk"]) == (2, STARTING)
    task.note(type(task.status()).ENDED)
    assert launcher.states()["desk"] is AgentState.ENDED
    assert state("", "slurm_load_jobs error: Invalid job id specified") is AgentState.ENDED
    launcher.stop()


def test_what_slurm_refuses_is_said(programs: StandIns, tmp_path: Path) -> None:
    programs.say("sbatch", error="sbatch: error: Batch job submission failed: Requested node count\n", code=1)
    launcher = _launcher()
    with pytest.raises(PeerError, match=r"slurm: the job was refused: .*Requested node count"):
        launcher.start(_specs("desk"), tmp_path, lambda *_: None)
    launcher.stop()
    assert not list(tmp_path.glob("slurm-*")), "no ticket is left"


def test_what_is_missing_is_said_in_one_line(programs: StandIns, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="unknown partition 'gpus': did you mean 'gpu'"):
        _launcher(partition="gpus").check()
    with pytest.raises(UserError, match="time: got '5 s', expected at least a minute"):
        _launcher(time="5 s").check()
    programs.say("sinfo", error="slurm_load_partitions: Unable to contact slurm controller\n", code=1)
    with pytest.raises(UserError, match=r"does not answer \(.*Unable to contact.*\): start slurmctld"):
        _launcher().check()
    programs.say("sinfo", error="slurm_load_partitions: Protocol authentication error\n", code=1)
    with pytest.raises(UserError, match=r"does not know who asks \(.*authentication error\): start munged, with the"):
        _launcher().check()
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(UserError, match="up --on slurm needs Slurm, got no sbatch here: start it on a login node"):
        _launcher().check()
    _launcher(cluster="local").check()
    monkeypatch.setitem(sys.modules, "submitit", SimpleNamespace(__version__="1.4.6"))
    with pytest.raises(UserError, match=r"needs submitit 1.5, got 1.4.6: pip install '.\[slurm\]'"):
        _launcher().check()
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(UserError, match=r"up --on slurm needs submitit: pip install '.\[slurm\]'"):
        _launcher().check()


@pytest.mark.long
def test_a_preempted_agent_comes_back_as_the_same_member(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_coordinator, "WATCH_S", 0.2)
    names = [secrets.token_hex(4)]
    said: list[tuple[str, str]] = []
    with serving(tmp_path / "fleet", timeout_s=30.0) as fleet:
        launcher = _launcher(cluster="local")
        launcher.check()
        specs = [AgentSpec(name=name, arguments=("--device", "cpu"), ticket=fleet.state.ticket()) for name in names]
        try:
            launcher.start(specs, tmp_path, lambda name, line: said.append((name, line)))
            soon(lambda: fleet.service.present == set(names), WITHIN_S)
            (folder,) = tmp_path.glob("slurm-*")
            assert not list(folder.rglob("ticket")), "used"
            members = {member.name: member.id for member in fleet.state.roster.members()}
            before = _tasks(folder)
            assert len(before) == 1
            soon(lambda: any("in the fleet as" in line for _, line in list(said)), WITHIN_S)
            for pid in before:
                os.kill(pid, signal.SIGUSR2)
            soon(lambda: not set(before) & set(_tasks(folder)), WITHIN_S)
            soon(lambda: len(_tasks(folder)) == 1, WITHIN_S)
            soon(lambda: fleet.service.present == set(names), WITHIN_S)
            soon(lambda: set(launcher.states().values()) == {RUNNING}, WITHIN_S)
            assert {member.name: member.id for member in fleet.state.roster.members()} == members
            soon(lambda: sum("in the fleet as" in line for _, line in list(said)) == 2, WITHIN_S)
        finally:
            launcher.stop()
        assert not folder.exists() and not processes_with(str(folder))


def _tasks(folder: Path) -> list[int]:
    return [pid for pid, line in processes_with(str(folder)).items() if MODULE in line]
