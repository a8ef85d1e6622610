"""Tells a session what happens on the virtual clock, and looks at its devices when a real host would
(`runtime/session_host.py`): at regular times, when something is due, and at once where a loss is certain."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

from isthmus.session.session import SOON_S, TICK_S, Session
from isthmus.simulator.clock import VirtualClock
from isthmus.simulator.strikes import Strikes

SessionT = TypeVar("SessionT", bound=Session)


class SimulatedHost(Generic[SessionT]):
    def __init__(self, session: SessionT, clock: VirtualClock, strikes: Strikes, *, regular: bool) -> None:
        """`regular`: whether anything can be seen at regular times, as faults can."""
        self.session = session
        self._clock, self._strikes, self._regular = clock, strikes, regular
        self._looked_s = -math.inf
        self._due_s = math.inf  # when the next look is

    def replace(self, session: SessionT) -> None:
        """Another coordinator is there from now on. Devices that run connect before it looks at them."""
        self.session, self._looked_s = session, self._clock.now_s
        self._plan_look()

    def tell(self, happened: Callable[[SessionT], None], *, looks: bool = False) -> None:
        """Tell the session, if it is there. `looks`: as a host does after a connection has closed."""
        session = self.session
        if session.over or not self._strikes.answered:
            return
        session.clock(self._clock.now_s)
        happened(session)
        if looks or session.urgent:
            self._look()
        else:
            self._plan_look()

    def disconnected(self, device: str, reason: str) -> None:
        self.tell(lambda session: session.disconnected(device, reason), looks=True)

    def _look(self) -> None:
        session = self.session
        if session.over or not self._strikes.answered:
            return
        self._looked_s = self._clock.now_s
        seen = self._strikes.tick()
        session.clock(self._looked_s)
        session.looked(seen)
        self._plan_look()

    def _plan_look(self) -> None:
        session = self.session
        if session.over:
            return
        due_s = self._looked_s + (SOON_S if session.suspects else TICK_S) if self._regular else math.inf
        if (decides_s := session.due_s) is not None and decides_s > self._looked_s:
            due_s = min(due_s, decides_s)
        due_s = max(due_s, self._clock.now_s)
        if due_s != self._due_s and due_s < math.inf:
            self._clock.at(due_s, "tick", partial(self._tick, due_s))
        self._due_s = due_s

    def _tick(self, due_s: float) -> None:
        if due_s == self._due_s:
            self._due_s = math.inf
            self._look()
