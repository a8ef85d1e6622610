"""The devices of a run: connected, expected or leaving, the state that each holds or gets, lost ones that can return;
and the times in which none works."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set

import msgspec

from isthmus.protocol.recovery import StateHolding, state_donors
from isthmus.protocol.run_messages import SendState
from isthmus.protocol.run_ports import EpochStart, PipelinePort


class Members:
    def __init__(self) -> None:
        self.here: set[str] = set()  # devices with a process that has joined the run
        self._offered: set[str] = set()  # devices that could be called
        self._leaving: set[str] = set()
        self._held: dict[str, Sequence[StateHolding]] = {}

    @property
    def available(self) -> frozenset[str]:
        """Whom a plan may use."""
        return frozenset((self.here | self._offered) - self._leaving)

    @property
    def holdings(self) -> Mapping[str, Sequence[StateHolding]]:
        """The state that each device which is here holds."""
        return {device: held for device, held in self._held.items() if device in self.here}

    @property
    def silent(self) -> frozenset[str]:
        """Those here that have not said what they hold since they were asked."""
        return frozenset(self.here - self._held.keys())

    def missing(self, devices: Iterable[str]) -> list[str]:
        return [device for device in devices if device not in self.here]

    def joined(self, device: str, holdings: Sequence[StateHolding]) -> None:
        self.here.add(device)
        self._offered.discard(device)
        self._held[device] = holdings

    def holds(self, device: str, holdings: Sequence[StateHolding]) -> None:
        self._held[device] = holdings

    def asked(self) -> None:
        """All that are here were: what they held before counts no more."""
        self._held.clear()

    def offered(self, device: str) -> None:
        self._offered.add(device)

    def leaves(self, device: str) -> None:
        self._leaving.add(device)

    def stay(self) -> None:
        """All that were to leave: there is no plan without them."""
        self._leaving.clear()

    def leaving(self, devices: Collection[str]) -> frozenset[str]:
        """Those of them that are to leave."""
        return frozenset(self._leaving.intersection(devices))

    def released(self, devices: Collection[str]) -> list[str]:
        """Those here that are to leave, beside these devices, whom the plan uses: they are gone now."""
        gone = sorted(self._leaving & self.here - set(devices))
        for device in gone:
            self.gone(device)
        return gone

    def gone(self, device: str) -> None:
        self._held.pop(device, None)
        for devices in (self.here, self._offered, self._leaving):
            devices.discard(device)


MOST_RECALLS = 3
"""So often the run is begun anew from the same state for want of devices. What kills all of them again and again is
mended by a person."""


class Restarts:
    """Devices that were lost while their machine stayed, and how often the run waited for such devices."""

    def __init__(self) -> None:
        self._reasons: dict[str, str] = {}  # why each device was lost that is not back
        self._returning: set[str] = set()
        self._in_queue: frozenset[str] = frozenset()
        self._step = -1
        self.count = 0  # how often the run was begun anew from the state that it was begun from last
        self._counted = False  # whether the last time has no plan yet

    @property
    def awaited(self) -> frozenset[str]:
        """Lost, and expected back soon."""
        return frozenset(self._returning - self._in_queue)

    @property
    def queued(self) -> frozenset[str]:
        """Lost, and expected back at any time."""
        return self._in_queue & self._reasons.keys()

    @property
    def reasons(self) -> str:
        """Return why devices were lost that are not back, or were called again just now."""
        return "; ".join(f"{device}: {reason}" for device, reason in sorted(self._reasons.items()))

    def lost(self, device: str, reason: str, *, returns: bool) -> None:
        self._reasons.setdefault(device, reason)
        (self._returning.add if returns else self._returning.discard)(device)

    def wait_in_queue(self, devices: frozenset[str]) -> None:
        """These devices, and no others. Who leaves the queue comes soon."""
        self._returning |= (self._in_queue - devices) & self._reasons.keys()
        self._in_queue = devices

    def back(self, device: str) -> None:
        """It could work now."""
        self._returning.discard(device)

    def at_work(self, device: str) -> None:
        self._returning.discard(device)
        self._reasons.pop(device, None)

    def again(self, step: int) -> bool:
        """The run is to begin anew from the state after `step` steps; False where it did so too often."""
        self.count = self.count + 1 if step <= self._step else 1
        self._step = max(self._step, step)
        self._counted = True
        return self.count <= MOST_RECALLS

    def planned(self) -> None:
        """There is a plan: the run was begun anew."""
        self._counted = False

    def too_few(self) -> None:
        """There is no plan yet, and more devices come: this time does not count."""
        self.count -= self._counted
        self._counted = False

    def vain(self, step: int) -> str:
        return f"devices were called again {MOST_RECALLS} times, each time from the state after step {step}"


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """A plan epoch that was not the first."""

    reason: str  # why the epoch before ended
    step: int  # from where it went on
    redone: int  # steps that had been done beyond that
    from_checkpoint: bool
    seconds: float  # from when the reason was known until devices were at work again


class Interruptions:
    """Times in which the devices do not work, from a loss or a new plan until the next epoch's first item: the one that
    goes on, and a `Recovery` for each that is over."""

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


CLOSE_STEPS = 1  # so far behind the others a joining device may be for them to stop and let it in
MOST_TIMES = 20
"""A joining device that is not close after so many times the steps that the first copy took never will be."""


class StateTransfer:
    """The joining devices of one change of plan, which get the state of the run while the others train: who gives what,
    and when it is close enough.

        others     step k ───── k+1 ───── k+2 ───── ... ───── n   (stop, change the plan)
                     │ a copy      │ gradients of each step      │
        joining device     └──────► state of k ──► repeats k+1, k+2 ... ──► state of n

    A step's gradients are a third of the state with Adam, and less is to be waited for: those of the last step alone.
    It comes to nothing where gradients take longer than steps; then the state travels while all wait, as it does
    without.
    """

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
