"""Assumptions of a simulation besides the plan, the fleet and the run's length; faults, when they strike, and
which of them had an effect.

What goes wrong, as `isthmus simulate` takes it:

--fault home-1@12s                  its process dies
--fault home-1@12s+20s              and could work again 20 s later
--fault silent:home-1@12s+30s       it stops for 30 s, and its connections stay open
--fault link:cloud-0:office-0@30s+20s   nothing passes between the two
--fault coordinator@30s+5s          its process dies, and is started again 5 s later
--slow home-0@40s:4                 it computes four times slower from then on
--join spare@60s                    it could work from then on
--leave home-1@60s                  it is to leave without loss
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

from isthmus.errors import UserError
from isthmus.units import format_duration, parse_duration

Kind = Literal["lost", "silent", "link", "coordinator", "slow", "join", "leave"]


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One thing that happens to a device, a link or the coordinator."""

    time_s: float
    kind: Kind = "lost"
    device: str = ""
    other: str = ""  # the other end of a link
    lasts_s: float = math.inf  # until the device is back, the link is whole, the coordinator is started again
    factor: float = 1.0  # `slow`: tasklets take so many times longer

    def __post_init__(self) -> None:
        if not 0 <= self.time_s < math.inf:
            raise UserError(f"fault: time: got {self.time_s}, expected a finite number of at least 0")
        if not self.lasts_s >= 0:
            raise UserError(f"fault: duration: got {self.lasts_s}, expected a number of at least 0")
        if not 0 < self.factor < math.inf:
            raise UserError(f"fault: factor: got {self.factor}, expected a positive number")

    @property
    def option(self) -> str:
        """The option of `isthmus simulate` that gives such a fault."""
        return f"--{self.kind}" if self.kind in ("slow", "join", "leave") else "--fault"


_SHAPE = re.compile(r"(?P<what>[^@]+)@(?P<time>[^+:]+)(\+(?P<lasts>[^:]+))?(:(?P<factor>.+))?")


def parse_fault(text: str, option: str = "fault") -> Fault:
    """One option's value. UserError for what is none."""
    found = _SHAPE.fullmatch(text)
    if found is None:
        raise UserError(f"--{option}: got {text!r}, expected {_EXAMPLES[option]}")
    what, factor = found["what"], found["factor"]
    time_s = parse_duration(found["time"].strip(), f"--{option}: time")
    lasts_s = parse_duration(found["lasts"].strip(), f"--{option}: duration") if found["lasts"] else math.inf
    if (factor is not None) != (option == "slow") or (option in ("join", "leave", "slow") and found["lasts"]):
        raise UserError(f"--{option}: got {text!r}, expected {_EXAMPLES[option]}")
    if option == "slow":
        return Fault(kind="slow", device=what, time_s=time_s, factor=_factor(factor or ""))
    if option in ("join", "leave"):
        return Fault(kind="join" if option == "join" else "leave", device=what, time_s=time_s)
    return _fault(text, what, time_s, lasts_s)


def _fault(text: str, what: str, time_s: float, lasts_s: float) -> Fault:
    kind, _, ends = what.partition(":")
    if what == "coordinator":
        if math.isinf(lasts_s):
            raise UserError(f"--fault: got {text!r}, expected until when, as in coordinator@30s+5s")
        return Fault(kind="coordinator", time_s=time_s, lasts_s=lasts_s)
    if kind == "link":
        one, _, other = ends.partition(":")
        if not one or not other or one == other:
            raise UserError(f"--fault: got {text!r}, expected two devices, as in link:cloud-0:office-0@30s+20s")
        return Fault(kind="link", device=one, other=other, time_s=time_s, lasts_s=lasts_s)
    if kind == "silent" and ends:
        return Fault(kind="silent", device=ends, time_s=time_s, lasts_s=lasts_s)
    return Fault(kind="lost", device=what, time_s=time_s, lasts_s=lasts_s)


_EXAMPLES = {
    "fault": "a device, link:A:B or coordinator with a time, as in home-1@12s or link:a:b@30s+20s",
    "slow": "a device, a time and a factor, as in home-0@40s:4",
    "join": "a device and a time, as in spare@60s",
    "leave": "a device and a time, as in home-1@60s",
}


def _factor(text: str) -> float:
    try:
        factor = float(text)
    except ValueError:
        factor = math.nan
    if not 0 < factor < math.inf:
        raise UserError(f"--slow: factor: got {text!r}, expected a positive number, as in home-0@40s:4")
    return factor


Timed = Literal["F", "B", "W", "E", "update"]


def _check(field: str, number: float) -> None:
    if not 0 <= number < math.inf:
        raise UserError(f"{field}: got {number}, expected a finite number of at least 0")


class Overheads(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds that FLOPs and bytes do not explain. Zero unless calibrated."""

    tasklet_s: float = 0.0  # added to each forward, backward and evaluation
    message_s: float = 0.0  # added to the time that each message occupies its link
    handover_s: float = 0.0
    """From the end of a tasklet to the first byte on a free link, and again from the last byte to the tasklet that
    waited for it: a sleeping lane wakes up. It occupies neither the lane nor the link."""

    def __post_init__(self) -> None:
        for name in ("tasklet_s", "message_s", "handover_s"):
            _check(f"overheads.{name}", getattr(self, name))


class RecoveryTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds that a change of plan takes, besides what links and time limits say."""

    plan_s: float = 1.0  # to make a plan
    process_s: float = 3.0  # to start a device's process
    stage_s: float = 0.2  # to make a stage from its weights
    redial_s: float = 1.0  # until a device whose connection was closed tries again
    control_s_per_byte: Mapping[str, float] = {}
    """Seconds per byte on a device's way to the coordinator, which carries weights; 0 for devices that are not
    named."""
    timeout_s: float = 60.0  # silence after which a connection is given up
    start_s: float = 60.0  # how long the coordinator waits for a device to join

    def __post_init__(self) -> None:
        for name in ("plan_s", "process_s", "stage_s", "redial_s", "timeout_s", "start_s"):
            _check(f"recovery.{name}", getattr(self, name))
        for device, seconds in self.control_s_per_byte.items():
            _check(f"recovery.control_s_per_byte: {device}", seconds)


class SimulationOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a simulation besides the plan, its fleet and the number of steps."""

    clips: bool = False  # gradient norms are exchanged before each update
    counts: bool = False  # the loss is a sum over a count, which the loss's stage sends to the others
    eval_edges: Mapping[tuple[int, int], int] | None = None
    """Bytes per micro-batch that an evaluation sends from stage to stage; None: as in training."""

    durations: Mapping[tuple[int, Timed], float] = {}
    """Measured seconds by (stage, work), stages counted replica after replica, in place
    of what the FLOPs say. An evaluation falls back to the forward."""
    overheads: Overheads = Overheads()
    update_s: float = 0.0
    save_s: float = 0.0
    header_bytes: int = 0  # per message, on the wire only
    control_latency_s: float = 0.0  # seconds of each message between a device and the coordinator

    jitter: float = 0.0  # sigma of the log-normal factors on all durations and transfers; 0 for none
    seed: int = 0  # the seed of the jitter, and of the order of simultaneous events
    faults: tuple[Fault, ...] = ()
    recovery: RecoveryTimes = RecoveryTimes()
    run: str = "simulation"  # the trace's name

    def __post_init__(self) -> None:
        for name in ("update_s", "save_s", "header_bytes", "control_latency_s", "jitter"):
            _check(name, getattr(self, name))
        for (stage, work), seconds in self.durations.items():
            _check(f"durations: stage {stage}, {work}", seconds)


TOO_LATE = "after the end of the run"
NOT_AT_WORK = "the run did not use it then"
_UNSEEN: dict[Kind, str] = {
    "slow": "it computed nothing after that",
    "link": "nothing was to pass meanwhile",
    "join": "the run did not take it",
}
WithoutEffect = tuple[tuple[Fault, str], ...]  # faults, each with the reason


class Effects:
    def __init__(self, faults: Iterable[Fault]) -> None:
        self._reasons = dict.fromkeys(faults, TOO_LATE)
        self._unseen: dict[tuple[Kind, frozenset[str]], list[Fault]] = {}
        """Faults that have struck, and that nothing has met so far."""

    def struck(self, fault: Fault, why_none: str) -> None:
        """It is time. `why_none`: why it has no effect; empty: it has one, at once or when something meets it."""
        if why_none:
            self._reasons[fault] = why_none
        elif fault.kind in _UNSEEN:
            self._reasons[fault] = _UNSEEN[fault.kind]
            self._unseen.setdefault((fault.kind, _names(fault)), []).append(fault)
        else:
            self._reasons.pop(fault, None)

    def met(self, kind: Kind, *names: str) -> None:
        """Such a fault of these devices, where there is one, has changed the run."""
        for fault in self._unseen.pop((kind, frozenset(names)), ()) if self._unseen else ():
            self._reasons.pop(fault, None)

    @property
    def without(self) -> WithoutEffect:
        return tuple(self._reasons.items())


def _names(fault: Fault) -> frozenset[str]:
    return frozenset(filter(None, (fault.device, fault.other)))


def without_effect_lines(without: WithoutEffect) -> list[str]:
    """Return one line with the faults that had no effect, or none."""
    texts = [f"{fault_text(fault)} ({why})" for fault, why in without]
    return [f"without effect: {'; '.join(texts)}"] if texts else []


def without_effect_document(without: WithoutEffect) -> list[dict[str, object]]:
    return [{"time_s": fault.time_s, "text": fault_text(fault), "reason": why} for fault, why in without]


def fault_text(fault: Fault) -> str:
    lasts = f" for {format_duration(fault.lasts_s)}" if math.isfinite(fault.lasts_s) else ""
    match fault.kind:
        case "lost":
            return f"{fault.device}: its process dies" + (f"; it could work again after{lasts[4:]}" if lasts else "")
        case "silent":
            return f"{fault.device} is silent{lasts}"
        case "link":
            return f"nothing passes between {fault.device} and {fault.other}{lasts}"
        case "coordinator":
            return f"the coordinator is away{lasts}"
        case "slow":
            return f"{fault.device}: computing takes {fault.factor:g} times as long"
        case "join":
            return f"{fault.device} could join"
        case "leave":
            return f"{fault.device} is to leave"
