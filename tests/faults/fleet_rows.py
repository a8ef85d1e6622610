"""Rows of the fault table over `isthmus serve` and `isthmus join`: what happens to the coordinator, or to everybody."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from unittest import mock

from torch import Tensor

from tests.faults.rows import Found, Row, differing
from tests.fleet_service.test_fleet_faults import STEPS, Machines
from tests.runtime.commands import isthmus, wait_until
from tests.runtime.jobs import final_weights

SHIFTED = """
import time
real = time.time
time.time = lambda: real() + {seconds}
"""
NAMES = ("d0", "d1")
LONGEST_S = 200.0
"""For any one step of a moment, on a machine with ten times the work that it can do."""


def coordinator_killed(seed: int, folder: Path) -> Found:
    """The devices go on with what is leased; a new coordinator finds them."""
    return _with_machines(seed, folder, everybody=False)


def all_killed(seed: int, folder: Path) -> Found:
    """Often in the middle of a checkpoint: there is one every three steps."""
    return _with_machines(seed, folder, everybody=True)


@cache
def undisturbed(folder: Path) -> Mapping[str, Tensor]:
    """Of the same job on the same fleet, with devices that are processes of one command."""
    home = folder / "undisturbed-fleet"
    home.mkdir()
    made = Machines(home)
    done = isthmus("train", made.job, "--run", made.run.path)
    assert done.code == 0, done
    return final_weights(made.run.path)


def _with_machines(seed: int, folder: Path, *, everybody: bool) -> Found:
    draw, home = random.Random(seed), folder / f"{'all' if everybody else 'coordinator'}-{seed}"
    home.mkdir()
    at, later_s = draw.randint(1, STEPS // 2), draw.uniform(0.0, 0.3)
    machines = Machines(home, save_every=3 if everybody else 0)
    try:
        serve = machines.serve("--tickets", "2")
        assert serve.stdout is not None
        joined = [machines.join(name, serve.stdout.readline().strip()) for name in NAMES]
        wait_until(lambda: machines.steps() >= at, serve, within_s=LONGEST_S)
        time.sleep(later_s)
        for process in (serve, *(joined if everybody else ())):
            os.kill(process.pid, signal.SIGKILL)
            process.wait(60)
        reached, since_s = machines.steps(), time.monotonic()
        if reached >= STEPS - 5:
            return Found(wrong=f"not struck: {reached} steps were done")
        again = machines.serve("--tickets", "0", "--resume")
        if everybody:
            for name in NAMES:
                machines.join_again(name)
        wait_until(lambda: machines.newest() > reached or machines.newest() == STEPS, again, within_s=LONGEST_S)
        seconds = time.monotonic() - since_s
        code = again.wait(LONGEST_S)
        went_on = [int(step) for step in re.findall(r"resuming (?:.* )?after step (\d+)", machines.description())]
        wrong = "" if code == 0 else machines.description()
        if not wrong and not everybody and (not went_on or went_on[-1] < reached - 1):
            wrong = f"{reached} steps were told, and it went on after {went_on}"
        redone = max(0, reached - went_on[-1]) if went_on else 0
        return Found(seconds=(seconds,), redone=redone, wrong=wrong or judged(machines, reached, folder))
    finally:
        machines.end()


def judged(machines: Machines, reached: int, folder: Path) -> str:
    """What is wrong with a run that came to its end. `reached`: steps that were told when it was struck."""
    told = [point.step for point in machines.run.losses() if point.split == "train"]
    if told != sorted(set(told)) or told[-1] != STEPS:
        return f"steps were told in this order: {told}"
    unknown = set(range(1, STEPS + 1)) - set(told)
    if not unknown <= {reached + 1, reached + 2, reached + 3}:  # what devices did while nobody listened
        return f"nothing was notified of steps {sorted(unknown)}"
    lost = "was lost" in machines.description()
    return differing(final_weights(machines.run.path), undisturbed(folder), bitwise=not lost)


def wrong_clock(seed: int, folder: Path) -> Found:
    """The coordinator's clock, or a device's, is an hour off, as certificates and tickets are made and used."""
    draw, home = random.Random(seed), folder / f"clock-{seed}"
    whose, seconds = draw.choice(("serve", *NAMES)), draw.choice((-3600, 3600))
    (home / "clock").mkdir(parents=True)
    (home / "clock" / "sitecustomize.py").write_text(SHIFTED.format(seconds=seconds))
    path = os.pathsep.join(filter(None, (str(home / "clock"), os.environ.get("PYTHONPATH", ""))))

    def environment(who: str) -> dict[str, str]:
        return {"PYTHONPATH": path} if who == whose else {}

    machines = Machines(home)
    try:
        with mock.patch.dict(os.environ, environment("serve")):
            serve = machines.serve("--tickets", "2")
        assert serve.stdout is not None
        for name in NAMES:
            with mock.patch.dict(os.environ, environment(name)):
                machines.join(name, serve.stdout.readline().strip())
        wrong = "" if serve.wait(LONGEST_S) == 0 else machines.description()
        hour = "ahead" if seconds > 0 else "behind"
        who = "coordinator" if whose == "serve" else whose
        return Found(wrong=wrong or judged(machines, STEPS, folder), note=f"{who} an hour {hour}")
    finally:
        machines.end()


ROWS = (
    Row(name="coordinator", description="coordinator killed, and started again", once=coordinator_killed, limit_s=700),
    Row(name="all", description="all killed, then resumed", once=all_killed, limit_s=700),
    Row(name="clock", description="a clock an hour ahead or behind", once=wrong_clock, limit_s=700),
)
