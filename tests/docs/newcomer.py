"""A machine as a newcomer has it: PyTorch and the other libraries are there; pip installs Isthmus from a checkout."""

from __future__ import annotations

import os
import subprocess
import sysconfig
import venv
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def make_machine(folder: Path) -> dict[str, str]:
    """The environment of a shell there. pip asks no index: what builds a wheel is there too."""
    home = folder / "venv"
    venv.EnvBuilder(symlinks=True).create(home)
    _link_libraries(home)
    for name, module in (("pip", "pip"), ("torchrun", "torch.distributed.run")):
        script = home / "bin" / name
        script.write_text(f'#!/bin/sh\nexec {home}/bin/python -m {module} "$@"\n')
        script.chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return {
        **kept,
        "PATH": f"{home}/bin:{os.environ['PATH']}",
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
    """What a shell in this folder prints. A command that fails, and a traceback, fail the test."""
    ran = subprocess.run(["bash", "-c", script], cwd=folder, env={**machine}, capture_output=True, text=True)
    if ran.returncode != 0 or "Traceback" in ran.stderr:
        pytest.fail(f"{ran.returncode}\n{ran.stdout[-2000:]}\n{ran.stderr[-4000:]}")
    return ran.stdout
