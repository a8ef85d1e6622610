"""What goes wrong in a simulation, and when: as `isthmus simulate` takes it.

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
from typing import Literal

import msgspec

from isthmus.errors import UserError
from isthmus.units import parse_duration

Kind = Literal["lost", "silent", "link", "coordinator", "slow", "join", "leave"]


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One thing that happens to a device, a link or the coordinator."""

    time_s: float
    kind: Kind = "lost"
    device: str = ""
    other: str = ""
    """The other end of a link."""
    lasts_s: float = math.inf
    """Until the device is back, the link is whole, the coordinator is started again."""
    factor: float = 1.0
    """`slow`: tasklets take so many times longer."""

    def __post_init__(self) -> None:
        if not 0 <= self.time_s < math.inf:
            raise UserError(f"fault: time: got {self.time_s}, expected a finite number of at least 0")
        if not self.lasts_s >= 0:
            raise UserError(f"fault: duration: got {self.lasts_s}, expected a number of at least 0")
        if not 0 < self.factor < math.inf:
            raise UserError(f"fault: factor: got {self.factor}, expected a positive number")


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
        return float(text)
    except ValueError:
        raise UserError(f"--slow: factor: got {text!r}, expected a number") from None
