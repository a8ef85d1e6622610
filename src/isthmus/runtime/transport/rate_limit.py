"""Limits how many messages a peer may send."""

from __future__ import annotations

from isthmus.errors import PeerError


class RateLimit:
    """A token bucket: `per_s` messages a second in the long run, `burst` at once."""

    def __init__(self, per_s: float, burst: float) -> None:
        self._per_s = per_s
        self._burst = self._left = burst
        self._spent_s = 0.0

    def spend(self, now_s: float) -> None:
        """One message at this time of a monotonic clock; PeerError when it is one too many."""
        gained = (now_s - self._spent_s) * self._per_s
        self._left = min(self._burst, self._left + gained) - 1
        self._spent_s = now_s
        if self._left < 0:
            raise PeerError(f"sent more than {self._per_s:g} messages a second")
