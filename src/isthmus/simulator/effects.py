"""Which faults of a simulation had an effect, and why the others had none."""

from __future__ import annotations

import math
from collections.abc import Iterable

from isthmus.simulator.options import Fault, Kind
from isthmus.units import format_duration

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
