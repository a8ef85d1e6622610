"""What a real run told, in order, and what must hold of it whatever happened to its devices.

    step 0, 1, 2 ... held 4 ... step 9 | struck | rolled back to 8, step 8, 9 ... step 23

One line: after a rollback the steps go on from there, each with its own range of samples, once. A step that is held
twice is not lost with one device. Weights are compared by whoever has the run to compare with.
"""

from __future__ import annotations

import itertools
import time
from typing import Literal, NamedTuple

from isthmus.protocol import Item

Kind = Literal["step", "held", "saved", "struck", "rolled back"]


class Event(NamedTuple):
    time_s: float
    kind: Kind
    step: int
    """Of `step` its number from 0, else how many steps are done."""
    first_sample: int = -1


class History:
    """Written by the thread that conducts, and by the one that strikes."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def advanced(self, item: Item) -> None:
        if item.kind == "train":
            self._note("step", item.step, item.first_sample)

    def held(self, step: int) -> None:
        self._note("held", step)

    def saved(self, step: int) -> None:
        self._note("saved", step)

    def rolled_back(self, step: int) -> None:
        self._note("rolled back", step)

    def struck(self) -> None:
        """Something is done to the run now."""
        self._note("struck", 0)

    def _note(self, kind: Kind, step: int, first_sample: int = -1) -> None:
        self.events.append(Event(time.monotonic(), kind, step, first_sample))

    def violation(self, steps: int, batch: int, *, losses: int = 1) -> str:
        """What does not hold, or nothing. `losses`: how many devices may be gone at once; with two, what was held by
        two may be lost."""
        at, held, line = 0, 0, list[int]()
        for event in self.events:
            match event.kind:
                case "step" if event.step != at:
                    return f"step {event.step} came where {at} was due"
                case "step" if event.first_sample != at * batch:
                    return f"step {at} took samples from {event.first_sample} on, not from {at * batch}"
                case "step":
                    line.append(at)
                    at += 1
                case "held" | "saved" if event.step > at:
                    return f"step {event.step} is held, and only {at} are done"
                case "held" | "saved":
                    held = max(held, event.step)
                case "rolled back" if event.step < held and losses < 2:
                    return f"back to step {event.step}, and {held} was held"
                case "rolled back":
                    at, held = event.step, min(held, event.step)
                    line = [step for step in line if step < at]
                case "struck":
                    pass
        if at != steps:
            return f"the line ends after {at} steps of {steps}"
        return "" if len(line) == len(set(line)) else "a step is twice on the line"

    def recovered_s(self) -> list[float]:
        """After each rollback, the time from the strike before it (or from the rollback, where nothing struck since
        the one before) until a step is done again."""
        found: list[float] = []
        since_s: float | None = None
        waiting = False
        for event in self.events:
            match event.kind:
                case "struck":
                    since_s = event.time_s if since_s is None else since_s
                case "rolled back":
                    since_s, waiting = event.time_s if since_s is None else since_s, True
                case "step" if waiting and since_s is not None:
                    found.append(event.time_s - since_s)
                    since_s, waiting = None, False
                case _:
                    pass
        return found

    def pauses_s(self) -> list[float]:
        """Between one step's end and the next one's."""
        times = [event.time_s for event in self.events if event.kind == "step"]
        return [b - a for a, b in itertools.pairwise(times)]
