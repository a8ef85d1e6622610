"""Real runs in processes, each mode under the same faults: two devices are stopped for ten seconds each."""

from __future__ import annotations

import contextlib
import os
import signal
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
SLOWER = {"8 GFLOPS": "1 GFLOPS", "4 GFLOPS": "500 MFLOPS", "2 GFLOPS": "250 MFLOPS"}
"""What devices of fleet.toml compute here: so little that this machine's other work matters little."""
FAULTS = (("middle-0", 12.0), ("slow-1", 28.0))
"""Device, and seconds after the second step."""
LASTS_S, TIMEOUT_S = 10.0, 4.0
"""A device is given up, and others go on, before it comes back."""
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
    notes: list[str]


class _Watch(Observer):
    """Stops devices, and takes times."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, int]] = []
        self.loss = float("nan")
        self.notes: list[str] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._strike, daemon=True)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def stepped(self, done: isthmus.StepDone) -> None:
        self.steps.append((time.monotonic(), done.step))
        if len(self.steps) == 2:
            self._thread.start()

    def evaluated(self, step: int, loss: float) -> None:
        self.loss = loss

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
        watch = _Watch()
        try:
            isthmus.train(job, run=Path(folder) / "run", observer=watch)
        finally:
            watch.end()
    batch = job.training.batch_size
    full_speed = sum(batch / len(alone_s) / seconds for seconds in alone_s.values())
    (begin_s, first), (end_s, last) = watch.steps[1], watch.steps[-1]
    return RealRun(
        mode=mode,
        seed=seed,
        seconds=end_s - begin_s,
        goodput=(last - first) * batch / (end_s - begin_s) / full_speed,
        loss=watch.loss,
        notes=watch.notes,
    )


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
