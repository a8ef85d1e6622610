"""Decisions of the run's machine, as faults for callbacks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from isthmus.callbacks import RunFault
from isthmus.plans import Plan
from isthmus.plans.worker_ids import device_of
from isthmus.protocol.coordinator_events import DeviceJoined, ReleaseDevice
from isthmus.protocol.run_events import Note, RejectDevice, RunEvent, RunInstruction
from isthmus.units import format_duration


def faults_of(step: int, event: RunEvent, instructions: Sequence[RunInstruction]) -> Iterator[RunFault]:
    """Who came, who is lost and why, who left."""
    if isinstance(event, DeviceJoined):
        yield RunFault(step=step, kind="joined", device=device_of(event.device))
    reason = next((i.text for i in instructions if isinstance(i, Note)), "")
    for device in dict.fromkeys(device_of(i.device) for i in instructions if isinstance(i, RejectDevice)):
        yield RunFault(step=step, kind="lost", device=device, text=reason)
    for device in dict.fromkeys(device_of(i.device) for i in instructions if isinstance(i, ReleaseDevice)):
        yield RunFault(step=step, kind="left", device=device)


def plan_change(step: int, plan: Plan) -> RunFault:
    """Another plan is in force."""
    text = f"{format_duration(plan.predicted.step_s)} a step on {', '.join(plan.used)}, as predicted"
    return RunFault(step=step, kind="plan", text=text, plan=plan)
