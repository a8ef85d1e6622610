"""Whom the coordinator waits for, since when, and when that is too long. Nobody is waited for in silence."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from isthmus.protocol.coordinator import Phase

REMIND_S = 30.0
"""How often to say who is waited for."""
WHAT = {
    "joining": "to join", "holding": "to stop", "planning": "for a plan", "fetching": "to give what they hold",
    "placing": "to set up their stages", "settling": "to be at the same step",
}  # fmt: skip
BOUNDED: dict[str, str] = {"joining": "join", "holding": "stop"}
"""What takes no longer than a message does. In the other phases data move: whoever makes no progress with them, or
falls silent, is noticed by its connection."""


class Deadlines:
    def __init__(self, patience_s: float, start_s: float, say: Callable[[str], None]) -> None:
        """`start_s`: how long it may take a device to start a process, which is no silence yet."""
        self._limits_s = {"joining": max(start_s, patience_s), "holding": patience_s}
        self._say = say
        self._phase = ""
        self._since: dict[str, float] = {}
        self._said_s = 0.0

    def missed(self, phase: Phase, awaited: Collection[str], now_s: float) -> Iterator[tuple[str, str]]:
        """Of those who are awaited in this phase, who is late, and what to say of it."""
        if phase != self._phase:
            self._phase, self._since, self._said_s = phase, {}, now_s
        self._since = {device: self._since.get(device, now_s) for device in sorted(awaited)}
        if self._since and now_s - self._said_s >= REMIND_S and phase in WHAT:
            self._said_s = now_s
            waited = ", ".join(f"{device} for {now_s - since_s:.0f} s" for device, since_s in self._since.items())
            self._say(f"waiting {WHAT[phase]}: {waited}")
        for device, since_s in self._since.items():
            limit_s = self._limits_s.get(phase)
            if limit_s is not None and now_s - since_s > limit_s:
                yield device, f"it did not {BOUNDED[phase]} within {limit_s:g} s"
