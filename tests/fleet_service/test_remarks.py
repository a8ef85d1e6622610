"""What is shown of devices that go on and on."""

from __future__ import annotations

from unittest import mock

from isthmus.runtime.transport import acceptor
from isthmus.runtime.transport.acceptor import MOST_LINES, WINDOW_S, LogLimiter


def test_some_lines_about_each_device_then_a_count() -> None:
    said: list[str] = []
    told = LogLimiter(said.append)
    with mock.patch.object(acceptor.time, "monotonic", lambda: now_s):
        now_s = 0.0
        for _ in range(5000):
            told.about("flaps", "flaps is here")
        told.about("good", "good is here")
        assert said == ["flaps is here"] * MOST_LINES + ["good is here"]
        now_s = WINDOW_S
        told.look()
        assert said[-1] == f"flaps: {5000 - MOST_LINES} more lines about it in {WINDOW_S:g} s" and len(said) == 12
        told.about("flaps", "flaps is here again")
        assert said[-1] == "flaps is here again"
