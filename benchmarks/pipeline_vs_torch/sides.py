"""Start either side as processes, pause and resume it, and read what it found."""

from __future__ import annotations

import itertools
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType

import msgspec
from workload import Figures, OursPlace, PeerPlace, Workload

from isthmus_testing.lab import COORDINATOR, Lab

HERE = Path(__file__).parent
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class Side:
    """The processes of one side. A context manager: on leaving, whatever still runs is ended."""

    def __init__(self, commands: Sequence[Sequence[str]], resources: ExitStack) -> None:
        self._resources = resources
        self._processes = [
            subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, env=ENVIRONMENT)
            for command in commands
        ]

    def signal(self, number: int) -> None:
        """To every process of the side and their children, while the first one runs."""
        if self.running:
            for process in self._processes:
                for pid in family(process.pid):
                    with suppress(ProcessLookupError):
                        os.kill(pid, number)

    @property
    def running(self) -> bool:
        """Whether the first process, which every other waits for, still runs."""
        return self._processes[0].poll() is None

    def figures(self, timeout_s: float = 900.0) -> list[Figures]:
        """What each process found. RuntimeError where one failed."""
        found: list[Figures] = []
        for process in self._processes:
            output, _ = process.communicate(timeout=timeout_s)
            if process.returncode:
                raise RuntimeError(f"a process of the benchmark ended with {process.returncode}: see its message above")
            found.append(msgspec.json.decode(output, type=Figures))
        return found

    def __enter__(self) -> Side:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.signal(signal.SIGCONT)  # a stopped one could not end its children
        for process in self._processes:
            if process.poll() is None:
                process.terminate()
            process.wait()
        self._resources.close()


def family(pid: int) -> list[int]:
    """A process and all that descend from it, the oldest first: devices have process groups of their own."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found


Start = Callable[[Workload, Lab | None], Side]


def start_peer(workload: Workload, lab: Lab | None) -> Side:
    """One process per stage, each in its own namespace when there is a lab."""
    resources = ExitStack()
    folder = resources.enter_context(tempfile.TemporaryDirectory())
    commands: list[list[str]] = []
    for stage, name in enumerate(workload.fleet.names):
        place = PeerPlace(workload=workload, stage=stage, interface="eth0" if lab else "lo", store=f"{folder}/store")
        program = [sys.executable, str(HERE / "peer.py"), msgspec.json.encode(place).decode()]
        commands.append([*(lab.command(name) if lab else []), *program])
    return Side(commands, resources)


def start_ours(workload: Workload, lab: Lab | None) -> Side:
    """The conducting process, which starts the devices' own; in a lab, all in namespaces."""
    if lab is None:
        place = OursPlace(workload=workload)
        front: list[str] = []
    else:
        names = workload.fleet.names
        front = lab.command(COORDINATOR)
        place = OursPlace(
            workload=workload,
            host=lab.addresses[COORDINATOR],
            addresses={name: lab.addresses[name] for name in names},
            prefixes={name: _from_inside(lab.command(name)) for name in names},
        )
    program = [sys.executable, str(HERE / "ours.py"), msgspec.json.encode(place).decode()]
    return Side([[*front, *program]], ExitStack())


def _from_inside(command: Sequence[str]) -> list[str]:
    """Who is in the lab's user namespace already must not enter it again: the kernel refuses that (EINVAL)."""
    return [word for word in command if not word.startswith("--user=") and word != "--preserve-credentials"]


def merged(found: Sequence[Figures]) -> Figures:
    """One side's figures: the first stage's marks, the last stage's losses, everyone's bytes."""
    return msgspec.structs.replace(
        found[0], losses=found[-1].losses, step_payload_bytes=sum(f.step_payload_bytes for f in found)
    )


def run_alone(start: Start, workload: Workload, lab: Lab | None) -> Figures:
    with start(workload, lab) as side:
        return merged(side.figures())


class Slice(msgspec.Struct, frozen=True):
    """A time in which only one side ran."""

    side: int
    start_s: float
    end_s: float


def run_by_turns(starts: Sequence[Start], workload: Workload, turn_s: float) -> tuple[list[Figures], list[Slice]]:
    """All sides at once, of which one runs at a time, for `turn_s`, while the others are stopped.

    So a busy machine is as busy for one as for the other. Steps that were interrupted are for the caller to leave
    out (`steps_within`).
    """
    slices: list[Slice] = []
    with ExitStack() as stack:
        sides: list[Side] = []
        for start in starts:
            side = stack.enter_context(start(workload, None))
            side.signal(signal.SIGSTOP)
            sides.append(side)
        for turn in itertools.cycle(range(len(sides))):
            if not any(side.running for side in sides):
                break
            side = sides[turn]
            side.signal(signal.SIGCONT)
            start_s = end_s = time.monotonic()
            while side.running and end_s - start_s < turn_s:
                time.sleep(0.02)
                end_s = time.monotonic()
            side.signal(signal.SIGSTOP)
            slices.append(Slice(turn, start_s, end_s))
        return [merged(side.figures()) for side in sides], slices


def steps_within(figures: Figures, slices: Sequence[Slice], side: int, skipped: int) -> list[list[float]]:
    """Per slice of a side, the durations of the steps that lie in it whole, the first `skipped` steps left out."""
    steps = list(itertools.pairwise(figures.marks_s))[skipped:]
    return [
        [end_s - start_s for start_s, end_s in steps if s.start_s <= start_s and end_s <= s.end_s]
        for s in slices
        if s.side == side
    ]


def paired_ratio(first: Sequence[Sequence[float]], second: Sequence[Sequence[float]]) -> float:
    """Median over neighbouring slices of (mean step of the second side / of the first). StatisticsError without any."""
    pairs = [(a, b) for a, b in zip(first, second, strict=False) if a and b]
    return statistics.median(statistics.fmean(b) / statistics.fmean(a) for a, b in pairs)
