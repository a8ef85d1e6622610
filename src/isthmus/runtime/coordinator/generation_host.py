"""The coordinator of a service that generates text: the port of `Tokens`, over connections."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from isthmus.errors import PeerError, UserError
from isthmus.fleet import Fleet
from isthmus.graph import Flow, StageGraph, assign, partition
from isthmus.graph.serving import POSITIONS
from isthmus.job.served import Served, token_input
from isthmus.planners.generation import Chain
from isthmus.programs.tokens import Tokens
from isthmus.protocol.failures import CLOSED, EXIT_S
from isthmus.protocol.generation import Prompt, StageUnable
from isthmus.protocol.run_machine import TICK_S
from isthmus.protocol.run_messages import Body, Halt
from isthmus.runtime.coordinator.backend import Session
from isthmus.runtime.coordinator.run_callbacks import Address
from isthmus.runtime.messages.all_messages import AnyMessage
from isthmus.runtime.messages.assignment import Neighbour
from isthmus.runtime.messages.generation import (
    COORDINATOR,
    ForgetPrompts,
    GenerateStep,
    NewPrompt,
    ServeStage,
    ServingReport,
)
from isthmus.runtime.messages.run import Heartbeat, JoinRun, ToDevice
from isthmus.runtime.transport.acceptor import Acceptor, ReceivedMessage
from isthmus.runtime.transport.channel import SocketChannel
from isthmus.runtime.transport.lanes import SendLane
from isthmus.runtime.transport.message_sender import headers_of, start_heartbeats
from isthmus.session.program import OutOfPhase

START_S = 60.0
"""How long a device may take to start a process, on a machine that is busy."""
GRACE_S = 0.5
"""So long a broken link waits for a better explanation: a device that is lost."""
HostAnswer = tuple[int, bool] | UserError | PeerError
"""A token and whether it is the last; or why there will be none."""
Answer = Callable[[HostAnswer], None]
"""Called in the host's thread."""


class ServingSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a model is served."""

    run: str
    """The secret name under which devices come."""
    timeout_s: float
    threads: int
    emulate: bool
    """Whether devices and links play those of the fleet."""


class ServingStatistics(msgspec.Struct, frozen=True, kw_only=True):
    chain: Chain
    losses: int
    """Devices that were lost."""


class _Device(NamedTuple):
    lane: SendLane
    address: Address
    has: set[str]
    """Names of the variables that it was sent, of its newest stage."""


class GenerationHost:
    """Runs the program in the thread that calls `serve`. Prompts may be submitted from any thread."""

    def __init__(
        self,
        served: Served,
        chain: Chain,
        fleet: Fleet,
        settings: ServingSettings,
        plan: Callable[[Sequence[str]], Chain],
        note: Callable[[str], None],
    ) -> None:
        """`plan` makes a chain of devices that are left; it raises UserError where there is none."""
        self._served, self._flow = served, Flow(served.graph)
        self._fleet = fleet
        self._settings = settings
        self._plan = plan
        self._note = note
        self._chain = chain
        self._program = Tokens(self, chain.devices, fleet.names, at_once=chain.at_once, vocabulary=served.vocabulary)
        self._inbox: queue.SimpleQueue[ReceivedMessage | Callable[[], None]] = queue.SimpleQueue()
        self._devices: dict[str, _Device] = {}
        self._called_s: dict[str, float] = {}
        self._broken: list[tuple[float, str, StageUnable]] = []
        """When a report of a broken link counts, who sent it, and the report."""
        self._closed: dict[str, float] = {}
        """Devices whose connection closed, and until when the exit of their process, which says more, may come."""
        self._answers: dict[int, Answer] = {}
        self._numbers = iter(range(1 << 62))
        self._numbering = threading.Lock()
        self.over = threading.Event()
        """Set when nothing is answered any more."""
        self._ended: str | None = None
        self.ready = threading.Event()
        """Set when the first stages are loaded."""
        self.acceptor = Acceptor(
            settings.run, fleet.names, on_message=self._inbox.put, guard=_guard, timeout_s=settings.timeout_s
        )

    # From any thread

    def submit(self, prompt: Prompt, answer: Answer) -> int:
        """Return its number."""
        with self._numbering:
            number = next(self._numbers)
        self._answers[number] = answer
        self._inbox.put(partial(self._program.submit, msgspec.structs.replace(prompt, number=number)))
        if self.over.is_set():
            self._refuse_all("the service has ended")
        return number

    def cancel(self, number: int) -> None:
        self._answers.pop(number, None)
        self._inbox.put(partial(self._program.cancel, number))

    def stop(self) -> None:
        self._inbox.put(self._program.stop)

    def statistics(self) -> ServingStatistics:
        return ServingStatistics(chain=self._chain, losses=self._program.losses)

    # In its own thread

    def serve(self, session: Session) -> None:
        """Until it is stopped. PeerError when the last device that can serve is lost."""
        self._session = session
        start_heartbeats(self._settings.run, self._settings.timeout_s, self.over, self._lanes)
        reason = "the service has failed"
        try:
            looked_s = 0.0
            while self._ended is None:
                self._take()
                if self._program.phase == "serving":
                    self.ready.set()
                if time.monotonic() - looked_s >= TICK_S:
                    looked_s = time.monotonic()
                    self._look()
            reason = self._ended
            for device in self._devices.values():
                device.lane.put(ToDevice(run=self._settings.run, body=Halt(epoch=self._program.epoch)))
                device.lane.close()
        finally:
            self.over.set()
            self.acceptor.close()
            self._refuse_all(reason or "the service was stopped")
        if reason:
            raise PeerError(reason)

    def _lanes(self) -> list[SendLane]:
        return [device.lane for device in list(self._devices.values())]

    def _take(self) -> None:
        try:
            received = self._inbox.get(timeout=TICK_S)
        except queue.Empty:
            return
        if isinstance(received, tuple):
            self._received(received)
        else:
            received()

    def _look(self) -> None:
        """Processes that have ended or do not come, and links that broke."""
        now_s, running = time.monotonic(), self._session.starting  # asked before how they ended, which may follow
        unexplained = [device for device, until_s in self._closed.items() if now_s >= until_s or not running(device)]
        for device, how in self._session.ended().items():
            if device in self._program.members or device in self._devices:
                self._drop(device, how)
        for device in unexplained:
            if device in self._closed:
                self._drop(device, CLOSED)
        for device in self._program.members:
            called_s = self._called_s.setdefault(device, time.monotonic())
            if device not in self._devices and time.monotonic() - called_s > START_S:
                self._drop(device, f"did not come for {START_S:g} s")
        if not self._closed:
            now_s = time.monotonic()
            due = [entry for entry in self._broken if entry[0] <= now_s]
            self._broken = [entry for entry in self._broken if entry[0] > now_s]
            for _, device, body in due:
                self._heard(device, body)

    def _received(self, received: ReceivedMessage) -> None:
        device, message, _ = received
        if isinstance(message, JoinRun):
            self._joined(device, message)
        elif device not in self._devices or isinstance(message, Heartbeat):
            return
        elif isinstance(message, ServingReport):
            if isinstance(message.body, StageUnable):
                self._broken.append((time.monotonic() + GRACE_S, device, message.body))
            else:
                self._heard(device, message.body)
        elif message is None:
            self._closed.setdefault(device, time.monotonic() + EXIT_S)
        else:
            self._drop(device, str(message).removeprefix(f"device {device!r}: "))

    def _heard(self, device: str, body: Body) -> None:
        try:
            self._program.heard(device, body)
        except OutOfPhase as e:
            self._drop(device, str(e))

    def _joined(self, device: str, message: JoinRun) -> None:
        channel = self.acceptor.channel(device)
        assert isinstance(channel, SocketChannel), "devices connect by sockets"
        party = channel.party.id if channel.party is not None else ""
        address = Address(message.host, message.port, party)
        self._devices[device] = _Device(SendLane(channel, timeout_s=self._settings.timeout_s), address, set())
        self._program.joined(device)

    def _drop(self, device: str, reason: str) -> None:
        """It may come no more."""
        self.acceptor.forget(device, permanent=True)
        self._closed.pop(device, None)
        if (found := self._devices.pop(device, None)) is not None:
            found.lane.close(0.0)
        self._program.gone(device, reason)

    # What the program asks

    def call(self, device: str) -> None:
        self._session.call(device)

    def note(self, text: str) -> None:
        self._note(text)

    def ended(self, reason: str) -> None:
        self._ended = reason

    def plan(self, devices: Sequence[str]) -> Sequence[str]:
        there = {*self._devices, *self._session.offers()}
        usable = [name for name in devices if name in there or self._session.starting(name)]
        if not usable:
            raise PeerError("no device is left")
        self._chain = self._plan(usable)
        self._note(f"stages on {' > '.join(self._chain.devices)}")
        return self._chain.devices

    def forget(self, number: int) -> None:
        message = ForgetPrompts(run=self._settings.run, epoch=self._program.epoch, prompts=(number,))
        for device in self._program.members:
            self._send(device, message)

    def deliver(self, number: int, token: int, *, last: bool) -> None:
        answer = self._answers.pop(number, None) if last else self._answers.get(number)
        if answer is not None:
            answer((token, last))

    def refuse(self, number: int, reason: str, *, of_request: bool = False) -> None:
        if (answer := self._answers.pop(number, None)) is not None:
            answer(UserError(reason) if of_request else PeerError(reason))

    def load(self, chain: Sequence[str], epoch: int) -> None:
        graphs = partition(self._flow, assign(self._flow, self._chain.boundaries))
        for number, (name, graph) in enumerate(zip(chain, graphs, strict=True)):
            if (device := self._devices.get(name)) is None:
                continue  # its loss is on the way
            wanted = {op.target for op in graph.variables() if op.target != POSITIONS}
            missing = {target: self._served.weights[target] for target in sorted(wanted - device.has)}
            device.has.clear()
            device.has.update(wanted)
            message = ServeStage(
                run=self._settings.run,
                tensors=headers_of(missing),
                epoch=epoch,
                stage=number,
                device=name,
                graph=graph,
                token_input=token_input(self._flow),
                vocabulary=self._served.vocabulary,
                context=self._served.context,
                neighbours=self._neighbours(number, graphs),
                flops_per_s=self._fleet.device(name).sustained_flops_per_s if self._settings.emulate else None,
                threads=self._settings.threads,
                timeout_s=self._settings.timeout_s,
            )
            device.lane.put(message, list(missing.values()))

    def _neighbours(self, number: int, graphs: Sequence[StageGraph]) -> tuple[Neighbour, ...]:
        others: set[int] = {c.source for c in graphs[number].receives} | {c.target for c in graphs[number].sends}
        ends = {0, len(graphs) - 1}
        others |= ends - {number} if number in ends else set()
        here, found = self._chain.devices[number], list[Neighbour]()
        for other in sorted(others):
            there = self._chain.devices[other]
            device = self._devices.get(there)
            address = device.address if device is not None else Address("127.0.0.1", 0, "")
            shape = self._fleet.link(here, there) if self._settings.emulate else None
            found.append(
                Neighbour(stage=other, device=there, host=address.host, port=address.port, id=address.id, shape=shape)
            )
        return tuple(found)

    def start(self, prompt: Prompt, made: Sequence[int]) -> None:
        tokens = (*prompt.tokens, *made)
        capacity = min(self._served.context, len(prompt.tokens) + prompt.sampling.max_tokens)
        message = GenerateStep(
            run=self._settings.run,
            epoch=self._program.epoch,
            prompt=prompt.number,
            source=COORDINATOR,
            start=0,
            count=len(tokens),
            tokens=tokens,
            new=NewPrompt(sampling=prompt.sampling, made=len(made), capacity=capacity),
        )
        self._send(self._program.members[0], message)

    def _send(self, device: str, message: AnyMessage) -> None:
        if (found := self._devices.get(device)) is not None:
            found.lane.put(message)

    def _refuse_all(self, reason: str) -> None:
        for number in list(self._answers):
            if (answer := self._answers.pop(number, None)) is not None:
                answer(PeerError(reason))


def _guard(device: str, message: AnyMessage) -> None:
    """Refuse what no device sends. Any thread."""
    if not isinstance(message, ServingReport | Heartbeat) or message.tensors:
        raise PeerError(f"sent {type(message).__name__} to the coordinator of a service")
