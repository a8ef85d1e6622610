"""How long a run stands still when a device is lost for good, and a spare takes its place.

The device's process is killed once the state is held twice. Its stage's state then travels from the device that has the
copy to the spare, over a link of 1 Gbit/s, and the run goes on from the step of that state.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import msgspec
from gpu_cases import NEAR, Case, fleet_of, plan_of

from isthmus.experiments import Item, LocalBackend, RunOptions, Watcher, local_places, run_plan
from isthmus.fleet import Fleet
from isthmus.job import prepare
from isthmus.plans import Plan
from isthmus.runtime.coordinator.stage_assignments import StageAssignments
from isthmus.trace import Span

TORCHFT_S, TORCHFT_PARAMETERS = 948.0, 8e9
AFTER = 3
"""Steps after the recovery, then the run is ended."""
MOST_STEPS = 100_000
SNAPSHOT_EVERY = 3
"""Steps, but never before the one before is with its mirror."""
TITLE = "isthmus device "
"""What device processes call themselves."""


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the table."""

    key: str
    size: str
    when: str
    device: str
    state_bytes: int
    """Of the stage that was lost: parameters and optimizer."""
    at_work_s: float
    """From when the loss was known until devices were at work again."""
    step_s: float
    """From the kill to the end of the first step after it."""
    redone: int
    """Steps that had been done, and were done again."""


class _Loss:
    """Kills a device when the state is held twice, and interrupts the run some steps later."""

    def __init__(self, victim: str) -> None:
        self._victim = victim
        self._rolled_back = False
        self._after = 0
        self.killed_s = self.first_s = 0.0

    def acknowledged(self, step: int) -> None:
        if step > 0 and not self.killed_s:
            print(f"  step {step} is held twice: {self._victim} is killed", file=sys.stderr)
            self.killed_s = time.monotonic()
            os.kill(_pid_of(self._victim), signal.SIGKILL)

    def advanced(self, item: Item, loss: float | None, spans: tuple[Span, ...]) -> None:
        if item.kind != "train" or not self._rolled_back:
            return
        self.first_s = self.first_s or time.monotonic()
        self._after += 1
        if self._after == AFTER:
            os.kill(os.getpid(), signal.SIGINT)  # as Ctrl-C ends a run

    def rolled_back(self, step: int) -> None:
        self._rolled_back = bool(self.killed_s)


def _pid_of(device: str) -> int:
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (entry / "cmdline").read_bytes().rstrip(b"\0").decode() == TITLE + device:
                return int(entry.name)
        except OSError:  # it ended meanwhile
            continue
    raise SystemExit(f"no process of device {device!r}")


def measure(case: Case, device: str, hardware: str, when: str) -> Recovery:
    prepared = prepare(case.job(device, steps=MOST_STEPS, snapshot_every=SNAPSHOT_EVERY))
    fleet = fleet_of(case.stages + 1, NEAR)

    def replan(left: Fleet) -> Plan:
        return plan_of(prepared, left, (1,) * case.stages)

    plan = replan(fleet.subset(fleet.names[: case.stages]))
    victim = plan.devices[-1]
    loss = _Loss(victim)
    options = RunOptions(replan=replan, backend=LocalBackend(places=local_places(device, fleet.names)))
    watcher = Watcher(
        acknowledged=loss.acknowledged,
        advanced=loss.advanced,
        rolled_back=loss.rolled_back,
        noted=lambda text: print(f"  {text}", file=sys.stderr),
    )
    with tempfile.TemporaryDirectory() as folder:
        outcome = run_plan(prepared, plan, fleet, Path(folder), options, watcher)
    if not outcome.recoveries:
        raise SystemExit(f"the run did not go on: {outcome.reason}")
    found = outcome.recoveries[0]
    return Recovery(
        key=case.key,
        size=case.size,
        when=when,
        device=hardware,
        redone=found.redone,
        state_bytes=StageAssignments(prepared, plan, fleet).state_bytes(victim),
        at_work_s=found.seconds,
        step_s=loss.first_s - loss.killed_s,
    )
