"""When a run with changed figures asks for another plan, and whether that plan is worth the change."""

from __future__ import annotations

from typing import NamedTuple

LEAST_GAIN = 0.03
"""Of a step's time: what a prediction may be wrong by is no reason to move weights."""
REST_COSTS = 20
"""After a change of plan the next one waits for so many times what the change cost: changes that were wrong take at
most a twentieth of the time."""


class ReplanGain(NamedTuple):
    """Another plan against the one in force, both priced on the figures that are believed now."""

    step_s: float
    other_step_s: float
    steps: int
    """That are left."""
    cost_s: float
    """Of changing: to stop, to move weights, to start."""

    @property
    def worth_it(self) -> bool:
        saved_s = self.step_s - self.other_step_s
        return saved_s > LEAST_GAIN * self.step_s and saved_s * self.steps > self.cost_s


class ReplanPolicy:
    """Whether to ask now. One question at a time."""

    def __init__(self) -> None:
        self._due = self._asked = False
        self._rests_until_s = 0.0

    def changed(self) -> None:
        """Another figure is believed than the plan was made with."""
        self._due = True

    def ask(self, now_s: float) -> bool:
        """Whether to ask; if so, it is asked."""
        if not self._due or self._asked or now_s < self._rests_until_s:
            return False
        self._due, self._asked = False, True
        return True

    def answered(self) -> None:
        """A plan was made with the newest figures."""
        self._asked = False

    def began(self, now_s: float, cost_s: float) -> None:
        """A plan epoch begins, which cost so much to change to; 0 where it had to be. A question that it came before
        is asked again."""
        self._due, self._asked = self._due or self._asked, False
        self._rests_until_s = now_s + REST_COSTS * cost_s
