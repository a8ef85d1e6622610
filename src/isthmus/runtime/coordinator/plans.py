"""The plans of a run: the one in force, those that were made, and the figures that new ones are made with."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence

from isthmus.fleet import Fleet, changed, with_memory
from isthmus.job import Prepared
from isthmus.plans import Plan
from isthmus.plans.worker_ids import device_of, is_first
from isthmus.protocol import StateLayout
from isthmus.protocol.coordinator_events import MakePlan
from isthmus.protocol.drift import Drift, RateChange, differs
from isthmus.protocol.link_reprobe import LinkReprobe, Pair
from isthmus.protocol.memory_shortage import MemoryShortage, believed_bytes
from isthmus.protocol.replan_policy import ReplanGain, ReplanPolicy
from isthmus.runtime.coordinator.stage_assignments import StageAssignments
from isthmus.trace import Span
from isthmus.units import format_size

CHANGE_S = 5.0
"""What it costs to change the plan besides moving weights: to stop, to connect, to start."""

RETRY_S = 60.0
"""How long a link that became slow, and is not used since, rests before a probe tries it again."""


class Plans:
    """`make` may be called by any thread, all else by one."""

    def __init__(
        self,
        prepared: Prepared,
        first: Plan,
        fleet: Fleet,
        replan: Callable[[Fleet], Plan] | None,
        *,
        believed: Fleet | None = None,
        emulate: bool,
    ) -> None:
        """`replan` None: the first plan is the only one. `believed`: the fleet as an earlier session measured it."""
        self._prepared = prepared
        self._replan = replan
        self._emulated = fleet if emulate else None
        self._believed = believed or fleet
        """What plans are made for."""
        self._drift = Drift(self._believed)
        self._fits = 0
        self._memory: dict[str, int] = {}
        """By device, what is there where that turned out to be less than stated."""
        self._replan_policy = ReplanPolicy()
        self._retries = LinkReprobe(RETRY_S)
        self._adapts = replan is not None and prepared.job.runtime.adapt
        self._making = threading.Lock()
        self._change_s = 0.0
        """What it costs to change to the plan that was made last; 0 where it must be."""
        self._reached = 0
        """Steps that are done."""
        self._made = {0: self._deployment(first, 0)}
        self.now = self._made[0]
        """In force."""
        if self._adapts and differs(fleet, self._believed) and not self._is_made_for(self._believed):
            self._replan_policy.changed()

    def _deployment(self, plan: Plan, number: int) -> StageAssignments:
        return StageAssignments(self._prepared, plan, self._believed, emulated=self._emulated, number=number)

    def _is_made_for(self, fleet: Fleet) -> bool:
        return math.isclose(self.now.repriced(fleet), self.now.plan.predicted.step_s)

    def make(self, wanted: MakePlan) -> tuple[StateLayout, bool]:
        """A plan for these devices, and whether it is worth the change. UserError when there is none."""
        assert self._replan is not None, "a run that cannot plan again does not ask"
        with self._making:
            fleet = self._believed.subset(filter(is_first, wanted.devices))
            plan = self.now.of_whole_replicas(fleet) if wanted.waits else None
            number = max(self._made) + 1
            found = self._deployment(plan or self._replan(fleet), number)
            self._made[number] = found
            self._replan_policy.answered()
        if wanted.must:
            self._change_s = 0.0
            return found.layout, True
        gain = self._gain(found)
        self._change_s = gain.cost_s
        return found.layout, gain.worth_it

    def _gain(self, found: StageAssignments) -> ReplanGain:
        return ReplanGain(
            step_s=self.now.repriced(self._believed),
            other_step_s=found.plan.predicted.step_s,
            steps=self._prepared.job.training.steps - self._reached,
            cost_s=found.moving_s(self.now) + CHANGE_S,
        )

    def begin(self, layout: StateLayout, step: int) -> None:
        """One of those that were made is in force, from the state after `step` steps on."""
        replaced, self.now = self.now, self._made[layout.number]
        self._drift.begin(self.now.plan, step)
        self._replan_policy.began(time.monotonic(), self._change_s if self.now is not replaced else 0.0)
        self._reached = step

    def measured(self, step: int, spans: Sequence[Span]) -> list[RateChange]:
        """All devices have done the step, and reported these spans since the one before; returns what is believed
        anew."""
        self._reached = step + 1
        return self._believe(self._drift.note(step, spans) if self._adapts else [])

    def _believe(self, found: list[RateChange]) -> list[RateChange]:
        if found:
            self._replan_policy.changed()
        if found or self._drift.fits != self._fits:
            self._fits, self._believed = self._drift.fits, with_memory(self._drift.fleet(), self._memory)
        return found

    def short(self, device: str, shortage: MemoryShortage) -> str:
        """A device's memory was too little for its stage under the plan in force; returns what is believed of it from
        now on, in words."""
        device = device_of(device)
        stages = [stage for replica in self.now.plan.replicas for stage in replica.workers]
        stated = self._believed.device(device).memory_bytes
        planned = sum(stage.memory.total for stage in stages if stage.device == device)
        found = believed_bytes(shortage, planned or stated, stated)
        self._memory[device] = found
        self._believed = with_memory(self._believed, self._memory)
        there = f"{format_size(shortage.capacity)} of {format_size(shortage.total)} are to be had"
        return f"{device}: {there} now: plans count on {format_size(found)}, not on {format_size(stated)}"

    def to_try(self) -> Pair | None:
        """A link that was slow, carries nothing, and may have recovered: whether it has is to be tried now."""
        return self._retries.due(self._drift.doubtful(), time.monotonic()) if self._adapts else None

    def tried(self, link: Pair, bandwidth_bytes_per_s: float | None) -> list[RateChange]:
        """How fast it is, None where nobody could say; returns what is believed anew."""
        self._retries.tried(link, time.monotonic())
        return self._believe([] if bandwidth_bytes_per_s is None else self._drift.tried(link, bandwidth_bytes_per_s))

    def emulated(self, link: Pair) -> float | None:
        """Bytes/s of a link that is emulated here, as it is now."""
        if self._emulated is None:
            return None
        now = changed(self._emulated, self._prepared.job.runtime.changes, self._reached)
        return now.link(*link).bandwidth_bytes_per_s

    def is_worth_asking(self) -> bool:
        """Whether to ask for another plan; it is asked for then."""
        return self._replan_policy.ask(time.monotonic())
