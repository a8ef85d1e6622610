"""Rows of the fault table over `isthmus serve` and `isthmus join`: what happens to the coordinator, or to everybody."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

from tests.faults.process_rows import Found
from tests.fleet_service.test_fleet_faults import STEPS, Machines
from tests.runtime.commands import wait_until

SHIFTED = """
import time
real = time.time
time.time = lambda: real() + {seconds}
"""


def coordinator_killed(seed: int, folder: Path) -> Found:
    """The devices go on with what is leased; a new coordinator finds them."""
    return _with_machines(seed, folder, everybody=False)


def all_killed(seed: int, folder: Path) -> Found:
    """Often in the middle of a checkpoint: there is one every three steps."""
    return _with_machines(seed, folder, everybody=True)


def _with_machines(seed: int, folder: Path, *, everybody: bool) -> Found:
    draw, home = random.Random(seed), folder / str(seed)
    home.mkdir()
    machines = Machines(home, save_every=3 if everybody else 0)
    try:
        serve = machines.serve("--tickets", "2")
        assert serve.stdout is not None
        joined = [machines.join(name, serve.stdout.readline().strip()) for name in ("d0", "d1")]
        wait_until(lambda: machines.steps() >= draw.randint(5, STEPS // 2), serve)
        time.sleep(draw.uniform(0.0, 0.3))
        for process in (serve, *(joined if everybody else ())):
            os.kill(process.pid, signal.SIGKILL)
            process.wait(10)
        reached, since_s = machines.steps(), time.monotonic()
        again = machines.serve("--tickets", "0", "--resume")
        if everybody:
            for name in ("d0", "d1"):
                machines.join_again(name)
        wait_until(lambda: machines.newest() > reached or machines.newest() == STEPS, again)
        seconds = time.monotonic() - since_s
        code = again.wait(120)
        wrong = "" if code == 0 and machines.newest() == STEPS else machines.told()
        return Found([seconds], 0, wrong)
    finally:
        machines.end()


def clock(hours: int) -> Callable[[int, Path], Found]:
    """The coordinator's clock is wrong by so much, as it makes certificates and tickets."""

    def once(seed: int, folder: Path) -> Found:
        home = folder / f"{seed}-{hours}"
        (home / "clock").mkdir(parents=True)
        (home / "clock" / "sitecustomize.py").write_text(SHIFTED.format(seconds=hours * 3600))
        path = os.pathsep.join(filter(None, (str(home / "clock"), os.environ.get("PYTHONPATH", ""))))
        machines = Machines(home)
        try:
            with mock.patch.dict(os.environ, {"PYTHONPATH": path}):
                serve = machines.serve("--tickets", "2")
            assert serve.stdout is not None
            for name in ("d0", "d1"):
                machines.join(name, serve.stdout.readline().strip())
            wrong = "" if serve.wait(120) == 0 else machines.told()
            return Found([], 0, wrong)
        finally:
            machines.end()

    return once


ROWS: dict[str, Callable[[int, Path], Found]] = {
    "coordinator killed, and started again": coordinator_killed,
    "all killed, then resumed": all_killed,
    "coordinator's clock an hour ahead": clock(1),
    "coordinator's clock an hour behind": clock(-1),
}
