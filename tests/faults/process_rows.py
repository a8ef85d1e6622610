"""Rows of the fault table whose devices are processes of one `train`. What is drawn is drawn from the row's seed."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from isthmus.fleet import Link
from isthmus.runtime.conducting.crew import LocalCrew
from isthmus.runtime.processes.launcher import Place
from tests.faults.forwarder import ADDRESS, Forwarder, free_port
from tests.faults.real import Run, job, pid_of, run

STEPS = 24
STOP_S = float(os.environ.get("ISTHMUS_FAULT_STOP_S", "60"))
"""For how long a device is stopped or a link is cut."""
AGAIN_S = float(os.environ.get("ISTHMUS_FAULT_AGAIN_S", "600"))
"""For how long devices are killed again and again."""
SLOW_FLOPS_PER_S = 4e6
"""A step takes 0.15 s on two or more devices, and one alone 0.19 s; with a quarter of it there is enough to gain from
one more device."""


class Found(NamedTuple):
    """What a moment showed."""

    seconds: list[float]
    """Of each recovery."""
    redone: int
    wrong: str
    remark: str = ""


def kill(device: str) -> None:
    os.kill(pid_of(device), signal.SIGKILL)


def stop(device: str) -> None:
    pid = pid_of(device)
    os.kill(pid, signal.SIGSTOP)
    time.sleep(STOP_S)
    os.kill(pid, signal.SIGCONT)


@cache
def undisturbed(folder: Path, steps: int) -> Run:
    return run(folder / f"undisturbed-{steps}", job(steps), spares=0)


def judged(found: Run, expected: Run | None, steps: int) -> Found:
    """`expected`: the run whose cuts it keeps, or None."""
    outcome, wrong = found.outcome, ""
    if outcome.outcome != "done":
        wrong = outcome.reason
    elif sorted({step for step, _ in found.losses}) != list(range(steps)):
        wrong = "a step is missing"
    elif expected is not None:
        equal = all(torch.equal(found.weights[name], value) for name, value in expected.weights.items())
        wrong = "" if equal else "other weights"
    return Found([r.seconds for r in outcome.recoveries], sum(r.redone for r in outcome.recoveries), wrong)


def struck(
    strike: Callable[[str], None], *, spares: int = 1, steps: int = STEPS, link: Link | None = None, **runtime: object
) -> Callable[[int, Path], Found]:
    """Something is done to one of two devices, at a moment."""

    def once(seed: int, folder: Path) -> Found:
        draw = random.Random(seed)
        device, step, later_s = draw.choice(("d0", "d1")), draw.randint(1, STEPS - 6), draw.uniform(0.0, 0.3)

        def act() -> None:
            time.sleep(later_s)
            strike(device)

        made = job(steps, **runtime)  # type: ignore[arg-type]
        found = run(folder / str(seed), made, spares=spares, act=(step, act), link=link)
        return judged(found, undisturbed(folder, steps) if spares else None, steps)

    return once


def on_the_link(
    strike: Callable[[Forwarder], None], *, recovers: bool, steps: int = STEPS, **shape: float
) -> Callable[[int, Path], Found]:
    """Something happens to the link from the first device to the second."""

    def once(seed: int, folder: Path) -> Found:
        draw, port = random.Random(seed), free_port()
        forwarder = Forwarder(port, **shape)
        crew = LocalCrew(places={"d1": Place(port=port, address=ADDRESS)})
        act = (draw.randint(1, STEPS - 6), lambda: strike(forwarder))
        try:
            found = run(folder / str(seed), job(steps, patience="4 s"), crew=crew, act=act)
        finally:
            forwarder.close()
        told = judged(found, undisturbed(folder, steps), steps)
        if not told.wrong and bool(told.seconds) != recovers:
            told = told._replace(wrong=f"{len(told.seconds)} recoveries")
        return told

    return once


def stalls(forwarder: Forwarder) -> None:
    """Half of a patience, three times."""
    for _ in range(3):
        forwarder.cut(2.0)
        time.sleep(0.5)


def again_and_again(seed: int, folder: Path) -> Found:
    """Four devices, a kill every 15 s; who was killed starts anew a second later. The run is as long as it takes."""
    draw, over = random.Random(seed), threading.Event()
    kills = [0]

    def act() -> None:
        until_s = time.monotonic() + AGAIN_S
        while time.monotonic() < until_s and not over.wait(15.0):
            try:
                kill(draw.choice(("d0", "d1", "d2", "d3")))
                kills[0] += 1
            except AssertionError:
                pass  # it is dead already

    steps = int(AGAIN_S / 0.4)
    found = run(
        folder / str(seed), job(steps, patience="10 s"), devices=4, spares=0, act=(4, act),
        crew=LocalCrew(revives_after_s=1.0), flops_per_s=SLOW_FLOPS_PER_S,
    )  # fmt: skip
    over.set()
    told = judged(found, None, steps)
    elapsed_s, redone = found.outcome.elapsed_s, told.redone
    useful = steps / (steps + redone) * (1 - sum(told.seconds) / max(elapsed_s, 1e-9))
    return told._replace(remark=f"{kills[0]} kills in {elapsed_s:.0f} s, goodput {useful:.0%}")


def comes_back(seed: int, folder: Path) -> Found:
    """One of two is killed, the other goes on alone; a new one comes and is used."""
    steps, draw = 70, random.Random(seed)
    act = (draw.randint(2, 20), lambda: kill(draw.choice(("d0", "d1"))))
    crew = LocalCrew(revives_after_s=3.0)
    found = run(folder / str(seed), job(steps), spares=0, act=act, crew=crew, flops_per_s=SLOW_FLOPS_PER_S / 4)
    told = judged(found, None, steps)
    if not told.wrong and len(told.seconds) < 2:
        return told._replace(wrong="the new device was not used")
    return told


ROWS: dict[str, Callable[[int, Path], Found]] = {
    "killed, a spare takes its place": struck(kill),
    "killed, the other goes on alone": struck(kill, spares=0),
    "killed in the middle of a message": struck(kill, link=Link(0.05, 2e4)),
    "sole holder of a stage killed: from the checkpoint": struck(kill, snapshots=False, save_every=6),
    f"stopped for {STOP_S:g} s, evicted after 4 s": struck(stop, patience="4 s"),
    f"link cut for {STOP_S:g} s": on_the_link(lambda f: f.cut(STOP_S), recovers=True),
    "half-open link": on_the_link(Forwarder.half_open, recovers=True),
    "1 Mbit/s, 200 ms, stalls: nobody evicted": on_the_link(
        stalls, recovers=False, bandwidth_bytes_per_s=125e3, latency_s=0.2
    ),
    "killed every 15 s, 4 devices": again_and_again,
    "killed; a new device comes and is used": comes_back,
}
