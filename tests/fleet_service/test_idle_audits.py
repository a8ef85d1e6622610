"""Steps of a run that works, computed again by devices of its fleet that have nothing to do."""

from __future__ import annotations

import io
import sys
import threading
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from isthmus.api.run_job import run_job
from isthmus.api.run_session import Choices
from isthmus.api.terminal import Terminal
from isthmus.fleet import dump_fleet
from isthmus.job import Job
from isthmus.runtime.processes.signals import Stop
from tests.runtime.jobs import DIGITS, fleet_of, job_of

from .holders import Joined
from .parties import outcomes, soon
from .wrong_device import WRONG_STEP

WRONG = (sys.executable, str(Path(__file__).with_name("wrong_device.py")))


def endless(folder: Path) -> Job:
    """On two devices; all that is done between two checkpoints is audited."""
    (folder / "two.toml").write_text(dump_fleet(fleet_of(2)))
    job = job_of("mlp", {"layers": 2}, DIGITS, steps=1_000_000, save_every=WRONG_STEP + 1, clip_norm=1.0)
    runtime = msgspec.structs.replace(job.runtime, audit=1.0)
    return msgspec.structs.replace(job, name="audited", fleet=str(folder / "two.toml"), planner="even", runtime=runtime)


@pytest.mark.long
def test_an_idle_device_names_the_one_that_computes_wrong(joined: Joined, tmp_path: Path) -> None:
    said, stop = io.StringIO(), Stop()
    console = Console(file=said, width=200)
    choices = Choices(run=tmp_path / "run", backend=joined.fleet.service)
    ended: list[object] = []

    def run() -> None:
        ended.extend(outcomes(lambda: run_job(endless(tmp_path), choices, Terminal(console, console), stop)))

    for name, prefix in (("d0", ()), ("d1", WRONG), ("spare", ())):
        joined.add(name, None, prefix=prefix)
    running = threading.Thread(target=run, daemon=True)
    running.start()
    found = f"audit: step {WRONG_STEP}: d1 computed wrong: gradients"
    soon(lambda: said.getvalue().count(found) == 2 or ended, 240)  # then by this machine: the idle one may be wrong
    assert not ended, (ended, said.getvalue())
    stop.request()
    running.join(60)
    assert not running.is_alive()
    first, *others = [line for line in said.getvalue().splitlines() if line.startswith("audit: ")]
    assert first == f"audit: computing steps 1 to {WRONG_STEP + 1} again from the beginning, on spare"
    assert others[0] == found
