"""Rows of the fault table whose devices are processes of one `train`. What is drawn is drawn from the row's seed."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

from isthmus.fleet import Link
from isthmus.runtime.coordinator.backend import LocalBackend
from isthmus.runtime.processes.device_processes import ProcessPlace
from tests.faults.forwarder import ADDRESS, Forwarder, free_port
from tests.faults.history import History
from tests.faults.real import FLOPS_PER_S, Run, job, pid_of, run
from tests.faults.rows import AGAIN_S, STOP_S, Found, Row, differing
from tests.runtime.commands import devices_of

STEPS = 24
BATCH = 8
SLOW_FLOPS_PER_S = 4e6
"""A step takes 0.15 s on two or more devices, and one alone 0.19 s."""
CRAWLING_FLOPS_PER_S = SLOW_FLOPS_PER_S / 4
"""A step takes 0.6 s on two devices, and 0.76 s alone: enough to gain from one more device."""
CRAWLING_S = 0.6


def kill(device: str, history: History) -> None:
    pid = pid_of(device)
    history.struck()
    os.kill(pid, signal.SIGKILL)


@cache
def undisturbed(folder: Path, steps: int) -> Run:
    """Bits do not depend on how fast devices are said to be."""
    found = run(folder / f"undisturbed-{steps}", job(steps, timeout="60 s"), spares=0, flops_per_s=1e12)
    assert found.outcome.outcome == "done", f"nobody disturbed it, and it ended so: {found.outcome.reason}"
    return found


def judged(found: Run, folder: Path, steps: int, *, bitwise: bool, recoveries: int = 1, losses: int = 1) -> Found:
    """`bitwise`: the cuts were always the same. `recoveries`: so many at least. `losses`: devices that may have been
    gone at once."""
    outcome, history = found.outcome, found.history
    wrong = history.violation(steps, BATCH, losses=losses)
    if outcome.outcome != "done":
        wrong = f"{outcome.outcome}: {outcome.reason}"
    elif not wrong and len(outcome.recoveries) < recoveries:
        wrong = f"{len(outcome.recoveries)} recoveries"
    elif not wrong:
        wrong = differing(found.weights, undisturbed(folder, steps).weights, bitwise=bitwise)
    redone = sum(r.redone for r in outcome.recoveries)
    faults = sum(event.kind == "struck" for event in history.events)
    return Found(seconds=tuple(history.recovered_s()), redone=redone, wrong=wrong, faults=faults)


def killed(*, spares: int = 1, link: Link | None = None, **runtime: object) -> Callable[[int, Path], Found]:
    """One of two devices is, at a moment."""

    def once(seed: int, folder: Path) -> Found:
        draw = random.Random(seed)
        device, step, later_s = draw.choice(("d0", "d1")), draw.randint(1, STEPS - 6), draw.uniform(0.0, 0.15)

        def act(history: History) -> None:
            time.sleep(later_s)
            kill(device, history)

        made = job(STEPS, **runtime)  # type: ignore[arg-type]
        found = run(folder / str(seed), made, spares=spares, act=(step, act), link=link, flops_per_s=FLOPS_PER_S / 2)
        return judged(found, folder, STEPS, bitwise=bool(spares))

    return once


def killed_early(seed: int, folder: Path) -> Found:
    """While it is connected, given its stage, or at its first steps."""
    draw = random.Random(seed)
    device, later_s = draw.choice(("d0", "d1")), draw.uniform(0.0, 1.5)

    def act(history: History) -> None:
        until_s = time.monotonic() + 60
        while device not in devices_of(os.getpid()) and time.monotonic() < until_s:
            time.sleep(0.01)
        time.sleep(later_s)
        kill(device, history)

    found = run(folder / str(seed), job(STEPS), act=(0, act), flops_per_s=FLOPS_PER_S / 2)
    return judged(found, folder, STEPS, bitwise=True, recoveries=0)  # before the first step there is nothing to redo


def killed_twice(seed: int, folder: Path) -> Found:
    """Another device soon after the first, or its successor: often in the middle of the recovery."""
    draw = random.Random(seed)
    step, between_s = draw.randint(1, STEPS - 6), draw.choice((0.0, draw.uniform(0.0, 1.5), draw.uniform(1.0, 5.0)))
    first, second = draw.choice(("d0", "d1")), draw.choice(("d0", "d1", "d2", "d3"))

    def act(history: History) -> None:
        kill(first, history)
        time.sleep(between_s)
        with contextlib.suppress(KeyError):  # it was the first one, or has not been called yet
            kill(second, history)

    made = job(STEPS, save_every=6)
    found = run(folder / str(seed), made, spares=2, act=(step, act), flops_per_s=FLOPS_PER_S / 2)
    return judged(found, folder, STEPS, bitwise=True, losses=2)


def stopped(seed: int, folder: Path) -> Found:
    """Evicted, and awake again while the others are still at work: with a spare it is not needed any more, without one
    it is used again."""
    draw = random.Random(seed)
    device, step, spares = draw.choice(("d0", "d1")), draw.randint(1, 10), draw.randint(0, 1)
    steps = step + int(STOP_S / CRAWLING_S) + (20 if spares else 70)

    def act(history: History) -> None:
        time.sleep(draw.uniform(0.0, 1.0))
        pid = pid_of(device)
        history.struck()
        os.kill(pid, signal.SIGSTOP)
        time.sleep(STOP_S)
        os.kill(pid, signal.SIGCONT)

    made = job(steps, timeout="4 s")
    found = run(folder / str(seed), made, spares=spares, act=(step, act), flops_per_s=CRAWLING_FLOPS_PER_S)
    told = judged(found, folder, steps, bitwise=bool(spares), recoveries=1 if spares else 2)
    if not told.wrong and "silent for 4 s" not in found.outcome.recoveries[0].reason:
        told = _but(told, f"recovered because {found.outcome.recoveries[0].reason}")
    note = "" if spares else "used again when it was awake"
    return Found(
        seconds=told.seconds[:1],
        redone=told.redone,
        wrong=told.wrong,
        note=note,
        faults=told.faults,
        length_s=STOP_S,
    )


def _but(found: Found, wrong: str) -> Found:
    return Found(seconds=found.seconds, redone=found.redone, wrong=wrong, faults=found.faults)


def on_the_link(
    strike: Callable[[Forwarder, random.Random], None], *, recovers: bool, length_s: float = 0.0, **shape: float
) -> Callable[[int, Path], Found]:
    """Something happens to the link from the first device to the second, which lasts so long."""

    def once(seed: int, folder: Path) -> Found:
        draw, port = random.Random(seed), free_port()
        forwarder = Forwarder(port, **shape)
        backend = LocalBackend(places={"d1": ProcessPlace(port=port, address=ADDRESS)})
        step, steps = draw.randint(1, STEPS - 6), STEPS + int(length_s / CRAWLING_S)

        def act(history: History) -> None:
            time.sleep(draw.uniform(0.0, 0.15))
            history.struck()
            strike(forwarder, draw)

        flops_per_s = CRAWLING_FLOPS_PER_S if length_s else FLOPS_PER_S / 2
        try:
            made = job(steps, timeout="4 s")
            found = run(folder / str(seed), made, backend=backend, act=(step, act), flops_per_s=flops_per_s)
        finally:
            forwarder.close()
        told = judged(found, folder, steps, bitwise=True, recoveries=int(recovers))
        if not told.wrong and not recovers and found.outcome.recoveries:
            told = _but(told, f"recovered because {found.outcome.recoveries[0].reason}")
        return Found(
            seconds=told.seconds[:1], redone=told.redone, wrong=told.wrong, faults=told.faults, length_s=length_s
        )

    return once


def stalls(forwarder: Forwarder, draw: random.Random) -> None:
    """Three, of half a timeout or so."""
    for _ in range(3):
        forwarder.cut(draw.uniform(1.0, 2.5))
        time.sleep(0.5)


def again_and_again(seed: int, folder: Path) -> Found:
    """Four to six devices, a kill every 15 s; who was killed starts anew a second later."""
    draw, over = random.Random(seed), threading.Event()
    names = [f"d{i}" for i in range(draw.randint(4, 6))]

    def act(history: History) -> None:
        until_s = time.monotonic() + AGAIN_S
        while time.monotonic() < until_s and not over.wait(15.0):
            name = draw.choice(names)
            with contextlib.suppress(KeyError):  # it is dead already
                kill(name, history)

    steps = int(AGAIN_S / 0.12)  # on four devices or more a step takes 0.13 s, and the rest are recoveries
    found = run(
        folder / str(seed),
        job(steps, timeout="10 s"),
        devices=len(names),
        spares=0,
        act=(4, act),
        backend=LocalBackend(respawn_after_s=1.0),
        flops_per_s=SLOW_FLOPS_PER_S,
    )
    over.set()
    told = judged(found, folder, steps, bitwise=False, losses=2)
    elapsed_s, idle_s = found.outcome.elapsed_s, sum(r.seconds for r in found.outcome.recoveries)
    useful = steps / (steps + told.redone) * (1 - idle_s / max(elapsed_s, 1e-9))
    note = (
        f"{told.faults} kills of {len(names)} devices in {elapsed_s:.0f} s, longest pause "
        f"{max(found.history.pauses_s()):.0f} s, goodput {useful:.0%}"
    )
    length_s = round(min(AGAIN_S, elapsed_s))
    return Found(
        seconds=told.seconds, redone=told.redone, wrong=told.wrong, note=note, faults=told.faults, length_s=length_s
    )


def comes_back(seed: int, folder: Path) -> Found:
    """One of two is killed, the other goes on alone; a new one comes and is used."""
    steps, draw = 70, random.Random(seed)
    step, device = draw.randint(2, 20), draw.choice(("d0", "d1"))
    backend = LocalBackend(respawn_after_s=3.0)
    found = run(
        folder / str(seed),
        job(steps),
        spares=0,
        act=(step, lambda history: kill(device, history)),
        backend=backend,
        flops_per_s=CRAWLING_FLOPS_PER_S,
    )
    told = judged(found, folder, steps, bitwise=False)
    if not told.wrong and len(found.outcome.recoveries) < 2:
        return _but(told, "the new device was not used")
    return told


ROWS = (
    Row(name="kill-spare", description="killed, a spare takes its place", once=killed()),
    Row(name="kill-alone", description="killed, the other goes on alone", once=killed(spares=0)),
    Row(name="kill-sending", description="killed in the middle of a message", once=killed(link=Link(0.05, 2e4))),
    Row(
        name="sole-holder",
        description="sole holder of a stage killed: from the checkpoint",
        once=killed(snapshots=False, save_every=6),
    ),
    Row(name="kill-early", description="killed as it is set up", once=killed_early),
    Row(name="kill-twice", description="another killed in the recovery from the first", once=killed_twice),
    Row(name="stop", description="stopped, evicted after 4 s, awake again", once=stopped, limit_s=400 + 3 * STOP_S),
    Row(
        name="cut",
        description="link cut, noticed after 4 s",
        limit_s=400 + 3 * STOP_S,
        once=on_the_link(lambda f, _: f.cut(STOP_S), recovers=True, length_s=STOP_S),
    ),
    Row(name="half-open", description="half-open link", once=on_the_link(lambda f, _: f.half_open(), recovers=True)),
    Row(
        name="slow-link",
        description="1 Mbit/s, 200 ms, stalls: nobody evicted",
        once=on_the_link(stalls, recovers=False, bandwidth_bytes_per_s=125e3, latency_s=0.2),
    ),
    Row(
        name="kill-again",
        description="killed every 15 s, 4 to 6 devices",
        once=again_and_again,
        moments=1,
        limit_s=300 + 3 * AGAIN_S,
    ),
    Row(name="joiner", description="killed; a new device comes and is used", once=comes_back, limit_s=600),
)
