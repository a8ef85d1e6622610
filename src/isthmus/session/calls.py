"""When a device of a fleet is called to a run: whenever it is there, but later and later where its processes fail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator

AGAIN_S = 30.0  # after so long a device whose process failed is called again; twice as long each further time


class Calls:
    """The calls of one run."""

    def __init__(self) -> None:
        self._failures: Counter[str] = Counter()
        self._from_s: dict[str, float] = {}

    def due(self, offers: Collection[str], now_s: float) -> Iterator[str]:
        """Those of them that may be called now, by name."""
        return (device for device in sorted(offers) if now_s >= self._from_s.get(device, now_s))

    def failed(self, device: str, now_s: float) -> None:
        """A process of the device has ended other than well."""
        self._from_s[device] = now_s + AGAIN_S * 2 ** self._failures[device]
        self._failures[device] += 1
