"""A joining device that gets the state of the run while the others train: who gives what, and when it is close enough.

    others     step k ───── k+1 ───── k+2 ───── ... ───── n   (stop, change the plan)
                 │ a copy      │ gradients of each step      │
    joining device     └──────► state of k ──► repeats k+1, k+2 ... ──► state of n

A step's gradients are a third of the state with Adam, and less is to be waited for: those of the last step alone. It
comes to nothing where gradients take longer than steps; then the state travels while all wait, as it does without.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

from isthmus.protocol.recovery import state_donors
from isthmus.protocol.run_messages import SendState
from isthmus.protocol.run_ports import PipelinePort

CLOSE_STEPS = 1  # so far behind the others a joining device may be for them to stop and let it in
MOST_TIMES = 20
"""A joining device that is not close after so many times the steps that the first copy took never will be."""


class StateTransfer:
    """The joining devices of one change of plan, from the state after `step` steps on."""

    def __init__(
        self, number: int, step: int, needs: Mapping[str, Set[str]], holds: Mapping[str, Set[str]], epoch: int = 0
    ) -> None:
        """`needs` gives the parts that each joining device needs, `holds` those that each device at work has. `number`
        counts the run's state transfers: messages of an earlier one are ignored."""
        self.number = number
        self._epoch = epoch
        self.step = step
        wanted_parts = frozenset[str]().union(*needs.values())
        self.donated = state_donors({"": wanted_parts}, holds).get("", {})  # parts that each device at work gives
        self.donors = {
            device: tuple(donor for donor, parts in sorted(self.donated.items()) if parts & wanted)
            for device, wanted in sorted(needs.items())
        }
        """Donors of each joining device."""
        self._at: dict[tuple[str, str], int] = {}
        self._copied: int | None = None  # steps that the first copies took
        self._first_lag = 0

    def begin(self, port: PipelinePort) -> None:
        """The state and the gradients of each step are given from now on."""
        for device, donors in self.donors.items():
            port.receive_state(device, self.number, self.step, {donor: self.donated[donor] for donor in donors})
        for donor, parts in sorted(self.donated.items()):
            receivers = frozenset(device for device, donors in self.donors.items() if donor in donors)
            port.order(donor, self._asked(parts, receivers))

    def end(self, port: PipelinePort) -> None:
        """Nothing is given any more."""
        for device in sorted(self.donated):
            port.order(device, self._asked(frozenset()))

    def _asked(self, parts: frozenset[str], receivers: frozenset[str] = frozenset()) -> SendState:
        return SendState(number=self.number, step=self.step, parts=parts, receivers=receivers, epoch=self._epoch)

    def state_received(self, device: str, of: str, step: int) -> None:
        """The joining device has the state of that device's parts after so many steps."""
        if of in self.donors.get(device, ()):
            self._at[device, of] = step

    def reached(self) -> int | None:
        """The step whose state all joining devices have at least; None before they have any."""
        pairs = [(device, of) for device, donors in self.donors.items() for of in donors]
        return min((self._at[pair] for pair in pairs), default=None) if self._at.keys() >= set(pairs) else None

    def is_close(self, done: int) -> bool:
        """Return whether the joining devices are nearly there, with so many steps done."""
        reached = self.reached()
        return reached is not None and reached >= done - CLOSE_STEPS

    def will_not_converge(self, done: int) -> bool:
        """Return whether steps are quicker than their gradients travel."""
        reached = self.reached()
        if reached is None:
            return False
        if self._copied is None:
            self._copied, self._first_lag = done - self.step, done - reached
        return done - reached > self._first_lag + CLOSE_STEPS or done - self.step > MOST_TIMES * (self._copied + 1)

    @property
    def waited_for(self) -> frozenset[str]:
        return frozenset(self.donors)
