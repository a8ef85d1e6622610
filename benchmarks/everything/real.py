"""The example for real: processes of devices are killed, come back, and all is measured from the run's trace."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from picture import draw

import isthmus
from isthmus.api.decoupled import simulate_decoupled
from isthmus.api.observer import Observer
from isthmus.api.run_entries import run_entries
from isthmus.job import fleet_of
from isthmus.runtime.decoupled.merged_run import merges_file, replica_groups
from isthmus.runtime.decoupled.run import RETURN_S
from isthmus.trace import Span

TITLE = "isthmus device "
"""What device processes call themselves."""
EVALUATED = 2048
"""Held-out samples."""
QUIET = 0.2
"""Share of the run before the first loss, and after the last."""


class Real(msgspec.Struct, frozen=True, kw_only=True):
    seconds: float
    """From the first step of any device to the last merge."""
    killed: list[tuple[float, str]]
    """Seconds of the run, and the device. It is away for `away_s`."""
    away_s: float
    recovered_s: list[float]
    """From each of these ends until a device of the replica began the first step that counts again."""
    used: float
    """Share of the time in which devices were there that they computed steps that count."""
    computed: float
    """The same with steps that were made again."""
    by_device: dict[str, float]
    """`used` of each."""
    samples: int
    merges: int
    loss: float
    """Held out, at the end."""
    notes: list[str]


class _Watch(Observer):
    """Kills devices, and notes what is said."""

    def __init__(self, due: Sequence[tuple[float, str]]) -> None:
        self.killed: list[tuple[float, str]] = []
        """By the clock of the day."""
        self.loss = float("nan")
        self.notes: list[str] = []
        self._due = due
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._strike, daemon=True)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def stepped(self, done: isthmus.StepDone) -> None:
        if not self._thread.ident:
            self._thread.start()

    def evaluated(self, found: isthmus.Evaluated) -> None:
        self.loss = math.nan if found.loss is None else found.loss

    def _strike(self) -> None:
        began_s = time.monotonic()
        for at_s, device in self._due:
            if self._over.wait(began_s + at_s - time.monotonic()) or (pid := _pid_of(device)) is None:
                return
            os.kill(pid, signal.SIGKILL)
            self.killed.append((time.time(), device))

    def end(self) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()


def job_for(job: isthmus.Job, seconds: float) -> isthmus.Job:
    """The job with as many steps as its devices make in so many seconds."""
    steps = max(2, round(seconds * simulate_decoupled(job).full_speed / job.training.batch_size))
    training = msgspec.structs.replace(job.training, steps=steps, eval_every=steps, eval_samples=EVALUATED)
    return msgspec.structs.replace(job, training=training)


def real(own: isthmus.Job, seconds: float, losses: int, picture: Path) -> Real:
    """`isthmus train` of the job for about so long, in which so many devices are lost, of one replica after another."""
    fleet = fleet_of(own)
    groups = replica_groups(own, fleet)
    turns = [devices[-1 - turn] for turn in range(2) for devices in groups.values()]
    between_s = seconds * (1 - 2 * QUIET) / max(1, losses - 1)
    watch = _Watch([(seconds * QUIET + between_s * n, device) for n, device in enumerate(turns[:losses])])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        try:
            trace = isthmus.train(own, run=path, observer=watch).trace
        finally:
            watch.end()
        lines, entries = merges_file(path).lines(), run_entries(path)
        began_s = next(entry.at_s for entry in entries if entry.kind == "began")
        killed = [(at_s - began_s, device) for at_s, device in watch.killed]
        # The trace counts from the first replica's joining, merges from the run's beginning.
        later_s = lines[-1].seconds - max(span.end_s for span in trace.spans if span.track == "control")
        traced = [
            _Traced.of(
                devices,
                [later(span, later_s) for span in trace.spans if span.device in devices and span.name != "step"],
                [e.at_s - began_s for e in entries if e.text.startswith(f"{name}: a pipeline over")],
            )
            for name, devices in groups.items()
        ]
    end_s, samples = lines[-1].seconds, lines[-1].merge.samples
    spans = [span for one in traced for span in one.spans if span.start_s < end_s]
    counted = [span for one in traced for span in one.counted if span.start_s < end_s]
    first_s = min(span.start_s for span in spans)
    present_s = {name: end_s - first_s - _away(name, killed, end_s) for name in fleet.names}
    draw(counted, spans, killed, RETURN_S, end_s, picture)
    busy_s = _busy(counted, fleet.names, end_s)
    return Real(
        seconds=end_s - first_s,
        killed=killed,
        away_s=RETURN_S,
        recovered_s=[found for at_s, device in killed for one in traced for found in one.recovered(at_s, device)],
        used=sum(busy_s.values()) / sum(present_s.values()),
        computed=sum(_busy(spans, fleet.names, end_s).values()) / sum(present_s.values()),
        by_device={name: busy_s[name] / present_s[name] for name in fleet.names},
        samples=samples,
        merges=len(lines),
        loss=watch.loss,
        notes=watch.notes,
    )


class _Traced(NamedTuple):
    """What a replica left."""

    devices: tuple[str, ...]
    spans: list[Span]
    """Of computing."""
    periods: list[tuple[int, float]]
    """The first step of each of its plans, and since when that was at work."""

    @classmethod
    def of(cls, devices: tuple[str, ...], spans: Sequence[Span], planned_s: Sequence[float]) -> _Traced:
        """`planned_s`: when it got each of its plans."""
        spans = [span for span in spans if span.track == "compute"]
        after = [(since_s, [span.step for span in spans if span.start_s > since_s]) for since_s in planned_s]
        return cls(devices, spans, [(min(steps), since_s) for since_s, steps in after if steps])

    @property
    def counted(self) -> list[Span]:
        """But for those whose step was made again: by a plan that came later, and began with that step or before."""
        return [
            span
            for span in self.spans
            if not any(first <= span.step and span.start_s < since_s for first, since_s in self.periods)
        ]

    def recovered(self, at_s: float, device: str) -> list[float]:
        """From the loss of a device of its until the others began a step on the next plan."""
        since_s = min((since_s for _, since_s in self.periods if since_s > at_s), default=math.inf)
        starts = [span.start_s for span in self.counted if span.start_s > since_s]
        return [min(starts) - at_s] if starts and device in self.devices else []


def later(span: Span, by_s: float) -> Span:
    return msgspec.structs.replace(span, start_s=span.start_s + by_s, end_s=span.end_s + by_s)


def _busy(spans: Iterable[Span], names: Iterable[str], end_s: float) -> dict[str, float]:
    found = dict.fromkeys(names, 0.0)
    for span in spans:
        found[span.device] += min(span.end_s, end_s) - span.start_s
    return found


def _away(device: str, killed: Iterable[tuple[float, str]], end_s: float) -> float:
    return sum(min(RETURN_S, end_s - at_s) for at_s, name in killed if name == device)


def _pid_of(device: str) -> int | None:
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # it ended meanwhile
            titled = entry.name.isdigit() and (entry / "cmdline").read_bytes().rstrip(b"\0").decode() == TITLE + device
            if titled and os.getpid() in _ancestors(int(entry.name)):
                return int(entry.name)
    return None


def _ancestors(pid: int) -> list[int]:
    found: list[int] = []
    while pid > 1:
        pid = int((Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
        found.append(pid)
    return found
