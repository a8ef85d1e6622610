"""The trace of a run of merges: steps and contributions as the merger hears of them, merges, and what it sends. A real
run and a simulated one have the same, of the same names."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from isthmus.protocol.decoupled_events import Contributed, FragmentSent
from isthmus.trace import Span, Track

MERGER = "merger"  # the device of merges, and the other end of contributions


class MergeTrace:
    """Gives each span to `add`, which any thread may call. Times are seconds of the host's clock, those of spans count
    since the first replica joined."""

    def __init__(self) -> None:
        self.add: Callable[[Span], None] | None = None  # None: nobody wants them
        self._origin_s: float | None = None
        self._since_s: dict[str, float] = {}
        """When each replica had all fragments, or had made a step: its next step began then."""

    def joined(self, replica: str, now_s: float) -> None:
        self._origin_s = now_s if self._origin_s is None else self._origin_s
        self._since_s[replica] = now_s

    def stepped(self, replica: str, steps: int, now_s: float) -> None:
        """A replica has made a step, the last of so many."""
        self._put(_span(replica, "compute", "step", steps - 1), self._since_s[replica], now_s)
        self._since_s[replica] = now_s

    def computed(self, span: Span, origin_s: float) -> None:
        """A device of a replica that is a pipeline has computed; its span counts from `origin_s`."""
        self._put(span, span.start_s + origin_s, span.end_s + origin_s)

    def contributed(self, replica: str, body: Contributed, size_bytes: int, now_s: float) -> None:
        """It left after the report of the step before it."""
        span = _span(replica, "send", "contribution", body.steps - 1, MERGER, size_bytes)
        self._put(span, self._since_s[replica], now_s)

    def sent(self, replica: str, sent: FragmentSent, start_s: float, end_s: float, size_bytes: int) -> None:
        """A fragment has left for a replica: all of it, or what has changed."""
        name = "fragment" if sent.whole else "change"
        self._put(_span(MERGER, "send", name, sent.merge, replica, size_bytes), start_s, end_s)
        if sent.first:
            self._since_s[replica] = end_s

    def merged(self, merge: int, opened_s: float, now_s: float) -> None:
        self._put(_span(MERGER, "control", f"merge {merge}", merge), opened_s, now_s)

    def _put(self, span: Span, start_s: float, end_s: float) -> None:
        if self.add is not None:
            since_s = self._origin_s or 0.0
            self.add(msgspec.structs.replace(span, start_s=start_s - since_s, end_s=end_s - since_s))


def _span(device: str, track: Track, name: str, step: int, other: str = "", size_bytes: int = 0) -> Span:
    """`step`: of merges and what is sent, the merge's number."""
    return Span(
        device=device, track=track, name=name, start_s=0, end_s=0, step=step, other=other, size_bytes=size_bytes
    )
