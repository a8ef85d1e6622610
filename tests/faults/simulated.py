"""A run of the real machines on a virtual clock, with everything going wrong that a schedule says; and its history.

What must hold, whatever the schedule: every part of the model went through the same updates; each range of samples
once and in order; nothing is restored from a line that ended; a step that a complete snapshot holds is not lost with
any one device; nobody waits for ever.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from functools import partial

from isthmus.protocol import Coordinator, Item, Lineage, StateLayout
from isthmus.protocol.coordinator_events import (
    AssignStage,
    BeginEpoch,
    CallDevice,
    CommitCheckpoint,
    CoordinatorEvent,
    CoordinatorInstruction,
    DeviceJoined,
    DeviceLeaving,
    DeviceLost,
    DeviceOffered,
    DeviceReady,
    Disconnect,
    FetchState,
    FinishRun,
    FleetChanged,
    Inventory,
    ItemReported,
    MakePlan,
    NoPlan,
    OpenItem,
    Pause,
    PlaceWeights,
    PlanMade,
    ReceiveState,
    ReleaseDevice,
    RetireSnapshots,
    SendState,
    SnapshotCopied,
    StateFetched,
    StateReceived,
    TransferEnded,
)
from isthmus.protocol.events import Opened
from isthmus.simulator.clock import VirtualClock

from .device import Device, History, Stage, Surroundings, Transfer, view_of
from .schedule import Fault, Schedule

LONGEST_S = 2000.0
REDIAL_S = 1.0


class Simulated:
    """Build it, `run` it: AssertionError says what was violated."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.clock = VirtualClock(schedule.seed)
        self.finish: FinishRun | None = None
        self.recoveries = self.recalls = 0
        self._draw = random.Random(schedule.seed)
        self._layers = [f"layer {n}" for n in range(schedule.layers)]
        names = [f"d{n}" for n in range(schedule.devices + schedule.spares)]
        self._machines = dict.fromkeys(names, 0)
        """Every device that there is, with how often it was started."""
        self._devices: dict[str, Device] = {}
        """Those that run."""
        self._stalled: dict[str, list[Callable[[], None]]] = {}
        self._connected: dict[str, int] = {}
        """By device, the session of its connection."""
        self._sessions = itertools.count(1)
        self._arrivals: dict[tuple[object, ...], float] = {}
        """By connection, when its newest message arrives."""
        self._cut: set[frozenset[str]] = set()
        self._left: set[str] = set()
        self._lending: dict[str, int] = {}
        """By device, the number of its lending to joining devices; 0 when it is over."""
        self.state_received = 0
        self._layout = self._plan(tuple(names[: schedule.devices]))
        self._lineage: tuple[tuple[int, int], ...] = ()
        self._checkpoints: dict[int, dict[str, History]] = {0: dict.fromkeys(self._layers, ())}
        self._saved_step = 0
        self._saving: dict[int, dict[str, History]] = {}
        self._store: dict[str, History] = {}
        self._acknowledged = 0
        self._lost_since: set[str] = set()
        self._coordinator: Coordinator | None = Coordinator(self._layout.parts, schedule.spec, layout=self._layout)
        self._began: BeginEpoch | None = None
        for name in names[: schedule.devices]:
            self._start(name)
        for spare in names[schedule.devices :]:
            self._tell(DeviceOffered(device=spare))

    def run(self) -> FinishRun:
        for fault in self.schedule.faults:
            self.clock.at(fault.time_s, ("fault", fault), partial(self._strike, fault))
        self.clock.run()
        assert self.finish is not None, f"nobody has anything left to do: {self._waits()}"
        if self.finish.outcome == "done":
            self._check(self._checkpoints[self._saved_step], self.schedule.spec.steps)
        return self.finish

    def _waits(self) -> str:
        told = self._coordinator.statistics() if self._coordinator is not None else None
        return f"{told}, connected {self._connected}, at work {[(d.name, d.epoch) for d in self._devices.values()]}"

    # Time and messages

    def _after(self, seconds: float, lane: object, act: Callable[[], None]) -> None:
        if self.finish is None:
            assert self.clock.now_s < LONGEST_S, f"the run does not end: {self._waits()}"
            self.clock.at(self.clock.now_s + seconds, str(lane), act)

    def _travel(self, lane: tuple[object, ...], act: Callable[[], None]) -> None:
        """Messages on one connection stay in order, however late one is."""
        late = self._draw.random() < 0.3
        latency_s = self.schedule.latency_s * self._draw.uniform(0.5, 3.0) if late else 0.001
        arrival_s = max(self.clock.now_s + latency_s, self._arrivals.get(lane, 0.0))
        self._arrivals[lane] = arrival_s
        self._after(arrival_s - self.clock.now_s, lane, act)

    def _on(self, device: Device, act: Callable[[], None]) -> None:
        """Now, or when it goes on; never if it is another incarnation by then."""
        if self._devices.get(device.name) is not device or self.finish is not None:
            return
        if (waiting := self._stalled.get(device.name)) is not None:
            waiting.append(partial(self._on, device, act))
        else:
            act()

    def _surroundings(self, name: str) -> Surroundings:
        def later(lane: str, what: str, then: Callable[[], None]) -> None:
            device = self._devices[name]
            mean_s = {"compute": 0.05, "update": 0.02, "save": 0.1, "keep": 0.01, "snapshot_copy": 0.5}.get(what, 0.0)
            self._after(mean_s * self._draw.uniform(0.5, 2.0), (lane, what), lambda: self._on(device, then))

        return Surroundings(later, self._send, self._report, self._on_snapshot_copied)

    def _send(self, source: str, target: str, arrive: Callable[[Device], None]) -> None:
        if frozenset((source, target)) in self._cut:
            epoch = self._devices[source].epoch if source in self._devices else -1
            self._after(self.schedule.timeout_s, "timeout", partial(self._blame, (source, target), epoch))
            return
        other = self._devices.get(target)
        if other is not None:
            act = partial(arrive, other)
            self._travel(("link", source, target), lambda: self._on(other, act))

    def _tell(self, event: CoordinatorEvent) -> None:
        if self._coordinator is None or self.finish is not None:
            return
        machine = self._coordinator
        recalling = machine.statistics().phase == "recalling"
        for instruction in machine.handle(event):
            self._carry_out(instruction, machine)
        if machine.statistics().phase == "recalling" and not recalling:
            self.recalls += 1
            self._after(3 * self.schedule.timeout_s, "recall", partial(self._not_back, machine.epoch))

    def _not_back(self, epoch: int) -> None:
        machine = self._coordinator
        if machine is not None and machine.epoch == epoch:
            for name in sorted(machine.awaited if machine.statistics().phase == "recalling" else ()):
                self._tell(DeviceLost(device=name, reason="it did not come back", epoch=machine.epoch))

    def _from_device(self, name: str, make: Callable[[], CoordinatorEvent]) -> None:
        """A message to the coordinator; it is lost with the connection that it travels on."""
        session, event = self._connected.get(name), make()

        def arrive() -> None:
            if session is not None and self._connected.get(name) == session:
                self._tell(event)

        self._travel(("up", name, session), arrive)

    def _to(self, name: str, act: Callable[[Device], None]) -> None:
        """A message from the coordinator."""
        session, device = self._connected.get(name), self._devices.get(name)

        def arrive() -> None:
            if session is not None and self._connected.get(name) == session and device is not None:
                self._on(device, partial(act, device))

        self._travel(("down", name, session), arrive)

    # The coordinator's driver

    def _carry_out(self, instruction: CoordinatorInstruction, machine: Coordinator) -> None:
        epoch = machine.epoch
        match instruction:
            case BeginEpoch():
                self._begin(instruction)
            case PlaceWeights(device=name, own=own):
                self._place(name, own, machine)
            case OpenItem(item=item):
                for name in machine.devices:
                    self._to(name, lambda device: device.handle(Opened(item=item, epoch=epoch)))
            case Pause(device=name):
                self._to(name, lambda device: self._held(device, epoch))
            case FetchState(device=name, step=step, parts=parts):
                self._to(name, lambda device: self._give(device, step, parts, epoch))
            case ReceiveState(device=name, donated=donated):
                for of in donated:
                    copied = partial(self._copy, instruction, of, epoch)
                    self._after(self._draw.uniform(0.1, 1.0), ("follow", name, of), copied)
            case SendState(device=name, number=number, parts=parts):
                self._lending[name] = number if parts else 0
            case MakePlan():
                self._after(self._draw.uniform(0.0, 2.0), "planner", partial(self._planned, instruction, epoch))
            case CallDevice(device=name):
                self._after(0.2, ("call", name), partial(self._start, name))
                self._after(self.schedule.timeout_s, ("call", name), partial(self._missed, name, epoch))
            case CommitCheckpoint(item=item):
                state = self._saving.pop(item.index)
                self._check(state, item.step)
                self._checkpoints[item.step] = state
                self._saved_step = item.step
            case RetireSnapshots(step=step):
                self._acknowledged, self._lost_since = step, set()
                for name in self._connected:
                    self._to(name, lambda device: device.memory.retire(step))
            case Disconnect(device=name):
                self._lost_since.add(name)
                self._hang_up(name)
            case ReleaseDevice(device=name):
                self._left.add(name)
                self._lost_since.add(name)
                self._hang_up(name)
                self._devices.pop(name, None)
            case FinishRun():
                self.finish = instruction
            case AssignStage():
                pass
            case _:
                pass

    def _begin(self, begin: BeginEpoch) -> None:
        self.recoveries += begin.epoch > 0
        lineage = Lineage(self._lineage)
        lineage.begin(begin.epoch, begin.step)
        self._lineage, self._began = lineage.began, begin
        assert self._coordinator is not None
        self._layout = self._coordinator.layout
        self._store = dict(self._checkpoints[begin.step]) if begin.from_checkpoint else {}
        if len(self._lost_since) <= 1:
            assert begin.step >= self._acknowledged, (
                f"step {self._acknowledged} was in a complete snapshot and is lost with {self._lost_since}"
            )
        self._saving.clear()

    def _place(self, name: str, own: frozenset[str], machine: Coordinator) -> None:
        assert self._began is not None
        index, epoch = machine.devices.index(name), machine.epoch
        stage = Stage(
            epoch,
            self._began.step,
            view_of(index, len(machine.devices)),
            machine.devices,
            machine.layout.parts[name],
            machine.layout.snapshot_copies.get(name),
        )
        placed = {part: self._store[part] for part in stage.parts - own}

        def begin(device: Device) -> None:
            device.begin(stage, own, placed)
            self._from_device(name, lambda: DeviceReady(device=name, epoch=epoch))

        self._to(name, begin)

    def _held(self, device: Device, epoch: int) -> None:
        holdings = device.hold()
        self._from_device(device.name, lambda: Inventory(device=device.name, holdings=holdings, epoch=epoch))

    def _give(self, device: Device, step: int, parts: frozenset[str], epoch: int) -> None:
        values = device.memory.values(step, parts)
        assert values.keys() == parts

        def given() -> CoordinatorEvent:
            if self._coordinator is not None and self._coordinator.epoch == epoch:
                self._store |= values
            return StateFetched(device=device.name, epoch=epoch)

        self._from_device(device.name, given)

    def _copy(self, wanted: ReceiveState, of: str, epoch: int) -> None:
        """The joining device is notified of the lender, and gets its state as soon as it is after so many steps as it
        says."""
        donor, joiner = self._devices.get(of), self._devices.get(wanted.device)
        if donor is not None and joiner is not None:
            self._follow(Transfer(joiner, donor, epoch, wanted.number, wanted.donated[of]), wanted.step)

    def _follow(self, loan: Transfer, step: int) -> None:
        """One more look, now and then, at how far the lender is; what it has sent of that is for chance to say."""
        joiner, donor, epoch, number, parts = loan
        name, of = joiner.name, donor.name
        alive = self._devices.get(name) is joiner and self._devices.get(of) is donor
        if not alive or self._lending.get(of) != number or donor.epoch != epoch:
            return
        if frozenset((name, of)) in self._cut or self._draw.random() < 0.01:
            self._from_device(of, lambda: TransferEnded(device=of, number=number, epoch=epoch))
            return
        if donor.step >= step and name not in self._stalled and of not in self._stalled:
            step = donor.step if self._draw.random() < 0.7 else self._draw.randint(step, donor.step)
            joiner.memory.keep(epoch, step, donor.state_after(step, parts))
            self.state_received += 1
            told = StateReceived(device=name, of=of, step=step, number=number, epoch=epoch)
            self._from_device(name, lambda: told)
        self._after(self._draw.uniform(0.05, 0.5), ("follow", name, of), partial(self._follow, loan, step))

    def _planned(self, wanted: MakePlan, epoch: int) -> None:
        if not wanted.devices or self._draw.random() < 0.02:
            self._tell(NoPlan(reason="none fits", epoch=epoch))
            return
        most = min(len(wanted.devices), self.schedule.layers)
        count = most if self._draw.random() < 0.7 else self._draw.randint(1, most)
        chosen = tuple(sorted(self._draw.sample(wanted.devices, count)))
        self._tell(PlanMade(layout=self._plan(chosen), worth_it=wanted.must or self._draw.random() < 0.7, epoch=epoch))

    def _plan(self, devices: tuple[str, ...]) -> StateLayout:
        """Layers shared out in order, at random places."""
        cuts = sorted(self._draw.sample(range(1, self.schedule.layers), len(devices) - 1))
        ends = [0, *cuts, self.schedule.layers]
        parts = {d: frozenset(self._layers[a:b]) for d, (a, b) in zip(devices, itertools.pairwise(ends), strict=True)}
        turned = dict(zip(devices, (*devices[1:], devices[0]), strict=True))
        if len(devices) == 1:  # nobody to keep a copy: a snapshot would be lost with it
            return StateLayout(parts=parts, repeats=self.schedule.repeats)
        return StateLayout(
            parts=parts, snapshot_copies=turned, keep_every=self.schedule.keep_every, repeats=self.schedule.repeats
        )

    def _report(self, name: str, stage: Stage, item: Item, state: dict[str, History]) -> None:
        def reported() -> CoordinatorEvent:
            return ItemReported(device=name, item=item.index, epoch=stage.epoch)

        if item.kind == "save" and self._coordinator is not None and stage.epoch == self._coordinator.epoch:
            self._saving.setdefault(item.index, {}).update(state)
        self._from_device(name, reported)

    def _on_snapshot_copied(self, name: str, stage: Stage, of: str, step: int) -> None:
        self._from_device(name, lambda: SnapshotCopied(device=name, of=of, step=step, epoch=stage.epoch))

    # Devices come and go

    def _start(self, name: str) -> None:
        if name not in self._devices and name not in self._left:
            self._machines[name] += 1
            self._devices[name] = Device(name, self._surroundings(name))
        self._dial(name)

    def _dial(self, name: str) -> None:
        """Join, or try again: the coordinator may be away, or not have noticed yet that the old connection is dead."""
        device = self._devices.get(name)
        if device is None or self.finish is not None or name in self._connected:
            return
        if name in self._stalled or self._coordinator is None:
            self._after(REDIAL_S, ("dial", name), partial(self._dial, name))
            return
        self._connected[name] = next(self._sessions)
        holdings = device.memory.holdings()
        epoch = self._coordinator.epoch
        self._tell(DeviceJoined(device=name, holdings=holdings, epoch=epoch))

    def _hang_up(self, name: str) -> None:
        if self._connected.pop(name, None) is not None and name in self._devices:
            self._after(REDIAL_S, ("dial", name), partial(self._dial, name))

    def _lose(self, name: str, session: int | None, reason: str) -> None:
        """The coordinator notices, unless that connection is history."""
        if session is not None and self._connected.get(name) == session and self._coordinator is not None:
            returns = self.schedule.recalls and name not in self._left
            self._tell(DeviceLost(device=name, reason=reason, returns=returns, epoch=self._coordinator.epoch))

    def _blame(self, ends: tuple[str, str], epoch: int) -> None:
        """One end of a link that is down has noticed, and says so as soon as somebody listens."""
        machine, name = self._coordinator, self._draw.choice(ends)
        if machine is None or (machine.epoch == epoch and name not in self._connected):
            self._after(REDIAL_S, "timeout", partial(self._blame, ends, epoch))
        elif machine.epoch == epoch:
            self._tell(DeviceLost(device=name, reason="a link is down", epoch=epoch))

    def _missed(self, name: str, epoch: int) -> None:
        machine = self._coordinator
        if machine is not None and machine.epoch == epoch and name in machine.devices and name not in self._connected:
            self._tell(DeviceLost(device=name, reason="it did not join", epoch=epoch))

    # Faults

    def _strike(self, fault: Fault) -> None:
        if self.finish is not None:
            return
        names = list(self._machines)
        name, other = names[fault.device % len(names)], names[fault.other % len(names)]
        match fault.kind:
            case "kill":
                self._kill(name, fault.lasts_s)
            case "stall":
                self._stall(name, fault.lasts_s)
            case "cut":
                pair = frozenset((name, other))
                self._cut.add(pair)
                self._after(fault.lasts_s, "cut", partial(self._cut.discard, pair))
            case "crash":
                self._crash(fault.lasts_s)
            case "join":
                joiner = f"d{len(names)}"
                self._machines[joiner] = 0
                self._start(joiner)
            case "leave":
                if self._coordinator is not None and name in self._connected:
                    self._tell(DeviceLeaving(device=name, epoch=self._coordinator.epoch))
            case "change":
                if self._coordinator is not None:
                    self._tell(FleetChanged(epoch=self._coordinator.epoch))

    def _kill(self, name: str, lasts_s: float) -> None:
        if self._devices.pop(name, None) is None:
            return
        self._stalled.pop(name, None)
        session = self._connected.get(name)
        self._after(0.1, ("notice", name), partial(self._lose, name, session, "it was killed"))
        self._after(lasts_s + REDIAL_S, ("start", name), partial(self._start, name))

    def _stall(self, name: str, lasts_s: float) -> None:
        if name not in self._devices or name in self._stalled:
            return
        waiting: list[Callable[[], None]] = []
        self._stalled[name] = waiting
        session = self._connected.get(name)

        def evict() -> None:
            if self._stalled.get(name) is waiting:
                self._lose(name, session, "silent")

        def go_on() -> None:
            if self._stalled.get(name) is waiting:
                del self._stalled[name]
                for act in waiting:
                    act()

        self._after(self.schedule.timeout_s, ("notice", name), evict)
        self._after(lasts_s, ("wake", name), go_on)

    def _crash(self, lasts_s: float) -> None:
        if self._coordinator is None:
            return
        self._coordinator = None
        self._connected.clear()
        self._after(lasts_s, "restart", self._restart)
        for name in self._devices:
            self._after(REDIAL_S, ("dial", name), partial(self._dial, name))

    def _restart(self) -> None:
        """From what is on record alone."""
        spec = self.schedule.spec
        if self._saved_step == spec.steps:
            self.finish = FinishRun("done")
            return
        newest = max((epoch for epoch, _ in self._lineage), default=-1)
        from_saved = {f: getattr(spec, f) for f in spec.__struct_fields__} | {"start_step": self._saved_step}
        machine = Coordinator(
            self._layout.parts,
            type(spec)(**from_saved),
            newest + 1,
            layout=self._layout,
            lineage=Lineage(self._lineage),
        )
        self._coordinator = machine
        for name in self._machines:
            if name not in self._devices and name not in self._left:
                self._tell(DeviceOffered(device=name, epoch=machine.epoch))
        for name in machine.devices:
            self._after(3 * self.schedule.timeout_s, ("call", name), partial(self._missed, name, machine.epoch))

    # The history

    def _check(self, state: dict[str, History], step: int) -> None:
        """One line, each range once and in order."""
        assert state.keys() == set(self._layers)
        (history,) = set(state.values())
        size = self.schedule.spec.micro_batches * self.schedule.spec.micro_batch_size
        assert [first for first, _ in history] == [n * size for n in range(step)], history
        epochs = [epoch for _, epoch in history]
        assert epochs == sorted(epochs), history
        for at, epoch in enumerate(epochs):
            assert Lineage(self._lineage).counts(epoch, at + 1), f"step {at} of epoch {epoch} is of a line that ended"
