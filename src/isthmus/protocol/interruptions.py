"""Times in which the devices of a run do not work: from a loss or a new plan until the next epoch's first item."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from isthmus.protocol.run_ports import EpochStart


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """A plan epoch that was not the first."""

    reason: str  # why the epoch before ended
    step: int  # from where it went on
    redone: int  # steps that had been done beyond that
    from_checkpoint: bool
    seconds: float  # from when the reason was known until devices were at work again


class Interruptions:
    """The one that goes on, and a `Recovery` for each that is over."""

    def __init__(self, note: Callable[[str], None]) -> None:
        """`note` gets one line when an interruption begins, when its epoch begins, and when training goes on."""
        self.recoveries: list[Recovery] = []
        self._note = note
        self._ongoing: tuple[float, str] | None = None  # since when, and why
        self._begun: tuple[EpochStart, int] | None = None  # the epoch that began last, and how many steps it repeats
        self._done = 0

    def begin(self, cause: str, now_s: float) -> None:
        """The devices stop. Without a `cause` the plan is changed, or, before any epoch, the coordinator was restarted.
        Another cause in the same interruption changes nothing."""
        if self._ongoing is not None:
            return
        reason = "the plan is changed for a better one"
        if cause or self._begun is None:
            reason = cause or "the coordinator was started again"
        self._ongoing = (now_s, reason)
        self._note(reason)

    def epoch_began(self, begin: EpochStart) -> None:
        self._begun = (begin, max(0, self._done - begin.step))
        self._done = begin.step
        if self._ongoing is not None:
            source = "the last checkpoint" if begin.from_checkpoint else "the devices' memory"
            self._note(f"epoch {begin.epoch}: resuming after step {begin.step} from {source}")

    def step_done(self, steps: int) -> None:
        """All devices have done `steps` steps."""
        self._done = steps

    def end(self, now_s: float) -> bool:
        """The epoch's items are opened. False where no interruption goes on."""
        if self._ongoing is None:
            return False
        assert self._begun is not None, "items are opened in an epoch"
        (since_s, reason), (begin, redone) = self._ongoing, self._begun
        recovery = Recovery(
            reason=reason,
            step=begin.step,
            redone=redone,
            from_checkpoint=begin.from_checkpoint,
            seconds=now_s - since_s,
        )
        self.recoveries.append(recovery)
        self._ongoing = None
        repeated = "1 step is repeated" if redone == 1 else f"{redone} steps are repeated"
        self._note(f"training again after {recovery.seconds:.1f} s; {repeated}")
        return True
