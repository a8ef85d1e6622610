"""Timeouts of the devices that the coordinator waits for. Every long wait is logged."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

FIRST_S, MOST_S = 3.0, 30.0  # a wait is logged after FIRST_S, then after pauses that double up to MOST_S
MOST_NAMES = 8  # names in one line: a few are enough of a large cohort
WHAT = {
    "joining": "to join",
    "holding": "to stop",
    "recalling": "to come back",
    "planning": "for a plan",
    "placing": "to set up their stages",
    "settling": "to be at the same step",
}
BOUNDED: dict[str, str] = {"joining": "join", "holding": "stop", "recalling": "come back"}
"""Phases that take no longer than a message. In the other phases data are sent: the connection notices a device that
makes no progress or is silent."""
STARTING = 3.0
"""Factor on the time limit for joining while the device's process is known to run. Slow is not dead: on a machine with
ten times more work than it can do, importing torch takes a minute."""


def few(names: Sequence[str]) -> str:
    """Return the names, but of many only the first, and how many more there are."""
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more


class Waits:
    """Logs which devices are awaited, and for how long."""

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log = log
        self._what = ""
        self._since: dict[str, float] = {}
        self._next_s = 0.0
        self._pause_s = FIRST_S

    def look(
        self, what: str, whom: Collection[str], now_s: float, *, usual_s: float = 0.0, until: str = ""
    ) -> dict[str, float]:
        """To be called repeatedly with the devices that are awaited, `what` for. Returns since when, by device. A wait
        that is no longer than `usual_s` is not logged. `until` is the end of the log line."""
        if what != self._what or self._since.keys().isdisjoint(whom):
            self._what, self._since = what, {}
            self._pause_s = max(FIRST_S, usual_s)
            self._next_s = now_s + self._pause_s
        self._since = {device: self._since.get(device, now_s) for device in sorted(whom)}
        if self._since and now_s >= self._next_s:
            self._pause_s = min(2 * self._pause_s, max(MOST_S, usual_s))
            self._next_s = now_s + self._pause_s
            longest = sorted(self._since.items(), key=lambda wait: wait[1])
            waited = few([f"{device} for {now_s - since_s:.0f} s" for device, since_s in longest])
            self._log(f"waiting {what}: {waited}{until}")
        return self._since


class Deadlines:
    def __init__(self, timeout_s: float, start_s: float, log: Callable[[str], None]) -> None:
        """`start_s`: how long a device may take to start its process."""
        self._limits_s = {"joining": max(start_s, timeout_s), "holding": timeout_s, "recalling": timeout_s}
        self._phases = Waits(log)
        self._queue = Waits(log)
        self._items = Waits(log)
        self._item, self._waited_s, self._longest_s = -1, 0.0, 0.0
        """The number of the item that others have finished, the seconds that a device is behind with it, and the
        longest seconds that one was behind with an item before."""

    def missed(
        self, phase: str, awaited: Collection[str], now_s: float, starting: Callable[[str], bool] = lambda _: False
    ) -> Iterator[tuple[str, str]]:
        """The awaited devices that missed this phase's time limit, each with the reason. `starting` says whether a
        device's process runs, and may only be slow."""
        whom = awaited or (("the planner",) if phase == "planning" else ())
        since = self._phases.look(WHAT.get(phase, ""), whom, now_s)
        limit_s = self._limits_s.get(phase)
        if limit_s is None:
            return
        for device, since_s in since.items():
            late = now_s - since_s > limit_s
            allowed_s = limit_s * STARTING if late and phase == "joining" and starting(device) else limit_s
            if now_s - since_s > allowed_s:
                yield device, f"it did not {BOUNDED[phase]} within {allowed_s:g} s"

    def in_queue(self, devices: Collection[str], now_s: float) -> None:
        """Note that the run waits for these devices, and they for their engine: there is no time limit."""
        self._queue.look("for the engine to start what it has queued", devices, now_s)

    def lag(self, item: int, behind: Collection[str], now_s: float) -> None:
        """Note that these devices have not finished an item that others have. Stages of a pipeline end one after the
        other, so only a wait that is twice as long as the longest before is logged."""
        if item != self._item:
            self._longest_s = max(self._longest_s, self._waited_s)
            self._item = item
        since = self._items.look("to finish what others have", behind, now_s, usual_s=2 * self._longest_s)
        self._waited_s = max((now_s - since_s for since_s in since.values()), default=0.0)
