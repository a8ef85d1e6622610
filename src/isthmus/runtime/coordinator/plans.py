"""The plans of a run: the one in force, and those that were made."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

from isthmus.fleet import Fleet, changed
from isthmus.job import Prepared
from isthmus.plans import Plan
from isthmus.plans.plan import is_first
from isthmus.protocol import StateLayout
from isthmus.protocol.adaptation import Adaptation, Pair, PlanFigures
from isthmus.protocol.drift import differs
from isthmus.protocol.run_ports import PlanRequest
from isthmus.runtime.coordinator.stage_assignments import StageAssignments

SteadySeconds = Callable[[Plan, Fleet], float]  # of a step of the plan on a fleet


def _by_formula(plan: Plan, fleet: Fleet) -> float:
    return plan.predicted.step_s


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
        repeats: bool = True,
        steady_s: SteadySeconds | None = None,
    ) -> None:
        """`replan` None: the first plan is the only one. `believed`: the fleet as an earlier session measured it.
        `repeats`: gradients alone change the weights. `steady_s` None: plans are compared by the formula."""
        self._prepared = prepared
        self._replan = replan
        self._stated = fleet
        self._emulated = fleet if emulate else None
        self._repeats, self._steady_s = repeats, steady_s or _by_formula
        self._believed = believed or fleet
        self._making = threading.Lock()
        self._made = {0: self._deployment(first, self._believed, 0)}
        self.now = self._made[0]  # in force

    def adaptation(self, steps: int | None = None) -> Adaptation:
        """The machine that decides when another plan is made, in a run of so many steps; None: those of the job."""
        return Adaptation(
            self.now.plan,
            self._believed,
            self._prepared.job.training.steps if steps is None else steps,
            number=self.now.layout.number,
            adapts=self._replan is not None and self._prepared.job.runtime.adapt,
            outdated=differs(self._stated, self._believed) and not self._is_made_for(self._believed),
        )

    def _deployment(self, plan: Plan, fleet: Fleet, number: int) -> StageAssignments:
        return StageAssignments(
            self._prepared, plan, fleet, emulated=self._emulated, number=number, repeats=self._repeats
        )

    def _is_made_for(self, fleet: Fleet) -> bool:
        return math.isclose(self.now.repriced(fleet).predicted.step_s, self.now.plan.predicted.step_s)

    def make(self, request: PlanRequest) -> tuple[StateLayout, PlanFigures]:
        """A plan for these devices, with its figures. UserError when there is none."""
        assert self._replan is not None, "a run that cannot plan again does not ask"
        believed = request.believed or self._believed
        with self._making:
            fleet = believed.subset(filter(is_first, request.devices))
            plan = self.now.of_whole_replicas(fleet) if request.waits else None
            number = max(self._made) + 1
            found = self._deployment(plan or self._replan(fleet), believed, number)
            self._made[number] = found
        if request.must:
            return found.layout, PlanFigures(plan=found.plan)
        now_s, then_s = (self._steady_s(plan, believed) for plan in (self.now.repriced(believed), found.plan))
        moving_s = found.moving_s(self.now)
        return found.layout, PlanFigures(plan=found.plan, step_s=now_s, other_step_s=then_s, moving_s=moving_s)

    def begin(self, layout: StateLayout) -> None:
        """One of those that were made is in force."""
        self.now = self._made[layout.number]

    def emulated(self, link: Pair, step: int) -> float | None:
        """Bytes/s of a link that is emulated here, as it is in a step."""
        if self._emulated is None:
            return None
        now = changed(self._emulated, self._prepared.job.runtime.changes, step)
        return now.link(*link).bandwidth_bytes_per_s
