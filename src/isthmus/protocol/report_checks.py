"""Figures of a device's reports, compared with what the run can have: before the coordinator takes a report."""

from __future__ import annotations

from collections.abc import Iterable

from isthmus.protocol.recovery import StateHolding
from isthmus.protocol.run_messages import (
    DeviceFailed,
    DeviceReport,
    Inventory,
    Item,
    ItemReported,
    RunSpec,
    SnapshotCopied,
    StateReceived,
    TransferEnded,
)
from isthmus.protocol.run_ports import EpochStart
from isthmus.session.program import OutOfPhase


class ReportChecks:
    """Checks reports to one coordinator. It is notified in order of what the run does."""

    def __init__(self, spec: RunSpec, epoch: int, steps: int) -> None:
        """`epoch`: of the coordinator's first plan, in which devices can have done so many steps yet."""
        self._spec = spec
        self._first_epoch = epoch
        self._epoch = epoch
        self._most_steps = {epoch: steps}
        """Steps that a device can have done in each epoch at most, from the run's beginning on."""
        self._transfer = (0, 0)  # number and first step of the newest state transfer

    def began(self, begun: EpochStart) -> None:
        self._epoch = begun.epoch
        self._most_steps[begun.epoch] = begun.step

    def opened(self, item: Item) -> None:
        if item.kind == "train":
            self._most_steps[self._epoch] = item.step + 1

    def transfers(self, number: int, step: int) -> None:
        """A state transfer begins."""
        self._transfer = number, step

    def check(self, body: DeviceReport, devices: int) -> None:
        """OutOfPhase for a figure that no device of the run can have; `devices` are
        how many stages the plan has."""
        most = self._most_steps.get(body.epoch, -1)
        number, first = self._transfer
        match body:
            case Inventory(holdings=holdings):
                self.check_held(holdings)
            case SnapshotCopied(step=step):
                _check("copied the snapshot of step", step, 0, most)
            case StateReceived(step=step) if body.number == number:
                _check("received the state of step", step, first, max(step, first))  # its donor says how many are done
            case StateReceived() | TransferEnded():
                _check("took part in state transfer", body.number, 1, number)
            case DeviceFailed(failure=failure) if failure is not None:
                _check("failed in step", failure.step, -1, most)
            case ItemReported(non_finite=found) if found is not None:
                _check("found numbers that are not finite in stage", found.stage, -1, devices - 1)
                _check("found numbers that are not finite in micro-batch", found.micro_batch, -1, self._micro_batches)
            case _:
                pass

    @property
    def _micro_batches(self) -> int:
        return self._spec.micro_batches - 1

    def check_held(self, holdings: Iterable[StateHolding]) -> None:
        """Raise OutOfPhase for a state that no device can hold. Only the run's last step is known of a coordinator
        before this one."""
        for held in holdings:
            before = held.epoch < self._first_epoch
            most = self._spec.steps if before else self._most_steps.get(held.epoch, -1)
            _check(f"holds the state of epoch {held.epoch} after step", held.step, 0, most)


def _check(what: str, got: int, least: int, most: int) -> None:
    if not least <= got <= most:
        expected = f"expected {least} to {most}" if least <= most else "expected none"
        raise OutOfPhase(f"{what} {got}, {expected}")
