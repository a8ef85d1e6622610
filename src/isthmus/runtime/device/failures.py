"""What a device tells its coordinator of an error, in one line: it is logged on another machine."""

from __future__ import annotations

from typing import Literal

from isthmus.errors import IsthmusError, PeerError, StepError, UserError
from isthmus.protocol.failures import StepFailure
from isthmus.protocol.memory_shortage import MemoryShortage
from isthmus.protocol.run_messages import DeviceFailed
from isthmus.training.faults import is_drivers


def failed(
    epoch: int,
    error: Exception,
    failure: StepFailure | None = None,
    shortage: MemoryShortage | None = None,
) -> DeviceFailed:
    """`failure` and `shortage` of an error that was for want of memory."""
    if isinstance(error, StepError) and failure is None:
        failure = StepFailure(step=error.step, what=error.what, reason=_reason(error))
    return DeviceFailed(
        epoch=epoch,
        reason=failure.reason if shortage is not None and failure is not None else _reason(error),
        fault="device" if shortage is not None else _fault(error),
        failure=failure,
        shortage=shortage,
        starts_again=shortage is None and is_drivers(error),
    )


def _reason(error: Exception) -> str:
    text = in_one_line(error)
    return text if isinstance(error, IsthmusError) else f"{type(error).__name__}: {text}"


def in_one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:500]


def _fault(error: Exception) -> Literal["user", "device", "other"]:
    if isinstance(error, UserError):
        return "user"
    return "other" if isinstance(error, PeerError) else "device"
