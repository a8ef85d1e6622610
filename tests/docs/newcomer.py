"""A machine as a newcomer has it: PyTorch and the other libraries are there; pip installs Isthmus from a checkout."""

from __future__ import annotations

import os
import signal
import subprocess
import sysconfig
import time
import venv
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


FEWER_STEPS = """#!/bin/sh
case $1 in
    init | example) {home}/bin/isthmus "$@" || exit ;;
    *) exec {home}/bin/isthmus "$@" ;;
esac
find . -name '*.toml' -exec sed -i -E 's/^steps = ([2-9][0-9]|[0-9]{{3,}})$/steps = 6/' {{}} +
"""
"""In place of the command. A shell's function of that name would be another process between it and what it starts in
the background: `kill` on a page would end that one alone."""
ENDING_S = 30.0


def make_machine(folder: Path) -> dict[str, str]:
    """The environment of a shell there. pip asks no index: what builds a wheel is there too."""
    home = folder / "venv"
    venv.EnvBuilder(symlinks=True).create(home)
    _link_libraries(home)
    for name, module in (("pip", "pip"), ("torchrun", "torch.distributed.run")):
        script = home / "bin" / name
        script.write_text(f'#!/bin/sh\nexec {home}/bin/python -m {module} "$@"\n')
        script.chmod(0o755)
    typed = folder / "typed" / "isthmus"
    typed.parent.mkdir()
    typed.write_text(FEWER_STEPS.format(home=home))
    typed.chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return {
        **kept,
        "PATH": f"{typed.parent}:{home}/bin:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "PIP_NO_INDEX": "1",
        "PIP_NO_BUILD_ISOLATION": "false",  # as pip reads it, that is no isolation
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }


def _link_libraries(home: Path) -> None:
    """All that this interpreter has installed, but for Isthmus."""
    target = Path(sysconfig.get_path("purelib", vars={"base": str(home)}))
    for source in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for found in Path(source).iterdir():
            link = target / found.name
            if "isthmus" not in found.name and not link.exists():
                link.symlink_to(found)


def type_in(script: str, folder: Path, machine: Mapping[str, str]) -> str:
    """What a shell in this folder prints. A command that fails, and a traceback, fail the test. What still runs in the
    background afterwards is ended."""
    with subprocess.Popen(
        ["bash", "-c", script],
        cwd=folder,
        env={**machine},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as shell:
        try:
            out, err = shell.communicate()
        finally:
            _end(shell.pid)
    if shell.returncode != 0 or "Traceback" in err:
        pytest.fail(f"{shell.returncode}\n{out[-2000:]}\n{err[-4000:]}")
    return out


def _end(group: int) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        until_s = time.monotonic() + ENDING_S
        with suppress(ProcessLookupError):
            os.killpg(group, number)
        while _is_running(group):
            if time.monotonic() > until_s:
                break
            time.sleep(0.1)
        else:
            return


def _is_running(group: int) -> bool:
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, own = path.read_text().rpartition(") ")[2].split()[:3]
            if int(own) == group and state != "Z":
                return True
    return False
