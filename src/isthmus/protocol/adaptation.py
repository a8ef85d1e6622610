"""A run's estimates of its fleet decide when another plan is requested, when it is worth the change, and when a slow
link is tried again.

The run's own steps are measured all the time (`drift`). A try of a slow link (`LinkReprobe`) is for links that carry
nothing: a plan avoids a slow link, and would avoid it for ever, as nothing shows that it has recovered. A try is a
probe of some seconds while the run trains, on a link that carries nothing; no weights move for it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import msgspec

from isthmus.fleet import Fleet, with_memory
from isthmus.plans import Plan
from isthmus.plans.plan import device_of
from isthmus.protocol.drift import Drift, DriftReport, RateChange
from isthmus.protocol.step_failures import MemoryShortage, believed_bytes
from isthmus.trace import Span
from isthmus.units import format_size

CHANGE_S = 5.0  # seconds that a change of plan costs besides moving weights: to stop, to connect, to start

RETRY_S = 60.0  # how long a link that became slow, and is not used since, rests before a probe tries it again


class PlanFigures(msgspec.Struct, frozen=True, kw_only=True):
    """A plan that was made, and the one in force, priced on the figures that are believed now."""

    plan: Plan
    step_s: float = 0.0  # seconds of a steady step of the plan in force
    other_step_s: float = 0.0  # and of the one that was made
    moving_s: float = 0.0  # to move weights and optimizer state from one to the other


class Adaptation:
    """Pure: the host says what time it is."""

    def __init__(
        self,
        plan: Plan,
        believed: Fleet,
        steps: int,
        *,
        number: int = 0,
        adapts: bool = True,
        outdated: bool = False,
    ) -> None:
        """`plan` is the first one, with its `number`, `believed` the fleet that plans are made for, `steps` the run's.
        Without `adapts` only shortages of memory change what is believed. `outdated`: the first plan was made for
        another fleet."""
        self.believed = believed
        self.plan = plan  # in force
        self._plans: dict[int, Plan] = {number: plan}
        self._steps = steps
        self._adapts = adapts
        self._drift = Drift(believed)
        self._news = DriftReport()
        self._fits = 0
        self._memory: dict[str, int] = {}
        """Bytes of memory that a device has, where that turned out to be less than stated."""
        self._policy = ReplanPolicy()
        self._reprobe = LinkReprobe(RETRY_S)
        self._change_s = 0.0  # seconds that the change to the newest plan costs; 0 for a change that must be made
        self._reached = 0  # steps that are done
        if adapts and outdated:
            self._policy.changed()

    def made(self, number: int, figures: PlanFigures | None, *, must: bool) -> bool:
        """A plan was made, or None; whether it is worth the change."""
        self._policy.answered()
        self._change_s = 0.0
        if figures is None:
            return False
        self._plans[number] = figures.plan
        if must:
            return True
        gain = ReplanGain(
            step_s=figures.step_s,
            other_step_s=figures.other_step_s,
            steps=self._steps - self._reached,
            cost_s=figures.moving_s + CHANGE_S,
        )
        self._change_s = gain.cost_s
        return gain.worth_it

    def began(self, number: int, step: int, now_s: float) -> None:
        """The plan of this number is in force, from the state after `step` steps on."""
        replaced, self.plan = self.plan, self._plans[number]
        self._drift.begin(self.plan, step)
        self._policy.began(now_s, self._change_s if self.plan is not replaced else 0.0)
        self._reached = step

    def measured(self, step: int, spans: Sequence[Span]) -> list[str]:
        """All devices have done the step, and reported these spans since the one before; returns what is believed
        anew, in words."""
        self._reached = step + 1
        return self._believe(self._drift.note(step, spans) if self._adapts else [])

    def _believe(self, found: list[RateChange]) -> list[str]:
        if found:
            self._policy.changed()
        if found or self._drift.fits != self._fits:
            self._fits, self.believed = self._drift.fits, with_memory(self._drift.fleet(), self._memory)
        return [text for text in map(self._news.fresh, found) if text]

    def short(self, device: str, shortage: MemoryShortage) -> str:
        """A device's memory was too little for its stage under the plan in force; returns what is believed of it from
        now on, in words."""
        device = device_of(device)
        stages = [stage for replica in self.plan.replicas for stage in replica.workers]
        stated = self.believed.device(device).memory_bytes
        planned = sum(stage.memory.total for stage in stages if stage.device == device)
        found = believed_bytes(shortage, planned or stated, stated)
        self._memory[device] = found
        self.believed = with_memory(self.believed, self._memory)
        there = f"{format_size(shortage.capacity)} of {format_size(shortage.total)} are to be had"
        return f"{device}: {there} now: plans count on {format_size(found)}, not on {format_size(stated)}"

    def to_probe(self, now_s: float) -> Pair | None:
        """A link that was slow, carries nothing, and may have recovered: whether it has is to be measured now."""
        return self._reprobe.due(self._drift.doubtful(), now_s) if self._adapts else None

    def probed(self, link: Pair, bandwidth_bytes_per_s: float | None, now_s: float) -> list[str]:
        """Return how fast it is, None where nobody could say; returns what is believed anew, in words."""
        self._reprobe.tried(link, now_s)
        return self._believe([] if bandwidth_bytes_per_s is None else self._drift.tried(link, bandwidth_bytes_per_s))

    def asks(self, now_s: float) -> bool:
        """Return whether to ask for another plan; it is asked for then."""
        return self._policy.ask(now_s)


LEAST_GAIN = 0.03
"""A smaller share of a step's time may be an error of the prediction, and is no reason to move weights."""
REST_COSTS = 20
"""After a change of plan the next one waits for so many times what the change cost: changes that were wrong take at
most a twentieth of the time."""


class ReplanGain(NamedTuple):
    """Another plan against the one in force, both priced on the figures that are believed now."""

    step_s: float
    other_step_s: float
    steps: int  # that are left
    cost_s: float  # seconds that the change takes: to stop, to move weights, to start

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
        """Return whether to ask; if so, it is asked."""
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


MOST_S = 3600.0  # between two tries, at most: each wait is twice the one before
Pair = tuple[str, str]  # a link's source and target


class _Wait(NamedTuple):
    until_s: float
    wait_s: float


class LinkReprobe:
    """One try at a time, the first after `first_s`."""

    def __init__(self, first_s: float) -> None:
        self._first_s = first_s
        self._waits: dict[Pair, _Wait] = {}
        self._trying: Pair | None = None

    def due(self, doubtful: Collection[Pair], now_s: float) -> Pair | None:
        """Return which of the links that are believed slow and carry nothing to try now; it is tried then."""
        self._waits = {
            pair: self._waits.get(pair, _Wait(now_s + self._first_s, self._first_s)) for pair in sorted(doubtful)
        }
        if self._trying is not None:
            return None
        ready = [(wait.until_s, pair) for pair, wait in self._waits.items() if wait.until_s <= now_s]
        self._trying = min(ready)[1] if ready else None
        return self._trying

    def tried(self, pair: Pair, now_s: float) -> None:
        """If it is as slow as before it is tried again, later."""
        self._trying = None
        if (wait := self._waits.get(pair)) is not None:
            wait_s = min(2 * wait.wait_s, MOST_S)
            self._waits[pair] = _Wait(now_s + wait_s, wait_s)
