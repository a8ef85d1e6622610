"""Decoupled replicas on a virtual clock: the policies of a real run, with modelled steps and messages, and faults.

A replica of one device is that device's process. A pipeline is one process, which goes on when it loses a device
(`ReplicaDevices`), as long as the others can hold the model.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

from isthmus.fleet import Link
from isthmus.programs.merger import Merger
from isthmus.programs.merging import Finish
from isthmus.protocol.decoupled_events import (
    NEVER,
    NOTHING_MERGED,
    CollectChanges,
    Contributed,
    Delivery,
    FragmentSent,
    MergeChanges,
    MergeRules,
    MergesDone,
    ReplicaOrder,
    ReplicaReport,
    StepsMade,
    VersionTaken,
)
from isthmus.protocol.decoupled_replica import RETURN_S, DecoupledReplica
from isthmus.protocol.run_messages import Halt
from isthmus.session.session import CLOSED
from isthmus.simulator.options import Fault, RecoveryTimes, SimulationOptions, WithoutEffect
from isthmus.simulator.parties import Connections, Parties, Party, SimulatedHost, Strikes
from isthmus.trace import Span


class PlannedStep(NamedTuple):
    """A replica's step on some of its devices."""

    step_s: float
    busy_s: Mapping[str, float]  # seconds that each device of the plan computes
    begin_s: float = 0.0
    """From a loss, or from the end of the last step before, until this plan is at work: to plan, and to move state."""
    keep_every: int = 0  # steps between snapshots; 0: none are kept, and what is lost with a device is lost
    links: frozenset[frozenset[str]] = frozenset()  # pairs of devices that send each other messages in a step


Planned = Callable[[frozenset[str]], PlannedStep | None]
"""On the devices that are there; None where they cannot hold the model."""


class ReplicaDevices:
    """The devices of one replica. It knows no clock."""

    def __init__(self, devices: frozenset[str], planned: Planned) -> None:
        self.present = set(devices)
        self._planned = planned
        self.plan: PlannedStep | None = None
        self._kept = 0  # steps behind the newest snapshot
        self.again = 0  # steps that are to be made again

    def begin(self, steps: int = 0) -> bool:
        """Return whether the devices that are there can begin anew, after so many steps."""
        self.plan, self._kept, self.again = self._planned(frozenset(self.present)), steps, 0
        return self.plan is not None

    def lost(self, device: str, steps: int, *, leaves: bool = False) -> bool:
        """After so many steps. Whether the step under way is void; `plan` is None where the rest cannot go on.
        `leaves`: the device gives what it has to others first."""
        self.present.discard(device)
        if self.plan is None or device not in self.plan.busy_s:
            return False
        self.again = self.again if leaves else steps - self._kept
        goes_on = leaves or self.plan.keep_every > 0
        self.plan = self._planned(frozenset(self.present)) if goes_on else None
        return True

    def stepped(self, steps: int) -> bool:
        """A step is over, of which there are now `steps` if it was a new one: whether it was."""
        assert self.plan is not None, "made on a plan"
        if self.again:
            self.again -= 1
            return False
        if not self.plan.keep_every or steps % self.plan.keep_every == 0:
            self._kept = steps
        return True

    def better(self) -> float:
        """Between two steps, take a better plan for the devices that are there: how long that takes."""
        found = self._planned(frozenset(self.present))
        if self.plan is None or found is None or found.step_s >= self.plan.step_s:
            return 0.0
        self.plan = found
        return found.begin_s


SMALL_BYTES = 128  # bytes of a message without tensors


class Computing(Protocol):
    """The computation of replicas and of the merger, where more than times is asked for. A replica that starts anew is
    another one: `start` says so."""

    def start(self, replica: str) -> None: ...
    def step(self, replica: str, samples: int) -> float: ...
    def take(self, replica: str, sent: FragmentSent) -> None: ...
    def give(self, replica: str, fragment: int, number: int) -> None: ...
    def merge(self, merge: MergeChanges) -> None: ...


class _TimesAlone:
    """Nothing is computed."""

    def start(self, replica: str) -> None: ...
    def step(self, replica: str, samples: int) -> None: ...
    def take(self, replica: str, sent: FragmentSent) -> None: ...
    def give(self, replica: str, fragment: int, number: int) -> None: ...
    def merge(self, merge: MergeChanges) -> None: ...


@dataclass(frozen=True, kw_only=True)
class ReplicaModel:
    name: str
    step_s: float
    samples: int  # samples of a step
    up: Link | None = None  # to the merger; None: no time
    down: Link | None = None
    devices: tuple[str, ...] = ()  # devices of a replica that is a pipeline; none: it is the device of its name
    planned: Planned | None = None  # its step; None: `step_s`, on the device of its name

    @property
    def alone(self) -> bool:
        return self.planned is None

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
    merges: list[tuple[float, MergeChanges]] = field(default_factory=list[tuple[float, MergeChanges]])
    steps: list[tuple[float, str, StepsMade]] = field(default_factory=list[tuple[float, str, StepsMade]])
    """When the merger heard of each."""
    notes: list[tuple[float, str]] = field(default_factory=list[tuple[float, str]])
    spans: list[Span] = field(default_factory=list[Span])
    finish: Finish = field(default_factory=lambda: Finish("lost", "nobody has anything to do"))
    seconds: float = 0.0
    without_effect: WithoutEffect = ()
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
        """Return whose steps are in the result: the mean over fragments."""
        merged = [fragment for _, merge in self.merges for fragment in merge.fragments]
        fragments = len({fragment.fragment for fragment in merged}) or 1
        return sum(c.samples for fragment in merged for c in fragment.contributions) / fragments


class _Saved(NamedTuple):
    """A checkpoint of the merger."""

    merges: MergesDone
    merged: int  # merges of the result that are in it
    busy_s: Mapping[str, float]


class _Replica:
    """A replica's process. It is the port of the policy."""

    def __init__(self, model: ReplicaModel, device: Party[_Replica], world: MergingSimulation, steps: int) -> None:
        """`steps`: as the merger says, those of an earlier process."""
        self.model, self.name, self.device, self._world = model, model.name, device, world
        self.pipeline = world.pipelines[model.name]
        self.policy = DecoupledReplica(world.rules.fragments, world.batch, steps)
        self.policy.port = self
        self.received: deque[ReplicaOrder | None] = deque()  # since the last step ended
        self._samples = [0] * world.rules.fragments  # trained on since the last contribution that was merged
        self._given: dict[int, tuple[int, int]] = {}
        """Merge and samples of each fragment's contribution whose fate is not known."""
        self._taken: list[VersionTaken] = []
        self.has_connected = False
        self.steps = steps  # the policy counts a step later, after the events during it
        self.step_ends_s = math.nan
        self._busy_s: dict[str, float] = {}  # seconds that each device computes in the step under way
        self._attempt = 0  # number of attempts at steps: one that was begun before a device was lost is void
        self._known = 0  # samples of all replicas, at the step under way

    def receive(self, order: ReplicaOrder | None) -> None:
        self.received.append(order)
        if self.policy.phase != "training":
            self._handle_received()

    def _handle_received(self) -> None:
        while self.received:
            self.policy.ordered(self.received.popleft())

    def begin_step(self, after_s: float) -> None:
        plan, slow = self.pipeline.plan, self._world.slowed
        assert plan is not None, "only a replica with a plan trains"
        self._attempt += 1
        slowest = max(map(slow, plan.busy_s), default=1.0)
        self._busy_s = {device: busy_s * slow(device) for device, busy_s in plan.busy_s.items()}
        self.step_ends_s = self._world.clock.now_s + after_s + plan.step_s * slowest
        self._end_step(self._attempt)

    def _end_step(self, attempt: int) -> None:
        end = partial(self._world.on, self.device, partial(self._stepped, attempt))
        if math.isfinite(self.step_ends_s):
            self._world.clock.at(self.step_ends_s, self.name, end)

    def _stepped(self, attempt: int) -> None:
        world = self._world
        if self._attempt != attempt or world.over or world.worker(self.name) is not self:
            return
        if world.clock.now_s < self.step_ends_s:  # it was stopped meanwhile
            self._end_step(attempt)
            return
        if not self.pipeline.stepped(self.steps + 1):
            self.begin_step(0.0)
            return
        world.computed(self._busy_s)
        loss = world.computing.step(self.name, self._known)
        self.steps += 1
        self._samples = [before + self.model.samples for before in self._samples]
        self._handle_received()
        self.policy.step_ended(self.model.samples, loss)

    # What the policy asks

    def train(self, samples: int) -> None:
        self._known = samples
        self.begin_step(self.pipeline.better())

    def take(self, sent: FragmentSent) -> None:
        number, samples = self._given.get(sent.fragment, (0, 0))
        self._samples[sent.fragment] -= samples if number == sent.included else 0
        if sent.first or number == sent.included:
            self._given.pop(sent.fragment, None)
        self._taken.append(VersionTaken(fragment=sent.fragment, merge=sent.merge, steps=self.steps))
        self._world.computing.take(self.name, sent)

    def contribute(self, collect: CollectChanges) -> None:
        fragments = tuple(f for f in collect.fragments if collect.last or f not in self._given)
        for fragment in fragments:
            self._given[fragment] = collect.merge, self._samples[fragment]
            self._world.computing.give(self.name, fragment, collect.merge)
        if fragments:
            samples = tuple(self._samples[fragment] for fragment in fragments)
            self.say(
                Contributed(
                    merge=collect.merge,
                    fragments=fragments,
                    steps=self.steps,
                    samples=samples,
                    last=collect.last,
                    taken=tuple(self._taken),
                )
            )

    def say(self, body: ReplicaReport) -> None:
        self._world.report(self, body)

    def stop(self) -> None:
        self._world.left(self)


class MergingSimulation(Parties[_Replica]):
    """`run` returns what came of it. It is the port of `Merger`."""

    def __init__(
        self,
        rules: MergeRules,
        replicas: Sequence[ReplicaModel],
        sizes: FragmentBytes,
        faults: Sequence[Fault] = (),
        computing: Computing | None = None,
        seed: int = 0,
        merger: str = "",
        save_samples: int = 0,
    ) -> None:
        """`merger`: the device where the merger is. `save_samples`: samples of all replicas between two checkpoints; 0:
        none, so a run whose coordinator was away begins anew. What `computing` computes is in no checkpoint."""
        recovery = RecoveryTimes(timeout_s=rules.timeout_s)
        super().__init__(SimulationOptions(faults=tuple(faults), seed=seed, recovery=recovery))
        self.rules, self.computing, self._sizes = rules, computing or _TimesAlone(), sizes
        self.batch = sum(model.samples for model in replicas)  # samples of a step of each replica
        self._models = {model.name: model for model in replicas}
        self.pipelines = {model.name: model.pipeline() for model in replicas}
        self._of = {device: name for name, pipeline in self.pipelines.items() for device in pipeline.present}
        self._deliveries = {name: Delivery(rules.fragments) for name in self._models}
        self._sending: dict[str, object] = {}  # connections that a message is leaving on, by replica
        self._first_devices = {(model.devices or (model.name,))[0]: model.name for model in replicas}
        """Those whose links reach the merger, each with its replica."""
        self._merger, self._save_samples = merger, save_samples
        self._saved = _Saved(NOTHING_MERGED, 0, {})
        self._since_s: dict[str, float] = {}  # since when each device is there
        self._silent_s: dict[str, float] = {}
        self._result = SimulatedReplicas()
        self.connections = Connections(self, self._options, self)
        self.strikes = Strikes(self, self.connections, self._options, self._restart)
        self.host = SimulatedHost(self._made_merger(), self.clock, self.strikes, regular=bool(faults))

    def _made_merger(self) -> Merger:
        """Where the newest checkpoint is."""
        merger = Merger(self.rules, self._models, calls=True, begun=self._saved.merges)
        merger.port, merger.trace.add = self, self._result.spans.append
        return merger

    @property
    def over(self) -> bool:
        return self.connections.over

    def run(self) -> SimulatedReplicas:
        for fault in self._options.faults:
            if fault.kind == "join" and fault.device in self._of:
                self.pipelines[self._of[fault.device]].present.discard(fault.device)
        for name, pipeline in self.pipelines.items():
            self._since_s |= dict.fromkeys(pipeline.present, 0.0)
            self.clock.at(0.0, name, partial(self._start, name))
        for fault in self._options.faults:
            self.clock.at(fault.time_s, fault.device, partial(self._strike, fault))
        self.clock.run()
        for device in list(self._since_s):
            self._gone(device, self._result.seconds)
        self._result.late += self.host.session.late
        self._result.without_effect = self.effects.without
        return self._result

    def is_at_work(self, name: str) -> bool:
        pipeline = self.pipelines.get(self._of.get(name, ""))
        return pipeline is not None and name in pipeline.present and (not pipeline.plan or name in pipeline.plan.busy_s)

    # Processes

    def _start(self, name: str) -> None:
        away = self.over or not self.connections.answered
        if not away and self.worker(name) is None and self.pipelines[name].begin():
            self.connections.join(name)

    def made(self, worker_id: str, device: Party[_Replica]) -> _Replica:
        pipeline = self.pipelines[worker_id]
        if self._models[worker_id].alone:
            pipeline.present.add(worker_id)
            self._since_s.setdefault(worker_id, self.clock.now_s)
        steps = self.host.session.steps(worker_id)
        pipeline.begin(steps)
        self.computing.start(worker_id)
        return _Replica(self._models[worker_id], device, self, steps)

    def arrived(self, worker: _Replica) -> None:
        if worker.has_connected:
            worker.receive(None)
        worker.has_connected = True
        self._deliveries[worker.name].restart()
        self.host.tell(lambda merger: merger.joined(worker.name))

    def disconnected(self, device: str, reason: str) -> None:
        self.host.disconnected(device, reason)

    def kill(self, name: str) -> Party[_Replica] | None:
        device = super().kill(name)
        if device is not None and self._models[name].alone:
            self.pipelines[name].present.discard(name)
            self._gone(name, self.clock.now_s)
        return device

    def left(self, replica: _Replica) -> None:
        """The merger has let the process end."""
        if not self.over and (device := self.kill(replica.name)) is not None:
            self.connections.closed(device, CLOSED)

    def silence(self, device: Party[_Replica]) -> None:
        self._silent_s[device.name] = self.clock.now_s
        super().silence(device)

    def wake(self, device: Party[_Replica]) -> None:
        silent_s = self.clock.now_s - self._silent_s[device.name]
        for replica in device.workers.values():
            replica.step_ends_s += silent_s
        super().wake(device)
        self._start(device.name)  # where its coordinator was replaced meanwhile
        self._send(device.name)

    def computed(self, busy_s: Mapping[str, float]) -> None:
        """Devices have computed for a step that counts."""
        for device, seconds in busy_s.items():
            self._result.busy_s[device] = self._result.busy_s.get(device, 0.0) + seconds

    def _gone(self, device: str, until_s: float) -> None:
        seconds = until_s - self._since_s.pop(device, until_s)
        self._result.present_s[device] = self._result.present_s.get(device, 0.0) + seconds

    # Faults

    def _strike(self, fault: Fault) -> None:
        if self.over:
            return
        self.strikes.struck(fault)
        if fault.kind == "coordinator":
            self._crash(fault)
        elif fault.kind == "link":
            self._cut(fault.device, fault.other, fault.lasts_s)
        elif fault.device in self._of:
            self._strike_device(fault)

    def _strike_device(self, fault: Fault) -> None:
        device, name = fault.device, self._of[fault.device]
        alone, has_process = self._models[name].alone, name in self.devices
        waits = device in self.pipelines[name].present and not has_process  # its coordinator is away
        if fault.kind == "slow" or (alone and not (waits and fault.kind != "join")):
            self.strikes.strike(fault)
        elif fault.kind == "silent" and has_process:
            self._silence_stage(device, fault.lasts_s)
        elif fault.kind == "join":
            self._return(device)
        else:
            self._lose_stage(device, fault.lasts_s, leaves=fault.kind == "leave")

    def _crash(self, fault: Fault) -> None:
        """The coordinator is away. What is not in the newest checkpoint is lost, and processes of replicas end."""
        if not self.connections.answered:
            return
        self.strikes.strike(fault)
        saved, result = self._saved, self._result
        result.late += self.host.session.late
        del result.merges[saved.merged :]
        result.busy_s = dict(saved.busy_s)
        self.devices = {name: party for name, party in self.devices.items() if party.waiting is not None}
        for party in self.devices.values():  # it ends when it goes on
            party.workers.clear()

    def _restart(self) -> None:
        """The coordinator goes on from the newest checkpoint: every device that is there starts a process."""
        if self.over:
            return
        begun = self._saved.merges
        self.note(f"the coordinator was started again: it goes on after merge {begun.merge}")
        self._deliveries = {name: Delivery(self.rules.fragments, begun) for name in self._models}
        self.connections.answered = True
        self.host.replace(self._made_merger())
        self.host.tell(lambda _: None, looks=True)
        for name in self._models:
            self.later(self._options.recovery.process_s, name, partial(self._start, name))

    def _cut(self, one: str, other: str, lasts_s: float) -> None:
        """Nothing passes between two devices: of a pipeline, or a replica's first one and the merger's."""
        self.cut(one, other, lasts_s)
        if (replica := self._exchange(one, other)) is not None:
            self.effects.met("link", one, other)
            replica.step_ends_s += min(lasts_s, self.rules.timeout_s)

    def _exchange(self, one: str, other: str) -> _Replica | None:
        """The pipeline whose stages on these devices exchange messages."""
        replica = self.worker(self._of.get(one, ""))
        plan = None if replica is None else replica.pipeline.plan
        return replica if plan is not None and frozenset((one, other)) in plan.links else None

    def blame(self, name: str, other: str) -> None:
        now_s, until_s = self.clock.now_s, self._cut_until_s(name, other)
        if until_s <= now_s:
            return
        if name == self._merger and (party := self.devices.get(self._first_devices.get(other, ""))) is not None:
            self.effects.met("link", name, other)
            self.connections.closed(party, f"silent for {self.rules.timeout_s:g} s")
        if name < other and self._exchange(name, other) is not None:  # as the failure detector chooses
            self.effects.met("link", name, other)
            self._lose_stage(name, until_s - now_s)

    def reaches(self, worker_id: str) -> bool:
        return self._unreachable_s(worker_id) == 0.0

    def dials(self, worker_id: str) -> bool:
        """A process does while it lives, also one that was never connected."""
        return worker_id in self.devices

    def _unreachable_s(self, replica: str) -> float:
        """Seconds until a message of a replica, or to it, can pass."""
        first = (self._models[replica].devices or (replica,))[0]
        return max(0.0, self.cut_until_s(first, self._merger) - self.clock.now_s)

    def _lose_stage(self, device: str, lasts_s: float, *, leaves: bool = False) -> None:
        """A device of a pipeline is lost, or leaves."""
        name, now_s = self._of[device], self.clock.now_s
        pipeline, replica = self.pipelines[name], self.worker(name)
        if self.over or device not in pipeline.present:
            return
        self._gone(device, now_s)
        if math.isfinite(lasts_s):
            self.later(lasts_s, device, partial(self._return, device))
        steps = replica.steps if replica is not None else 0
        if not pipeline.lost(device, steps, leaves=leaves) or replica is None:
            return
        if pipeline.plan is None:
            party = self.kill(name)
            assert party is not None, "its worker is there"
            self.connections.closed(party, "its other devices cannot go on")
            self.later(RETURN_S, name, partial(self._start, name))
            return
        self.note(f"{name}: {device} {'has left' if leaves else 'is lost'}; {pipeline.again} steps are made again")
        if replica.policy.phase == "training":
            replica.begin_step(pipeline.plan.begin_s)

    def _return(self, device: str) -> None:
        name = self._of[device]
        if not self.over and device not in self.pipelines[name].present:
            self.pipelines[name].present.add(device)
            self.effects.met("join", device)
            self._since_s[device] = self.clock.now_s
            self._start(name)

    def _silence_stage(self, device: str, lasts_s: float) -> None:
        """A pipeline waits for its device until it gives it up."""
        timeout_s, pipeline = self.rules.timeout_s, self.pipelines[self._of[device]]
        replica = self.worker(self._of[device])
        if replica is not None and pipeline.plan is not None and device in pipeline.plan.busy_s:
            replica.step_ends_s += min(lasts_s, timeout_s)
        if lasts_s > timeout_s:
            self.later(timeout_s, device, partial(self._lose_stage, device, lasts_s - timeout_s))

    # What the merger asks

    def ask(self, replica: str, collect: CollectChanges) -> None:
        self._deliveries[replica].ask(collect)
        self._send(replica)

    def let_go(self, replica: str) -> None:
        self._deliveries[replica].ask(Halt())
        self._send(replica)

    def call(self, device: str) -> None:
        self.strikes.call(device)

    def reject(self, device: str, *, permanent: bool) -> None:
        if permanent:
            self.connections.release(device)
        else:
            self.connections.hang_up(device)

    def send_all(self, replica: str) -> None:
        self._send(replica)

    def note(self, text: str) -> None:
        self._result.notes.append((self.clock.now_s, text))

    def ended(self, reason: str) -> None:
        finish = self.host.session.finish
        assert finish is not None, "it has ended"
        self._result.finish, self._result.seconds = finish, self.clock.now_s
        self.connections.over = True

    def stepped(self, replica: str, made: StepsMade) -> None:
        self._result.steps.append((self.clock.now_s, replica, made))

    def admit(self, replica: str, body: Contributed) -> int:
        """Simulated replicas are believed."""
        return sum(self._sizes.delta[fragment] for fragment in body.fragments)

    def merge(self, merge: MergeChanges) -> Mapping[str, str]:
        self._result.merges.append((self.clock.now_s, merge))
        self.computing.merge(merge)
        for merged in merge.fragments:
            numbers = {contribution.replica: contribution.number for contribution in merged.contributions}
            for name, delivery in self._deliveries.items():
                delivery.publish(merged.fragment, merge.merge, merge.samples, numbers.get(name, NEVER))
        for name in self._deliveries:
            self._send(name)
        self._save(merge.samples)
        return {}

    def _save(self, samples: int) -> None:
        each, before = self._save_samples, self._saved.merges.samples
        if each and samples // each > before // each:
            done = self.host.session.merges_done
            self._saved = _Saved(done, len(self._result.merges), dict(self._result.busy_s))

    # Messages

    def _send(self, name: str) -> None:
        """The next message to a replica, if its link is free."""
        session = self.connections.open.get(name)
        if self.over or session is None or session.device.waiting is not None or self._sending.get(name) == session:
            return
        if (order := self._deliveries[name].next()) is None:
            return
        size_bytes, now_s = 0, self.clock.now_s
        if isinstance(order, FragmentSent):
            size_bytes = (self._sizes.whole if order.whole else self._sizes.change)[order.fragment]
        left_s, latency_s = self._times(name, self._models[name].down, SMALL_BYTES + size_bytes)
        if isinstance(order, FragmentSent):
            self.host.session.trace.sent(name, order, now_s, now_s + left_s, size_bytes)
        self._sending[name] = session

        def left() -> None:
            if self._sending.get(name) == session:
                del self._sending[name]
                self._send(name)

        self.clock.at(now_s + left_s, ("control", name), left)
        self.connections.down(name, lambda replica: replica.receive(order), left_s, latency_s)

    def report(self, replica: _Replica, body: ReplicaReport) -> None:
        size_bytes = SMALL_BYTES
        if isinstance(body, Contributed):
            size_bytes += sum(self._sizes.delta[fragment] for fragment in body.fragments)
        happened: Callable[[Merger], None] = lambda merger: merger.heard(replica.name, body)  # noqa: E731
        times = self._times(replica.name, replica.model.up, size_bytes)
        self.connections.up(replica, partial(self.host.tell, happened), *times)

    def _times(self, replica: str, link: Link | None, size_bytes: int) -> tuple[float, float]:
        """Return how long a message occupies its link, and how long it is then on its way."""
        if link is None:
            return 0.0, 0.0
        return size_bytes / link.bandwidth_bytes_per_s, link.latency_s + self._unreachable_s(replica)
