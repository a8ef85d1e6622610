"""The ports of the machines of federated rounds to their hosts."""

from __future__ import annotations

from typing import Protocol

from isthmus.planners.cohort import CohortSchedule
from isthmus.protocol.federated_events import FinishRounds, RoundRecord
from isthmus.protocol.federated_messages import ExecutorOrder, PhaseId, PhaseSetup
from isthmus.protocol.federated_planning import PlanningProblem
from isthmus.protocol.secure_coordinator import TakeMasksOff, Unmasking
from isthmus.protocol.secure_messages import SecureOrder


class RoundPort(Protocol):
    """Rounds, whether sums are masked or not."""

    def notify(self, executor: str, order: ExecutorOrder) -> None:
        """Send this to one executor. With `PhaseOpened` comes the broadcast."""

    def plan(self, round_: int, problem: PlanningProblem) -> CohortSchedule:
        """Return the schedule of this round."""
        ...

    def merge(self, executor: str, phase: PhaseId) -> None:
        """Take in the sums that the executor has just sent."""

    def ignore(self, executor: str, phase: PhaseId) -> None:
        """The sums that the executor has just sent came too late."""

    def dismiss(self, executor: str, reason: str) -> None:
        """Hang up on an executor that sent what it cannot have."""

    def update_server(self, phase: PhaseId, opening: PhaseSetup | None = None) -> None:
        """Every sum of the pass is in: the server's update. `opening` is the setup of a pass without clients, which no
        executor opens."""

    def commit(self, record: RoundRecord) -> None:
        """The round is part of the run."""

    def finished(self, finish: FinishRounds) -> None:
        """Halt every executor. Nothing follows."""


class CoordinatorPort(RoundPort, Protocol):
    """The coordinator asks this of the run."""

    def opened(self, phase: PhaseId, executors: frozenset[str]) -> None:
        """These were sent the opening of a phase."""

    def unmask_sums(self, phase: PhaseId, executors: frozenset[str]) -> None:
        """The phase is over, and its sum, of the updates of these executors, is masked. Say `unmasked` when the masks
        are off, now or later."""


class FederatedPort(RoundPort, Protocol):
    """The run asks this of its host."""

    def tell(self, site: str, order: SecureOrder) -> None:
        """Send a site a step of secure aggregation."""

    def take_masks_off(self, recovered: TakeMasksOff) -> Unmasking:
        """Take the masks off the sum."""
        ...

    def note(self, text: str) -> None:
        """Tell people."""
