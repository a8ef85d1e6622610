"""Numbers that are not finite: where in a step they appeared first, and when they end a run.

Every device checks what its stage computes and says the first place of a step where it found NaN or infinity. Only
losses, gradients of parameters and saved weights decide: a mask of -inf is a value like others on its way to the loss.
What is not finite spreads along the pipeline, so several devices may say something of one step; where it is not finite,
the earliest place counts:

    micro-batch by micro-batch:  outputs of stage 0, 1, ..., the loss, gradients from the last stage back to stage 0
    after all of them:           gradients of parameters; at a checkpoint: parameters, buffers
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from isthmus.wire_types import CountOrNone, PlaceOrNone, Text

OnNonFinite = Literal["stop", "skip", "ignore"]
"""The reaction to a step whose loss or gradient norm is not finite: it ends the run; its update is left out on every
stage; none."""
Where = Literal["output", "loss", "gradient", "parameter gradient", "parameter", "buffer"]
_ORDER: dict[Where, int] = {"output": 0, "loss": 1, "gradient": 2, "parameter gradient": 3, "parameter": 4, "buffer": 5}


class NonFinite(msgspec.Struct, frozen=True, kw_only=True):
    """The first place on one stage where an item's numbers are not finite."""

    where: Where
    stage: PlaceOrNone  # the stage's number in its replica
    micro_batch: CountOrNone = -1  # the micro-batch's number in the step; -1 for a value of the whole step
    name: Text = ""  # the name of the value that is not finite
    cause: Text = ""  # an input that was not finite before this stage computed anything
    decides: bool = False
    """Whether a loss, a parameter's gradient or a saved weight is not finite on this stage. Otherwise this is where it
    may have begun, if another stage decides."""

    @property
    def order(self) -> tuple[float, int, int]:
        """Smaller is earlier."""
        micro_batch = self.micro_batch if self.micro_batch >= 0 else float("inf")
        return micro_batch, _ORDER[self.where], self.stage if self.where == "output" else -self.stage

    def described(self, device: str) -> str:
        """Return the finding as the end of a sentence."""
        what = f"{self.where} {self.name}".strip()
        at = f", micro-batch {self.micro_batch}" if self.micro_batch >= 0 else ""
        cause = f"; {self.cause} was not finite before" if self.cause else ""
        return f"first in the {what} of stage {self.stage} on device {device!r}{at}{cause}"


def earliest(found: Mapping[str, NonFinite]) -> tuple[str, NonFinite] | None:
    """The device that saw it first, and where, among what devices say of one item; None if the item is finite."""
    if not any(seen.decides for seen in found.values()):
        return None
    return min(found.items(), key=lambda one: (one[1].order, one[0]))


class Divergence:
    """Steps in a row that were not finite, and when there are too many of them."""

    def __init__(self, limit: int) -> None:
        """`limit`: consecutive steps that end the run; 0 for none."""
        self._limit = limit
        self.steps = 0

    def restart(self) -> None:
        """The run goes on from an earlier state."""
        self.steps = 0

    def stepped(self, step: int, found: Mapping[str, NonFinite]) -> tuple[str, bool]:
        """A step is done: what to say of it, empty if there is nothing new, and whether the run ends here."""
        first = earliest(found)
        if first is None:
            self.steps = 0
            return "", False
        self.steps += 1
        device, where = first
        ends = 0 < self._limit <= self.steps
        if self.steps > 1 and not ends:
            return "", False
        row = f", the last of {self.steps} such steps in a row" if self.steps > 1 else ""
        return f"step {step + 1}: numbers are not finite, {where.described(device)}{row}", ends

    def saved(self, step: int, found: Mapping[str, NonFinite]) -> tuple[str, bool]:
        """The same of a checkpoint after so many steps, whose weights may not be finite."""
        first = earliest(found)
        if first is None:
            return "", False
        device, where = first
        what = f"the {where.where} {where.name} of stage {where.stage} on device {device!r}"
        return f"after step {step} {what} is not finite", self._limit > 0
