"""The files in examples/deploy name commands and options that exist, and are what their readers take."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from isthmus.cli.app import commands

DEPLOY = Path(__file__).parents[1] / "examples" / "deploy"
FILES = sorted(path for path in DEPLOY.rglob("*") if path.is_file())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_their_options_exist(path: Path) -> None:
    text = re.sub(r"\\\n\s*", " ", path.read_text())
    used = re.findall(r"isthmus (join|serve|ticket|drain|devices|submit)\b([^\n`<]*)", text)
    assert used or path.suffix == ".yaml"
    for command, rest in used:
        known = {option for parameter in commands()[command].params for option in parameter.opts}
        assert set(re.findall(r"(?<!\S)--[a-z-]+", rest)) <= known, (command, rest)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_the_units_are_units() -> None:
    units = [path for path in FILES if path.suffix == ".service"]
    told = subprocess.run(["systemd-analyze", "verify", *units], capture_output=True, text=True, timeout=30).stderr
    mine = [line for line in told.splitlines() if "isthmus" in line and "/opt/isthmus/bin/isthmus" not in line]
    assert len(units) == 2 and not mine, mine


def _batch(folder: Path, ranks: int, stand_in: str) -> subprocess.Popen[str]:
    """The script, with another program in place of `isthmus` and `torchrun`."""
    programs = folder / "bin"
    programs.mkdir()
    for name in ("isthmus", "torchrun"):
        (programs / name).write_text(f"#!/bin/bash\n{stand_in}\n")
        (programs / name).chmod(0o755)
    return subprocess.Popen(
        ["bash", DEPLOY / "slurm" / "join.sbatch"],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={
            "PATH": f"{programs}:{os.environ['PATH']}",
            "HOME": str(folder),
            "SLURM_JOB_NAME": "desk",
            "ISTHMUS_RANKS": str(ranks),
        },
    )


def test_the_batch_script_ends_as_the_device_does(tmp_path: Path) -> None:
    process = _batch(tmp_path, 1, 'echo "$@"; exit 2')
    told, _ = process.communicate(timeout=30)
    state = tmp_path / "isthmus" / "desk"
    expected = f"join --name desk --state {state} --ticket-file {tmp_path}/isthmus/ticket --relayed\n"
    assert (told, process.returncode) == (expected, 2), "a ticket that is refused is a job that failed"


def test_the_batch_script_ends_the_device(tmp_path: Path) -> None:
    (tmp_path / "isthmus" / "desk").mkdir(parents=True)
    (tmp_path / "isthmus" / "desk" / "membership.json").touch()
    process = _batch(tmp_path, 2, 'trap "echo over; exit 130" TERM; echo "$@"; while true; do sleep 0.1; done')
    assert process.stdout is not None
    assert "-m isthmus join --name desk" in (told := process.stdout.readline()) and "ticket" not in told
    process.send_signal(signal.SIGINT)  # as Slurm, to the script alone
    assert (*process.communicate(timeout=30), process.returncode) == ("over\n", None, 0)
