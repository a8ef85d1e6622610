"""Real runs in processes, each mode under the same faults: two devices are stopped for some seconds each."""

from __future__ import annotations

import contextlib
import math
import os
import resource
import signal
import statistics
import tempfile
import threading
import time
from pathlib import Path

import msgspec
from jobs import FLEET, job_of

import isthmus
from isthmus.api.decoupled import step_times
from isthmus.api.observer import Observer
from isthmus.fleet import resolve_fleet
from isthmus.job import prepare

STEPS = 120
SLOWER = {"8 GFLOPS": "800 MFLOPS", "4 GFLOPS": "400 MFLOPS", "2 GFLOPS": "200 MFLOPS"}
"""What devices of fleet.toml compute here: so little that this machine's other work matters little."""
FAULTS = (("middle-0", 12.0), ("slow-1", 32.0))
"""Device, and seconds after the second step."""
LASTS_S, TIMEOUT_S = 6.0, 4.0
"""A device is given up, and others go on, before it comes back. Of the devices' time in a minute the stops take five
hundredths: more than 20 % an hour, each for ten minutes, would."""
NEWEST = 10
"""Batches whose mean loss stands for a moment of a run."""
TITLE = "isthmus device "
"""What device processes call themselves."""


class RealRun(msgspec.Struct, frozen=True, kw_only=True):
    mode: str
    seed: int
    seconds: float
    """From the second step to the last."""
    goodput: float
    """Samples per second of these, over those of devices that never wait or fail."""
    loss: float
    """Held out, at the end."""
    trained: list[tuple[float, float]]
    """Seconds since the second step, and the mean loss of the newest batches of training."""
    busy: float
    """Share of this machine's cores that computed for anything, the run or other work."""
    own_cpu_s: float
    """That the run and its processes computed."""
    notes: list[str]

    def trained_at(self, second: float) -> float | None:
        """The newest batches' loss at that time."""
        found = [loss for s, loss in self.trained if s <= second]
        return statistics.fmean(found[-NEWEST:]) if found else None


class _Watch(Observer):
    """Stops devices, and takes times."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, int]] = []
        self.losses: list[tuple[float, float]] = []
        self.loss = float("nan")
        self.notes: list[str] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._strike, daemon=True)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def stepped(self, done: isthmus.StepDone) -> None:
        now_s = time.monotonic()
        self.steps.append((now_s, done.step))
        if done.loss is not None:
            self.losses.append((now_s, done.loss))
        if len(self.steps) == 2:
            self._thread.start()

    def evaluated(self, found: isthmus.Evaluated) -> None:
        self.loss = math.nan if found.loss is None else found.loss

    def _strike(self) -> None:
        began_s = time.monotonic()
        for device, at_s in FAULTS:
            if self._over.wait(began_s + at_s - time.monotonic()) or (pid := _pid_of(device)) is None:
                return
            os.kill(pid, signal.SIGSTOP)
            self._over.wait(LASTS_S)
            os.kill(pid, signal.SIGCONT)

    def end(self) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()


def real(mode: str, seed: int) -> RealRun:
    """`isthmus train` of the job."""
    with tempfile.TemporaryDirectory() as folder:
        fleet = str(_slower(Path(folder) / "fleet.toml"))
        job, alone = (
            msgspec.structs.replace(job_of(m, seed=seed, steps=STEPS), fleet=fleet) for m in (mode, "decoupled")
        )
        runtime = msgspec.structs.replace(job.runtime, timeout=f"{TIMEOUT_S:g} s")
        job = msgspec.structs.replace(job, runtime=runtime)
        alone_s = step_times(prepare(alone), resolve_fleet(fleet))
        watch, busy, cpu_s = _Watch(), _busy_and_all(), _own_cpu_s()
        try:
            isthmus.train(job, run=Path(folder) / "run", observer=watch)
        finally:
            watch.end()
    batch, now = job.training.batch_size, _busy_and_all()
    full_speed = sum(batch / len(alone_s) / seconds for seconds in alone_s.values())
    (begin_s, first), (end_s, last) = watch.steps[1], watch.steps[-1]
    return RealRun(
        mode=mode,
        seed=seed,
        seconds=end_s - begin_s,
        goodput=(last - first) * batch / (end_s - begin_s) / full_speed,
        loss=watch.loss,
        trained=[(at_s - begin_s, loss) for at_s, loss in watch.losses],
        busy=(now[0] - busy[0]) / (now[1] - busy[1]),
        own_cpu_s=_own_cpu_s() - cpu_s,
        notes=watch.notes,
    )


def _busy_and_all() -> tuple[int, int]:
    """Ticks of all cores since this machine began, without and with those that were idle."""
    ticks = [int(text) for text in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)


def _own_cpu_s() -> float:
    """Of this process and those that it has started, once they have ended."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)


def _slower(path: Path) -> Path:
    """fleet.toml with slower devices."""
    text = FLEET.read_text()
    for was, now in SLOWER.items():
        text = text.replace(f'"{was}"', f'"{now}"')
    path.write_text(text)
    return path


def _pid_of(device: str) -> int | None:
    """Of a process that this one has started, or a child of it has."""
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # it ended meanwhile
            if entry.name.isdigit() and (entry / "cmdline").read_bytes().rstrip(b"\0").decode() == TITLE + device:
                parent = _parent_of(int(entry.name))
                if os.getpid() in (parent, _parent_of(parent)):
                    return int(entry.name)
    return None


def _parent_of(pid: int) -> int:
    return int((Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
