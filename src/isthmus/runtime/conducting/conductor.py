"""The coordinator's driver: carries out a `Coordinator` machine's instructions over real connections."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial

import msgspec
from torch import Tensor

from isthmus.errors import Diverged, FleetTooSmall, IsthmusError, PeerError, UserError
from isthmus.plans.seats import device_of, is_first
from isthmus.protocol.attempts import StepFailure
from isthmus.protocol.coordinator import Coordinator
from isthmus.protocol.coordinator_events import (
    Advance,
    Assign,
    Begin,
    Call,
    Changed,
    Commit,
    CoordinatorEvent,
    CoordinatorInstruction,
    Fence,
    Fetch,
    Fetched,
    Finish,
    Follow,
    Followed,
    FollowingEnded,
    Halt,
    Held,
    Hold,
    Interrupted,
    Joined,
    Leaving,
    Lend,
    Lost,
    MakePlan,
    Mirrored,
    NoPlan,
    Offered,
    Open,
    Place,
    Planned,
    Ready,
    Recall,
    Release,
    Reported,
    Retire,
    StepFailed,
)
from isthmus.protocol.work import Item
from isthmus.runtime.conducting.crew import NoWork, Work, ways_of
from isthmus.runtime.conducting.deadlines import Deadlines
from isthmus.runtime.conducting.link_trials import LinkTrials
from isthmus.runtime.conducting.losses import Losses, without_name
from isthmus.runtime.conducting.newcomers import Newcomers
from isthmus.runtime.conducting.script import Address, Outcome, Recovery, Script
from isthmus.runtime.messages.assignment import Assignment
from isthmus.runtime.messages.every import FROM_DEVICES, AnyMessage
from isthmus.runtime.messages.following import (
    FollowedMessage,
    FollowingEndedMessage,
    LendMessage,
    LentMessage,
    LentPart,
)
from isthmus.runtime.messages.recovery import (
    FetchMessage,
    GivenMessage,
    HeldMessage,
    HoldMessage,
    MirroredMessage,
    RetireMessage,
)
from isthmus.runtime.messages.run import (
    AssignMessage,
    Failed,
    HaltMessage,
    Heartbeat,
    Join,
    OpenMessage,
    ReadyMessage,
    ReportMessage,
    Weights,
)
from isthmus.runtime.processes.computing import Computing
from isthmus.runtime.processes.interrupting import Stop
from isthmus.runtime.transport.lanes import SendLane
from isthmus.runtime.transport.reception import Heard, Reception
from isthmus.trace import Span
from isthmus.training.layout import header_of

TICK_S = 0.25
"""How often to look whether everybody is still there."""
MOST_SPANS = 500_000
"""What is kept of a trace: days of training would not fit in memory."""
FAMILIES: Mapping[str, type[IsthmusError]] = {"lost": PeerError, "diverged": Diverged, "failed": UserError}
"""What a run's failure is, by how it ended."""
LATE_ITEMS = 64
"""Spans of an item may come with a later item's report, at most this many later."""


class Conductor:
    """Runs the machine in the thread that calls `conduct`, over the connections that its reception is given."""

    def __init__(
        self, machine: Coordinator, run: str, script: Script, *, patience_s: float, others: Sequence[str] = (),
        start_s: float = 0.0,
    ) -> None:  # fmt: skip
        """`others` may join besides the devices of the first plan; `start_s` is how long a process may take to come."""
        self.machine = machine
        self._run = run
        self._script = script
        self._patience_s = patience_s
        self._heard: queue.SimpleQueue[Heard | CoordinatorEvent] = queue.SimpleQueue()
        self._planners = Computing()
        self._over = threading.Event()
        self._lanes: dict[str, SendLane] = {}
        self._addresses: dict[str, Address] = {}
        self._items: dict[int, Item] = {}
        self._reports: dict[str, int] = dict.fromkeys(machine.devices, 0)
        self._fresh: list[Span] = []
        self._spans: list[Span] = []
        self._late_s: dict[str, float] = {}
        self._origin_s = 0.0
        self._failure: IsthmusError | None = None
        self._assigned: Mapping[str, Assignment] = {}
        self._newcomers = Newcomers(run, script, self._lanes)
        self._work: Work = NoWork()
        self._losses = Losses(self._ended)
        self._deadlines = Deadlines(patience_s, start_s, script.note)
        self._offered: set[str] = set()
        self._trials = LinkTrials(script)
        self._recoveries: list[Recovery] = []
        self._short = False
        """Whether memory was short on a device since the last step."""
        self._verdict: IsthmusError | None = None
        """On the device that was lost last."""
        self._disturbed: tuple[float, str] | None = None
        """Since when, and why, nobody is at work."""
        self._begun: tuple[Begin, int] | None = None
        """The epoch that is in the making, and how many steps it does again."""
        self._reached = 0
        """Steps that all devices have done."""
        self.reception = Reception(
            run, {*machine.devices, *others}, heard=self._heard.put, guard=self._guard, patience_s=patience_s
        )
        """Takes the devices' connections."""

    def conduct(self, work: Work | None = None, stop: Stop | None = None) -> Outcome:
        """Run to the end, with the devices that are at work.

        To stop is to finish what is leased, to save and to end; a second Ctrl-C ends at once.
        """
        self._work = work or self._work
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()
        try:
            with (stop or Stop()).calls(lambda: self._heard.put(Interrupted())):
                finish = self._loop()
            ended_s = time.monotonic()
            for lane in self._lanes.values():
                lane.close()
        finally:
            self._over.set()
            self.reception.close()
            self._planners.end()
        return Outcome(
            outcome=finish.outcome, reason=str(self._failure or finish.reason), failure=self._failure,
            spans=tuple(self._spans), late_s=self._late_s, elapsed_s=ended_s - (self._origin_s or ended_s),
            recoveries=tuple(self._recoveries), origin_s=self._origin_s,
        )  # fmt: skip

    def _beat(self) -> None:
        """In a thread of its own: a hook or a slow disk may hold up the conducting one for long."""
        while not self._over.wait(self._patience_s / 4):
            for lane in list(self._lanes.values()):
                lane.put(Heartbeat(run=self._run))

    def _ended(self) -> Mapping[str, str]:
        """Of those that work, or are to."""
        joining = self.machine.statistics().phase == "joining"
        concerned = self._lanes.keys() | (self.machine.awaited if joining else set())
        return {device: how for device, how in self._work.ended().items() if device in concerned}

    def tell(self, event: CoordinatorEvent) -> None:
        """Something that a person or another part of the program wants. Any thread."""
        self._heard.put(event)

    def _loop(self) -> Finish:
        finish: Finish | None = None
        looked_s = 0.0
        while finish is None:
            with contextlib.suppress(queue.Empty):
                for event in self._translate(self._heard.get(timeout=TICK_S)):
                    finish = self._handle(event) or finish
            now_s = time.monotonic()
            if finish is None and (self._losses.certain or now_s - looked_s >= TICK_S):
                looked_s = now_s
                finish = self._look(now_s)
        return finish

    def _look(self, now_s: float) -> Finish | None:
        """Who is lost, and who could work."""
        machine = self.machine
        phase = machine.statistics().phase
        awaited = {device_of(seat) for seat in machine.awaited}
        for device, why in self._deadlines.missed(phase, awaited, now_s, self._work.starting):
            self._losses.vanished(device, why)
        for device in machine.awaited if phase == "recalling" else ():
            if not self._work.returns(device):
                self._losses.vanished(device, "it has left")
        self._deadlines.lag(*machine.behind, now_s)
        if (verdict := self._losses.verdict(now_s)) is not None:
            device, self._verdict = verdict
            if isinstance(self._verdict, UserError):  # the job's fault: every other device would say the same
                self._failure = self._verdict
                for lane in self._lanes.values():
                    lane.put(HaltMessage(run=self._run))
                return Finish("lost", str(self._verdict))
            for_good = self._losses.for_good  # one that cannot work is not asked again
            known = {*self._lanes, *machine.devices, *machine.awaited}
            further = tuple(seat for seat in sorted(known - {device}) if device_of(seat) == device)
            for name in (device, *further):
                self.reception.forget(name, for_good=for_good)
            self._losses.settled(device)
            returns = self._work.returns(device) and not for_good and phase != "recalling"  # is not waited for twice
            reason = without_name(self._verdict, device)
            return self._handle(Lost(device=device, reason=reason, seats=further, returns=returns))
        if self._trials.look(self._work, running=phase == "running"):
            self._heard.put(Changed())
        offers = {d for d in self._work.offers() if d not in self._lanes and self._script.is_known(d)}
        fresh, self._offered = offers - self._offered, offers
        finish: Finish | None = None
        wishes = [Offered(device=device) for device in sorted(fresh)]
        leaving = frozenset(self._work.leaving())
        gone = [Leaving(device=seat) for seat in list(self._lanes) if device_of(seat) in leaving]
        for event in (*wishes, *gone):
            finish = self._handle(event) or finish
        return finish

    def _handle(self, event: CoordinatorEvent) -> Finish | None:
        finish: Finish | None = None
        if isinstance(event, Interrupted | Lost | Joined | Offered | Leaving | Changed):  # of this process, and of now
            event = msgspec.structs.replace(event, epoch=self.machine.epoch)
        for instruction in self.machine.handle(event):
            finish = self._carry_out(instruction) or finish
        if finish is not None and finish.outcome in FAMILIES:
            family = FleetTooSmall if self._short else FAMILIES[finish.outcome]
            lost = finish.outcome == "lost" and not self.machine.survives
            self._failure = self._verdict if lost else family(finish.reason)
        return finish

    def _guard(self, device: str, message: AnyMessage) -> None:
        """Refuse what no device sends, before its tensors are received. Any thread."""
        if not isinstance(message, FROM_DEVICES):
            raise PeerError(f"sent {type(message).__name__} to the coordinator")
        if isinstance(message, LentMessage | LentPart):
            self._newcomers.check(device, message, self.machine.epoch)
            return
        item = self._items.get(message.item) if isinstance(message, ReportMessage) else None
        if isinstance(message, GivenMessage) or (item is not None and message.epoch != self.machine.epoch):
            self._script.check_parts(message.tensors)
        elif item is not None and item.kind == "save":
            self._script.check_state(device, message.tensors)
        elif message.tensors:
            raise PeerError(f"sent {type(message).__name__} with tensors")

    def _translate(self, heard: Heard | CoordinatorEvent) -> list[CoordinatorEvent]:
        """What a device sent, as events for the machine."""
        if not isinstance(heard, tuple):
            return [heard]
        device, message, tensors = heard
        if isinstance(message, Join):
            return [self._joined(device, message)]
        if device not in self._lanes:
            return []  # of one that was fenced meanwhile
        epoch, owner = message.epoch if isinstance(message, msgspec.Struct) else 0, device_of(device)
        match message:
            case None:
                self._losses.vanished(owner, "its connection closed")
            case Exception():
                self._losses.vanished(owner, str(message).removeprefix(f"device {device!r}: "))
            case ReadyMessage(ways=ways, notes=notes):
                for note in notes:
                    self._script.note(f"{device}: {note}")
                if is_first(device):
                    self._work.linked(device, ways_of(device, ways, self.machine.devices))
                return [Ready(device=device, epoch=epoch)]
            case HeldMessage(holdings=holdings):
                return [Held(device=device, holdings=holdings, epoch=epoch)]
            case MirroredMessage(of=of, step=step):
                return [Mirrored(device=device, of=of, step=step, epoch=epoch)]
            case FollowedMessage(of=of, step=step, number=number):
                return [Followed(device=device, of=of, step=step, number=number, epoch=epoch)]
            case FollowingEndedMessage(number=number):
                return [FollowingEnded(device=device, number=number, epoch=epoch)]
            case LentMessage() | LentPart():
                return [*self._newcomers.pass_on(device, message, tensors)] if epoch == self.machine.epoch else []
            case GivenMessage():
                if epoch == self.machine.epoch:
                    self._script.give({h.name: t for h, t in zip(message.tensors, tensors, strict=True)})
                return [Fetched(device=device, epoch=epoch)]
            case ReportMessage() if epoch == self.machine.epoch:
                if message.item != self._reports.get(device) or message.item not in self._items:
                    expected = self._reports.get(device)
                    failure = PeerError(f"device {device!r}: reported item {message.item}, not {expected}")
                    self._losses.told(owner, failure)
                    return []
                return [self._reported(device, message, tensors)]
            case Failed(fault="other"):
                if epoch == self.machine.epoch:
                    self._losses.blames(owner, message.reason)
            case Failed(failure=StepFailure() as failure):
                if epoch == self.machine.epoch:
                    self._losses.settled(owner)  # whoever worked with it blames it now
                    if message.shortage is not None:
                        self._short = True
                        self._script.short(device, message.shortage)
                    self._verdict = PeerError(f"device {device!r}: {failure.reason}")
                    return [StepFailed(device=device, failure=failure, epoch=epoch)]
            case Failed(starts_again=True):
                self._losses.failed(owner, message.reason)
            case Failed():
                family = UserError if message.fault == "user" else PeerError
                self._losses.told(owner, family(f"device {owner!r}: {message.reason}"))
            case _:
                pass
        return []

    def _joined(self, device: str, message: Join) -> Joined:
        channel = self.reception.channel(device)
        self._lanes[device] = SendLane(channel, patience_s=self._patience_s)
        party = channel.party.id if channel.party is not None else ""
        self._addresses[device] = Address(message.host, message.port, party)
        return Joined(device=device, holdings=message.holdings)

    def _reported(self, device: str, message: ReportMessage, tensors: list[Tensor]) -> Reported:
        self._reports[device] = message.item + 1
        told = map(self._localise, message.spans)
        self._fresh += [s for s in told if s.other != s.device]  # what stays in a device is on no link
        owner = device_of(device)
        self._late_s[owner] = self._late_s.get(owner, 0.0) + message.late_s
        item = self._items[message.item]
        if item.kind == "save":
            state = {h.name: t for h, t in zip(message.tensors, tensors, strict=True)}
            self._script.saved(item, device, state, message.peak)
        return Reported(
            device=device, item=message.item, loss=message.loss, count=message.count, epoch=message.epoch,
            non_finite=message.non_finite,
        )  # fmt: skip

    def _localise(self, span: Span) -> Span:
        """A device speaks of items and of the machine's clock; a trace of steps and of the run's."""
        item = self._items.get(span.step)
        return msgspec.structs.replace(
            span, step=item.step if item is not None else -1, device=device_of(span.device),
            other=device_of(span.other),
            start_s=span.start_s - self._origin_s, end_s=span.end_s - self._origin_s,
        )  # fmt: skip

    def _carry_out(self, instruction: CoordinatorInstruction) -> Finish | None:
        run, epoch = self._run, self.machine.epoch
        match instruction:
            case Begin():
                self._begin(instruction)
            case Assign(device=device):
                if not self._assigned:
                    self._assigned = self._script.assignments(self._addresses)
                self._say(device, AssignMessage(run=run, epoch=epoch, assignment=self._assigned[device]))
            case Place(device=device, own=own):
                weights = self._script.weights(device, own)
                headers = tuple(header_of(name, t) for name, t in weights.items())
                self._say(device, Weights(run=run, epoch=epoch, own=own, tensors=headers), list(weights.values()))
            case Open(item=item):
                self._open(item, epoch)
            case Advance(item=item, loss=loss, remark=remark):
                self._advance(item, loss)
                if remark:
                    self._script.note(remark)
            case Commit(item=item, finite=finite):
                self._script.commit(item, finite=finite)
            case Hold(device=device):
                self._disturb()
                self._say(device, HoldMessage(run=run, epoch=epoch))
            case Fence(device=device):
                self._dismiss(device)
            case MakePlan(waits=waits):
                if waits:
                    self._disturb()
                self._planners.start(partial(self._plan, instruction, epoch), "planner")
            case Call(device=device):
                if is_first(device):  # its other seats come with it
                    self._work.call(device)
            case Recall(devices=devices, count=count, most=most, reasons=reasons):
                again = f"calling {', '.join(devices)} again, attempt {count} of {most}"
                self._script.note(f"too few devices are left ({reasons}): {again}")
            case Fetch(device=device, step=step, parts=parts):
                self._say(device, FetchMessage(run=run, epoch=epoch, step=step, parts=parts))
            case Follow():
                self._newcomers.follow(instruction, epoch)
            case Lend(device=device, number=number, step=step, parts=parts):
                if not parts:
                    self._newcomers.forget(device)
                self._say(device, LendMessage(run=run, epoch=epoch, number=number, step=step, parts=parts))
            case Retire(step=step):
                self._script.acknowledged(step)
                for device in self._lanes:
                    self._say(device, RetireMessage(run=run, epoch=epoch, step=step))
            case Release(device=device):
                self._script.note(f"{device} has left")
                self._say(device, HaltMessage(run=run, epoch=epoch))
                self._lanes[device].drain()
                self._dismiss(device)
            case Halt():
                for device in self._lanes:
                    self._say(device, HaltMessage(run=run, epoch=epoch))
            case Finish():
                return instruction
        return None

    def _say(self, device: str, message: AnyMessage, tensors: Sequence[Tensor] = ()) -> None:
        """To one who may have gone meanwhile."""
        if (lane := self._lanes.get(device)) is not None:
            lane.put(message, tensors)

    def _dismiss(self, device: str) -> None:
        lane = self._lanes.pop(device, None)
        self.reception.forget(device)
        self._losses.settled(device)
        self._offered.discard(device)
        if lane is not None:
            lane.close(0.0)

    def _plan(self, wanted: MakePlan, epoch: int) -> None:
        try:
            layout, pays = self._script.plan(wanted)
        except Exception as e:  # whatever it is, the run must be told: it waits for a plan
            reason = str(e) if isinstance(e, IsthmusError) else f"{type(e).__name__}: {e}"
            self._heard.put(NoPlan(reason=reason, epoch=epoch))
        else:
            self._heard.put(Planned(layout=layout, pays=pays, epoch=epoch))

    def _begin(self, begin: Begin) -> None:
        self._script.begin(begin, self.machine.layout)
        self._assigned = {}
        self._newcomers.clear()
        self._reports = dict.fromkeys(self.machine.devices, begin.first_item)
        self._begun = (begin, max(0, self._reached - begin.step))
        self._reached = begin.step
        if self._disturbed is not None:
            source = "the last checkpoint" if begin.from_checkpoint else "the devices' memory"
            self._script.note(f"epoch {begin.epoch}: going on after step {begin.step}, out of {source}")

    def _disturb(self) -> None:
        """The devices' work is interrupted."""
        if self._disturbed is None:
            reason = "the plan is changed for a better one"
            if self._verdict is not None or self._begun is None:
                reason = str(self._verdict or "the coordinator was started again")
            self._disturbed = (time.monotonic(), reason)
            self._script.note(reason)

    def _at_work_again(self, since_s: float, reason: str) -> None:
        assert self._begun is not None, "items are opened in an epoch"
        begin, redone = self._begun
        found = Recovery(
            reason=reason, step=begin.step, redone=redone, from_checkpoint=begin.from_checkpoint,
            seconds=time.monotonic() - since_s,
        )  # fmt: skip
        self._recoveries.append(found)
        self._disturbed = self._verdict = None
        self._script.note(f"at work again after {found.seconds:.1f} s, {redone} steps are done again")

    def _open(self, item: Item, epoch: int) -> None:
        self._origin_s = self._origin_s or time.monotonic()
        if self._disturbed is not None:
            self._at_work_again(*self._disturbed)
        self._items[item.index] = item
        self._items.pop(item.index - LATE_ITEMS - self.machine.spec.lease_ahead, None)
        self._script.opened(item)
        for device in self.machine.devices:
            self._say(device, OpenMessage(run=self._run, epoch=epoch, item=item))

    def _advance(self, item: Item, loss: float | None) -> None:
        fresh, self._fresh = self._fresh, []
        if len(self._spans) < MOST_SPANS:
            self._spans += fresh
        if item.kind == "train":
            self._reached, self._short = item.step + 1, False
        if self._script.advanced(item, loss, tuple(fresh)):
            self._heard.put(Changed())
