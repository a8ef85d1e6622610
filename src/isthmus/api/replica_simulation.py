"""Decoupled replicas on a virtual clock: the machines of a real run, with modelled steps and messages, and faults."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from isthmus.api.replica_devices import Planned, PlannedStep, ReplicaDevices
from isthmus.errors import UserError
from isthmus.fleet import Link
from isthmus.protocol.decoupled import Merger
from isthmus.protocol.decoupled_delivery import Delivery
from isthmus.protocol.decoupled_events import (
    NEVER,
    CollectChanges,
    Contributed,
    FinishMerges,
    FragmentSent,
    MergeChanges,
    MergeRules,
    ReplicaOrder,
    ReplicaReport,
    StepsMade,
    VersionTaken,
)
from isthmus.protocol.decoupled_replica import DecoupledReplica
from isthmus.session.session import Observation
from isthmus.simulator.clock import VirtualClock
from isthmus.simulator.options import Fault

SMALL_BYTES = 128
"""Bytes of a message without tensors."""


class Computing(Protocol):
    """The computation of replicas and of the merger, where more than times is asked for. A replica that starts anew is
    another one: `start` says so."""

    def start(self, replica: str) -> None: ...
    def step(self, replica: str, samples: int) -> float: ...
    def take(self, replica: str, sent: FragmentSent) -> None: ...
    def give(self, replica: str, fragment: int, number: int) -> None: ...
    def merge(self, merge: MergeChanges) -> None: ...


@dataclass(frozen=True, kw_only=True)
class ReplicaModel:
    """One replica's times."""

    name: str
    step_s: float
    samples: int
    """Samples of a step."""
    up: Link | None = None
    """To the merger; None: no time."""
    down: Link | None = None
    devices: tuple[str, ...] = ()
    """Devices of a replica that is a pipeline; none: it is the device of its name."""
    planned: Planned | None = None
    """Its step; None: `step_s`, on the device of its name."""

    def pipeline(self) -> ReplicaDevices:
        """Its devices, when all are there."""
        alone = PlannedStep(self.step_s, {self.name: self.step_s})
        planned = self.planned or (lambda present: alone if present else None)
        return ReplicaDevices(frozenset(self.devices or (self.name,)), planned)


@dataclass(frozen=True, kw_only=True)
class FragmentBytes:
    """Bytes of each fragment's messages."""

    delta: tuple[int, ...]
    change: tuple[int, ...]
    whole: tuple[int, ...]


@dataclass(kw_only=True)
class SimulatedReplicas:
    """A whole run."""

    merges: list[tuple[float, MergeChanges]] = field(default_factory=list[tuple[float, MergeChanges]])
    steps: list[tuple[float, str, StepsMade]] = field(default_factory=list[tuple[float, str, StepsMade]])
    """When the merger heard of each."""
    notes: list[tuple[float, str]] = field(default_factory=list[tuple[float, str]])
    finish: FinishMerges = field(default_factory=lambda: FinishMerges("lost", "nobody has anything to do"))
    seconds: float = 0.0
    late: int = 0
    busy_s: dict[str, float] = field(default_factory=dict[str, float])
    """Seconds that each device computed steps that were not made again."""
    present_s: dict[str, float] = field(default_factory=dict[str, float])
    """Seconds of each device until the end of the run."""

    @property
    def used(self) -> float:
        """Share of the time in which devices were there that they computed."""
        return sum(self.busy_s.values()) / (sum(self.present_s.values()) or 1.0)

    @property
    def useful_samples(self) -> float:
        """Whose steps are in the result: the mean over fragments."""
        merged = [fragment for _, merge in self.merges for fragment in merge.fragments]
        fragments = len({fragment.fragment for fragment in merged}) or 1
        return sum(c.samples for fragment in merged for c in fragment.contributions) / fragments


def check_replica_faults(faults: Sequence[Fault]) -> None:
    """UserError for one that is of no replica's device."""
    for fault in faults:
        if fault.kind not in ("lost", "leave", "silent", "slow", "join"):
            raise UserError(f"{fault.option}: got a fault of kind {fault.kind!r}, expected one of a replica's device")


class _Replica:
    """Its devices, and its process if there is one."""

    def __init__(self, model: ReplicaModel, fragments: int, batch: int) -> None:
        """`batch` is of a step of each replica."""
        self.model, self.batch = model, batch
        self.pipeline = model.pipeline()
        self.machine = DecoupledReplica(fragments, batch)
        self.delivery = Delivery(fragments)
        self.received: deque[ReplicaOrder | None] = deque()
        """Since the last step ended."""
        self.samples = [0] * fragments
        """Trained on since the last contribution that was merged; used where nothing is computed."""
        self.given: dict[int, tuple[int, int]] = {}
        """Merge and samples of each fragment's contribution whose fate is not known."""
        self.taken: list[VersionTaken] = []
        self.steps = 0
        """Steps of this process. The machine counts a step later, after the events during it."""
        self.there = self.connected = False
        self.life = 0
        """How many processes there were: what an earlier one had under way is void."""
        self.step_ends_s = math.nan
        self.silent_until_s = 0.0
        self.factors: dict[str, float] = {}
        """Factors of slowed devices: the computing of each takes so many times longer."""
        self.busy_s: dict[str, float] = {}
        """Seconds that each device computes in the step under way."""
        self.attempt = 0
        """Number of attempts at steps: one that was begun before a device was lost is void."""
        self.train = 0
        """Samples of all replicas, at the step under way."""
        self.up_free_s = 0.0
        self.receiving = False


class _ReplicaPort:
    def __init__(self, simulation: DecoupledSimulation, one: _Replica) -> None:
        self.take = partial(simulation.take, one)
        self.train = partial(simulation.train, one)
        self.contribute = partial(simulation.contribute, one)
        self.say = partial(simulation.report, one)

    def stop(self) -> None:
        """Nothing is under way that the end of the run does not end."""


class DecoupledSimulation:
    """`run` returns what came of it. UserError for a fault that it does not know."""

    def __init__(
        self,
        rules: MergeRules,
        replicas: Sequence[ReplicaModel],
        sizes: FragmentBytes,
        faults: Sequence[Fault] = (),
        computing: Computing | None = None,
        seed: int = 0,
    ) -> None:
        self._machine, self._sizes, self._computing = Merger(rules, {one.name for one in replicas}), sizes, computing
        self._machine.port = self
        self._machine.clock(0.0)
        self._clock = VirtualClock(seed)
        batch = sum(model.samples for model in replicas)
        self._replicas = {model.name: _Replica(model, rules.fragments, batch) for model in replicas}
        self._result = SimulatedReplicas()
        self._over = False
        self._due_s: float | None = None
        self._of = {device: one for one in self._replicas.values() for device in one.pipeline.present}
        self._since_s = dict.fromkeys(self._of, 0.0)
        """Since when each device is there."""
        check_replica_faults(faults)
        for fault in faults:
            if fault.kind == "join" and fault.device in self._of:
                self._of[fault.device].pipeline.present.discard(fault.device)
                self._since_s.pop(fault.device, None)
        for name in self._replicas:
            self._clock.at(0.0, name, partial(self._start, name))
        acts: Mapping[str, Callable[[Fault], None]] = {
            "lost": self._lose,
            "leave": self._lose,
            "silent": self._silence,
            "slow": self._slow,
            "join": lambda fault: self._return(fault.device),
        }
        for fault in faults:
            self._clock.at(fault.time_s, fault.device, partial(acts[fault.kind], fault))

    def run(self) -> SimulatedReplicas:
        self._clock.run()
        for device, since_s in self._since_s.items():
            self._there(device, self._result.seconds - since_s)
        self._result.late = self._machine.late
        return self._result

    # Faults

    def _start(self, name: str) -> None:
        one = self._replicas[name]
        if self._over or one.there or not one.pipeline.begin():
            return
        one.there, one.life = True, one.life + 1
        one.machine = DecoupledReplica(self._machine.rules.fragments, one.batch)
        one.machine.port = _ReplicaPort(self, one)
        one.received.clear()
        one.samples, one.given, one.taken, one.steps = [0] * len(one.samples), {}, [], 0
        if self._computing is not None:
            self._computing.start(name)
        self._connect(one)

    def _connect(self, one: _Replica) -> None:
        one.connected = True
        one.delivery.restart()
        self._decide(partial(self._machine.joined, one.model.name))

    def _lose(self, fault: Fault) -> None:
        self._lose_device(fault.device, fault.lasts_s)

    def _lose_device(self, device: str, lasts_s: float) -> None:
        one, now_s = self._of[device], self._clock.now_s
        if self._over or device not in one.pipeline.present:
            return
        self._there(device, now_s - self._since_s.pop(device))
        if math.isfinite(lasts_s):
            self._clock.at(now_s + lasts_s, device, partial(self._return, device))
        if not one.pipeline.lost(device, one.steps) or not one.there:
            return
        if one.pipeline.plan is None:
            one.there, one.life = False, one.life + 1
            self._cut(one, "its process ended" if one.model.planned is None else "too few devices are left")
            return
        note = f"{one.model.name}: {device} is lost; {one.pipeline.again} steps are made again"
        self._result.notes.append((now_s, note))
        if one.machine.phase == "training":
            self._begin_step(one, one.pipeline.plan.begin_s)

    def _return(self, device: str) -> None:
        one = self._of[device]
        if not self._over and device not in one.pipeline.present:
            one.pipeline.present.add(device)
            self._since_s[device] = self._clock.now_s
            self._start(one.model.name)

    def _there(self, device: str, seconds: float) -> None:
        self._result.present_s[device] = self._result.present_s.get(device, 0.0) + seconds

    def _cut(self, one: _Replica, reason: str) -> None:
        if one.connected:
            one.connected = one.receiving = False
            self._decide(partial(self._machine.disconnected, one.model.name, reason))

    def _silence(self, fault: Fault) -> None:
        """Its process is stopped, and goes on later where it was. A pipeline waits for its device."""
        one, now_s, timeout_s = self._of[fault.device], self._clock.now_s, self._machine.rules.timeout_s
        if one.model.planned is not None:
            if one.pipeline.plan is not None and fault.device in one.pipeline.plan.busy_s:
                one.step_ends_s += min(fault.lasts_s, timeout_s)
            if fault.lasts_s > timeout_s:
                lose = partial(self._lose_device, fault.device, fault.lasts_s - timeout_s)
                self._clock.at(now_s + timeout_s, fault.device, lose)
            return
        one.silent_until_s = now_s + fault.lasts_s
        one.step_ends_s += fault.lasts_s
        if fault.lasts_s > timeout_s:
            life = one.life

            def give_up() -> None:
                if one.life == life:
                    self._cut(one, f"silent for {timeout_s:g} s")

            self._clock.at(now_s + timeout_s, fault.device, give_up)
        if math.isfinite(fault.lasts_s):
            self._clock.at(one.silent_until_s, fault.device, partial(self._wake, one))

    def _wake(self, one: _Replica) -> None:
        if one.there and not one.connected and not self._over:
            self._receive(one, None)
            self._connect(one)
        self._send(one)

    def _slow(self, fault: Fault) -> None:
        self._of[fault.device].factors[fault.device] = fault.factor

    # The merger

    def _decide(self, happened: Callable[[], None] | None = None) -> None:
        """Tell the merger the time, and what happened."""
        if self._over:
            return
        self._machine.clock(self._clock.now_s)
        if happened is not None:
            happened()
            self._machine.looked(Observation())
        for one in self._replicas.values():
            self._send(one)
        due_s = self._machine.due_s
        if due_s is not None and due_s != self._due_s and not self._over:
            self._due_s = due_s
            self._clock.at(max(due_s, self._clock.now_s), "merger", partial(self._tick, due_s))

    def _tick(self, due_s: float) -> None:
        if self._due_s == due_s:
            self._due_s = None
            self._decide()

    # What the merger asks

    def ask(self, replica: str, collect: CollectChanges) -> None:
        self._replicas[replica].delivery.ask(collect)

    def let_go(self, replica: str) -> None:
        """No simulated device leaves without loss."""

    def call(self, device: str) -> None:
        """Replicas come by themselves."""

    def reject(self, device: str, *, permanent: bool) -> None:
        """Its connection is gone already."""

    def send_all(self, replica: str) -> None:
        """Every decision is followed by what links can send."""

    def note(self, text: str) -> None:
        self._result.notes.append((self._clock.now_s, text))

    def ended(self, reason: str) -> None:
        assert self._machine.finish is not None, "it has ended"
        self._result.finish, self._result.seconds = self._machine.finish, self._clock.now_s
        self._over = True

    def stepped(self, replica: str, made: StepsMade) -> None:
        self._result.steps.append((self._clock.now_s, replica, made))

    def admit(self, replica: str, body: Contributed) -> None:
        """Simulated replicas are believed."""

    def merge(self, merge: MergeChanges) -> Mapping[str, str]:
        self._result.merges.append((self._clock.now_s, merge))
        if self._computing is not None:
            self._computing.merge(merge)
        for merged in merge.fragments:
            numbers = {contribution.replica: contribution.number for contribution in merged.contributions}
            for name, one in self._replicas.items():
                one.delivery.publish(merged.fragment, merge.merge, merge.samples, numbers.get(name, NEVER))
        return {}

    def _send(self, one: _Replica) -> None:
        """The next message to a replica, if its link is free."""
        now_s = self._clock.now_s
        if self._over or not one.connected or one.receiving or now_s < one.silent_until_s:
            return
        if (order := one.delivery.next()) is None:
            return
        size_bytes = SMALL_BYTES
        if isinstance(order, FragmentSent):
            size_bytes += (self._sizes.whole if order.whole else self._sizes.change)[order.fragment]
        left_s, latency_s = _times(one.model.down, size_bytes)
        one.receiving, life = True, one.life

        def left() -> None:
            if one.life == life:
                one.receiving = False
                self._send(one)

        def arrived() -> None:
            if one.life == life and one.connected:
                self._receive(one, order)

        lane = f"to {one.model.name}"
        self._clock.at(now_s + left_s, lane, left)
        self._clock.at(now_s + left_s + latency_s, lane, arrived)

    # A replica

    def _receive(self, one: _Replica, order: ReplicaOrder | None) -> None:
        one.received.append(order)
        if one.machine.phase != "training":
            self._handle_received(one)

    def _handle_received(self, one: _Replica) -> None:
        while one.received:
            one.machine.ordered(one.received.popleft())

    def _begin_step(self, one: _Replica, after_s: float) -> None:
        plan = one.pipeline.plan
        assert plan is not None, "only a replica with a plan trains"
        one.attempt += 1
        slowest = max((one.factors.get(device, 1.0) for device in plan.busy_s), default=1.0)
        one.busy_s = {device: busy_s * one.factors.get(device, 1.0) for device, busy_s in plan.busy_s.items()}
        one.step_ends_s = self._clock.now_s + after_s + plan.step_s * slowest
        self._clock.at(one.step_ends_s, one.model.name, partial(self._stepped, one, one.life, one.attempt))

    def _stepped(self, one: _Replica, life: int, attempt: int) -> None:
        if one.life != life or one.attempt != attempt or self._over:
            return
        if self._clock.now_s < one.step_ends_s:  # it was stopped meanwhile
            if math.isfinite(one.step_ends_s):
                self._clock.at(one.step_ends_s, one.model.name, partial(self._stepped, one, life, attempt))
            return
        if not one.pipeline.stepped(one.steps + 1):
            self._begin_step(one, 0.0)
            return
        for device, busy_s in one.busy_s.items():
            self._result.busy_s[device] = self._result.busy_s.get(device, 0.0) + busy_s
        loss = None if self._computing is None else self._computing.step(one.model.name, one.train)
        one.steps += 1
        one.samples = [before + one.model.samples for before in one.samples]
        self._handle_received(one)
        one.machine.step_ended(one.model.samples, loss)

    # What replicas ask

    def train(self, one: _Replica, samples: int) -> None:
        one.train = samples
        self._begin_step(one, one.pipeline.better())

    def take(self, one: _Replica, sent: FragmentSent) -> None:
        number, samples = one.given.get(sent.fragment, (0, 0))
        one.samples[sent.fragment] -= samples if number == sent.included else 0
        if sent.first or number == sent.included:
            one.given.pop(sent.fragment, None)
        one.taken.append(VersionTaken(fragment=sent.fragment, merge=sent.merge, steps=one.steps))
        if self._computing is not None:
            self._computing.take(one.model.name, sent)

    def contribute(self, one: _Replica, collect: CollectChanges) -> None:
        fragments = tuple(f for f in collect.fragments if collect.last or f not in one.given)
        for fragment in fragments:
            one.given[fragment] = collect.merge, one.samples[fragment]
            if self._computing is not None:
                self._computing.give(one.model.name, fragment, collect.merge)
        if fragments:
            samples = tuple(one.samples[fragment] for fragment in fragments)
            body = Contributed(
                merge=collect.merge,
                fragments=fragments,
                steps=one.steps,
                samples=samples,
                taken=tuple(one.taken),
            )
            self.report(one, body, SMALL_BYTES + sum(self._sizes.delta[fragment] for fragment in fragments))

    def report(self, one: _Replica, body: ReplicaReport, size_bytes: int = SMALL_BYTES) -> None:
        left_s, latency_s = _times(one.model.up, size_bytes)
        one.up_free_s = max(one.up_free_s, self._clock.now_s) + left_s
        life = one.life

        def arrived() -> None:
            if one.life == life and one.connected:
                self._decide(partial(self._machine.heard, one.model.name, body))

        self._clock.at(one.up_free_s + latency_s, f"from {one.model.name}", arrived)


def _times(link: Link | None, size_bytes: int) -> tuple[float, float]:
    """How long a message occupies its link, and how long it is then on its way."""
    return (0.0, 0.0) if link is None else (size_bytes / link.bandwidth_bytes_per_s, link.latency_s)
