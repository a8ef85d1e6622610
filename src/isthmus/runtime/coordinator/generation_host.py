"""The coordinator of a service that generates text: the port of `Tokens`, over connections."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
from torch import Tensor

from isthmus.errors import PeerError, UserError
from isthmus.fleet import Fleet
from isthmus.graph import Flow, StageGraph, assign, partition
from isthmus.graph.serving import POSITIONS
from isthmus.job.first_weights import Served, token_input
from isthmus.planners.generation import Chain
from isthmus.programs.tokens import Tokens
from isthmus.protocol.generation import Prompt
from isthmus.protocol.run_messages import Halt
from isthmus.runtime.coordinator.backend import DevicesAtWork
from isthmus.runtime.coordinator.run_callbacks import Address
from isthmus.runtime.messages.all_messages import AnyMessage
from isthmus.runtime.messages.assignment import (
    COORDINATOR,
    ForgetPrompts,
    GenerateStep,
    Neighbour,
    NewPrompt,
    ServeStage,
    ServingReport,
)
from isthmus.runtime.messages.run import Heartbeat, JoinRun, ToDevice
from isthmus.runtime.session_host import SessionHost
from isthmus.runtime.transport.message_sender import headers_of

HostAnswer = tuple[int, bool] | UserError | PeerError  # a token and whether it is the last; or why there will be none
Answer = Callable[[HostAnswer], None]  # called in the host's thread


class ServingSettings(msgspec.Struct, frozen=True, kw_only=True):
    run: str  # the secret name under which devices come
    timeout_s: float
    threads: int
    emulate: bool  # whether devices and links play those of the fleet


class ServingStatistics(msgspec.Struct, frozen=True, kw_only=True):
    chain: Chain
    losses: int  # devices that were lost


class GenerationHost(SessionHost[Tokens]):
    """The port of `Tokens`, in the thread that calls `serve`. Prompts may be submitted from any thread."""

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
        program = Tokens(
            self,
            chain.devices,
            fleet.names,
            at_once=chain.at_once,
            vocabulary=served.vocabulary,
            timeout_s=settings.timeout_s,
        )
        super().__init__(program, settings.run, fleet.names, timeout_s=settings.timeout_s)
        self._served, self._flow = served, Flow(served.graph)
        self._fleet = fleet
        self._settings = settings
        self._plan = plan
        self._note = note
        self._chain = chain
        self._has: dict[str, set[str]] = {}  # names of the variables that each device was sent, of its newest stage
        self._answers: dict[int, Answer] = {}
        self._numbers = iter(range(1 << 62))
        self._numbering = threading.Lock()
        self._reason = "the service has failed"  # why it ended; empty where that was asked for
        self.ready = threading.Event()  # set when the first stages are loaded

    # From any thread

    def submit(self, prompt: Prompt, answer: Answer) -> int:
        """Return its number."""
        with self._numbering:
            number = next(self._numbers)
        self._answers[number] = answer
        self.inbox.put(partial(self.session.submit, msgspec.structs.replace(prompt, number=number)))
        if self.over.is_set():
            self._refuse_all("the service has ended")
        return number

    def cancel(self, number: int) -> None:
        self._answers.pop(number, None)
        self.inbox.put(partial(self.session.cancel, number))

    def stop(self) -> None:
        self.inbox.put(self.session.stop)

    def statistics(self) -> ServingStatistics:
        return ServingStatistics(chain=self._chain, losses=self.session.losses)

    # In its own thread

    def serve(self, devices: DevicesAtWork) -> None:
        """Until it is stopped. PeerError when the last device that can serve is lost."""
        self.drive(devices)
        if self._reason:
            raise PeerError(self._reason)

    def farewell(self) -> None:
        for lane in self.lanes.values():
            lane.put(ToDevice(run=self.run, body=Halt(epoch=self.session.epoch)))
        super().farewell()

    def close(self) -> None:
        super().close()
        self._refuse_all(self._reason or "the service was stopped")

    def guard(self, device: str, message: AnyMessage) -> None:
        if not isinstance(message, ServingReport | Heartbeat) or message.tensors:
            raise PeerError(f"sent {type(message).__name__} to the coordinator of a service")

    def joined(self, device: str, join: JoinRun) -> None:
        self._has[device] = set()
        self.session.joined(device)

    def received(self, device: str, message: AnyMessage, tensors: Sequence[Tensor]) -> None:
        if isinstance(message, ServingReport):
            self.session.heard(device, message.body)
            if self.session.phase == "serving":
                self.ready.set()

    # What the program asks

    def note(self, text: str) -> None:
        self._note(text)

    def release(self, device: str) -> None:
        self.send(device, ToDevice(run=self.run, body=Halt(epoch=self.session.epoch)))
        if (lane := self.lanes.get(device)) is not None:
            lane.drain()
        self.hang_up(device)

    def reject(self, device: str, *, permanent: bool) -> None:
        self.hang_up(device, permanent=permanent)

    def ended(self, reason: str) -> None:
        self._reason = reason

    def plan(self, devices: Sequence[str]) -> Sequence[str]:
        self._chain = self._plan(devices)
        self._note(f"stages on {' > '.join(self._chain.devices)}")
        return self._chain.devices

    def forget(self, number: int) -> None:
        message = ForgetPrompts(run=self.run, epoch=self.session.epoch, prompts=(number,))
        for device in self.session.members:
            self.send(device, message)

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
            if name not in self.lanes:
                continue  # its loss is on the way
            wanted = {op.target for op in graph.variables() if op.target != POSITIONS}
            missing = {target: self._served.weights[target] for target in sorted(wanted - self._has[name])}
            self._has[name] = wanted
            message = ServeStage(
                run=self.run,
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
            self.send(name, message, list(missing.values()))

    def _neighbours(self, number: int, graphs: Sequence[StageGraph]) -> tuple[Neighbour, ...]:
        others: set[int] = {c.source for c in graphs[number].receives} | {c.target for c in graphs[number].sends}
        ends = {0, len(graphs) - 1}
        others |= ends - {number} if number in ends else set()
        here, found = self._chain.devices[number], list[Neighbour]()
        for other in sorted(others):
            there = self._chain.devices[other]
            address = self.addresses.get(there, Address("127.0.0.1", 0, ""))
            shape = self._fleet.link(here, there) if self._settings.emulate else None
            found.append(
                Neighbour(stage=other, device=there, host=address.host, port=address.port, id=address.id, shape=shape)
            )
        return tuple(found)

    def start(self, prompt: Prompt, made: Sequence[int]) -> None:
        tokens = (*prompt.tokens, *made)
        capacity = min(self._served.context, len(prompt.tokens) + prompt.sampling.max_tokens)
        message = GenerateStep(
            run=self.run,
            epoch=self.session.epoch,
            prompt=prompt.number,
            source=COORDINATOR,
            start=0,
            count=len(tokens),
            tokens=tokens,
            new=NewPrompt(sampling=prompt.sampling, made=len(made), capacity=capacity),
        )
        self.send(self.session.members[0], message)

    def _refuse_all(self, reason: str) -> None:
        for number in list(self._answers):
            if (answer := self._answers.pop(number, None)) is not None:
                answer(PeerError(reason))
