"""Drawn integers in what devices that generate text are told: by their coordinator, and by each other. Each goes
through the decoder, the guard of the link and the stage's checks into what the device does with it. Its sender is named
where it is refused, which leaves no trace; no other error is raised; and the right message goes on to the right tokens.

Structs with integers, and where they are drawn:

- to devices: ServeStage with Neighbour and TensorHeader, GenerateStep with NewPrompt and Sampling, ForgetPrompts: here,
  `coordinator`; ServeStage's graph, which is the program that the coordinator has the device run: `graphs`. Halt, as
  all programs have it: tests/runtime;
- between devices: GenerateStep with NewPrompt, Sampling and TensorHeader: here, `devices`. Heartbeat has none;
- to the coordinator: ServingReport with StageLoaded, StageUnable, TokenGenerated, PromptFailed: test_drawn_integers.py.
"""

from __future__ import annotations

import copy
import queue
import threading
from collections import deque
from collections.abc import Generator, Sequence
from functools import partial
from typing import Any, cast

import msgspec
import pytest
import torch
from torch import Tensor

from isthmus.accelerators import HOST
from isthmus.errors import PeerError, StepError, UserError
from isthmus.graph import Flow, assign, cuts, partition
from isthmus.graph.captured import Captured
from isthmus.graph.serving import POSITIONS
from isthmus.graph.serving_capture import capture_serving
from isthmus.job.first_weights import Served, token_input
from isthmus.models import ModelSpec, build_model
from isthmus.protocol.generation import Sampling, StageLoaded, StageReport, StageUnable, TokenGenerated
from isthmus.runtime.device import stage_server
from isthmus.runtime.device.coordinator_link import CoordinatorLink, CoordinatorMessage, of_order
from isthmus.runtime.device.peer_connections import PeerConnections
from isthmus.runtime.device.stage_server import StageServer, _Serving
from isthmus.runtime.messages.all_messages import AnyMessage
from isthmus.runtime.messages.assignment import (
    COORDINATOR,
    ForgetPrompts,
    GenerateStep,
    Neighbour,
    NewPrompt,
    ServeStage,
    ServingOrder,
    ServingReport,
)
from isthmus.runtime.transport.message_sender import headers_of
from isthmus.training.weights import initial_weights

from ..drawn_integers import Lies, landed, possible_threads, received
from .runs import GPT

pytestmark = pytest.mark.thorough

RUN, STAGES = "run", 3
PROMPTS = {
    0: ((5, 77, 200), Sampling(max_tokens=4)),
    1: ((9,), Sampling(max_tokens=4, temperature=0.9, top_k=40, seed=3, stop=(256,))),
    2: ((1, 2, 3, 4), Sampling(max_tokens=5)),
}
CANCELLED = 2


@pytest.fixture(scope="module")
def served() -> Served:
    def build() -> torch.nn.Module:
        return build_model(ModelSpec(name="gpt", options=GPT)).eval()

    graph, constants, context = capture_serving(build, name="gpt", dtype=torch.float32, trained=64)
    torch.manual_seed(0)
    module = build()
    captured = Captured(train=graph, eval=graph, constants=constants | {POSITIONS: torch.empty(0)})
    return Served(graph=graph, weights=initial_weights(lambda: module, captured, 0), context=context, step=0)


@pytest.fixture(autouse=True)
def _threads(monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    yield from possible_threads(monkeypatch)


class _Channel:
    """Over which nothing comes by itself."""

    def __init__(self, other: str) -> None:
        self.other, self._over = other, threading.Event()

    def receive(self, *_: object) -> None:
        self._over.wait()

    def close(self) -> None:
        self._over.set()


class _Lane:
    """What is sent waits here."""

    def __init__(self, *_: object, **__: object) -> None:
        self.sent = deque[tuple[GenerateStep, list[Tensor]]]()

    def put(self, message: GenerateStep, tensors: Sequence[Tensor] = ()) -> None:
        self.sent.append((message, list(tensors)))

    def close(self, *_: object) -> None:
        pass


class _Peers:
    """Every neighbour is there."""

    def connect(self, order: ServeStage, _: object) -> dict[int, _Channel]:
        return {n.stage: _Channel(f"device {n.device!r}") for n in order.neighbours}


class _Control:
    def __init__(self) -> None:
        self.said = deque[StageReport]()

    def send(self, message: ServingReport) -> None:
        self.said.append(message.body)

    def outdated(self, _: int) -> bool:
        return False


def _server(control: _Control) -> StageServer:
    inbox = queue.SimpleQueue[object]()
    return StageServer(RUN, cast("PeerConnections", _Peers()), cast("CoordinatorLink", control), inbox, HOST)


def _copied(server: StageServer) -> tuple[StageServer, _Control]:
    """What is done with it leaves the right one as it is."""
    control, right = _Control(), server._serving
    found = _server(control)
    found._weights, found._epoch = dict(server._weights), server._epoch
    if right is not None:
        serving = found._serving = copy.copy(right)
        serving._running = copy.deepcopy(right._running)
        serving._pending, serving._forgotten = dict(right._pending), copy.copy(right._forgotten)
        serving._lanes = cast("Any", {stage: _Lane() for stage in right._lanes})
        serving._channels, serving._over, serving._inbox = {}, threading.Event(), queue.SimpleQueue()
        serving._report, serving._failed = found._report, found._failed
    return found, control


def _state(serving: _Serving | None) -> object:
    """All that orders and steps change."""
    if serving is None:
        return None
    running = {
        number: (one.held, one.new, one.chooser and one.chooser.made, [layer._held for layer in one.cache.layers])
        for number, one in serving._running.items()
    }
    return serving.order, running, {**serving._pending}, [*serving._forgotten]


class Conversation:
    """A coordinator's and three devices': prompts, one of them cancelled, and a chain that is loaded again halfway."""

    def __init__(self, served: Served, lies: Lies | None, of: str) -> None:
        self._served, self._flow = served, Flow(served.graph)
        self._lies, self._of = lies, of
        legal = cuts(self._flow)
        boundaries = [legal[len(legal) * k // STAGES].position for k in range(1, STAGES)]
        self._graphs = partition(self._flow, assign(self._flow, boundaries))
        self._controls = [_Control() for _ in range(STAGES)]
        self.devices = [_server(control) for control in self._controls]
        self.messages = 0
        self.tokens: dict[int, list[int]] = {}
        self._epoch = 0

    def run(self) -> dict[int, list[int]]:
        for self._epoch in range(2):
            for stage in range(STAGES):
                self._order(stage, self._stage(stage))
                assert self._controls[stage].said.popleft() == StageLoaded(epoch=self._epoch)
            for number in sorted(PROMPTS if self._epoch == 0 else self.tokens):
                self._order(0, self._prompt(number))
                self._deliver(most=2 if self._epoch == 0 else 99)
            if self._epoch == 0:
                del self.tokens[CANCELLED]
            for stage in range(STAGES):
                self._order(stage, ForgetPrompts(run=RUN, epoch=self._epoch, prompts=(CANCELLED,)))
        for device in self.devices:
            device.close()
        return self.tokens

    def _stage(self, stage: int) -> ServeStage:
        graph = self._graphs[stage]
        names = {op.target for op in graph.variables() if op.target != POSITIONS} if self._epoch == 0 else set[str]()
        weights = {name: self._served.weights[name] for name in sorted(names)}
        self._sent = list(weights.values())
        neighbours = tuple(
            Neighbour(stage=n, device=f"d{n}", host="127.0.0.1", port=1) for n in range(STAGES) if n != stage
        )
        return ServeStage(
            run=RUN,
            tensors=headers_of(weights),
            epoch=self._epoch,
            stage=stage,
            device=f"d{stage}",
            graph=graph,
            token_input=token_input(self._flow),
            vocabulary=self._served.vocabulary,
            context=self._served.context,
            neighbours=neighbours,
        )

    def _prompt(self, number: int) -> GenerateStep:
        prompt, sampling = PROMPTS[number]
        made = self.tokens.setdefault(number, [])
        self._sent = []
        return GenerateStep(
            run=RUN,
            epoch=self._epoch,
            prompt=number,
            source=COORDINATOR,
            start=0,
            count=len(prompt) + len(made),
            tokens=(*prompt, *made),
            new=NewPrompt(sampling=sampling, made=len(made), capacity=len(prompt) + sampling.max_tokens),
        )

    def _order(self, stage: int, order: ServingOrder) -> None:
        tensors = [] if isinstance(order, ForgetPrompts) else self._sent
        lied_about = self._of == "coordinator" or (self._of == "graphs" and isinstance(order, ServeStage))
        self.messages += lied_about
        if self._lies is not None and lied_about:
            take = partial(self._lie_of_coordinator, stage, tensors)
            keep = [name for name in order.__struct_fields__ if (name == "graph") != (self._of == "graphs")]
            self._lies.about(order, take, names="coordinator", keep=keep)
        right, arrived = landed(received(order), tensors)
        self.devices[stage].follow(cast("ServingOrder", right), arrived)
        assert not any(isinstance(said, StageUnable) for said in self._controls[stage].said)

    def _lie_of_coordinator(self, stage: int, tensors: list[Tensor], message: AnyMessage) -> None:
        try:
            message, arrived = landed(message, tensors)
        except PeerError as e:
            raise PeerError(f"coordinator: {e}") from None  # as the channel does
        assert isinstance(message, ServingOrder)
        device, control = _copied(self.devices[stage])
        before, weights = device._serving, dict(device._weights)
        state = _state(before)
        _follow(device, message, arrived)
        refusals = [said.reason for said in control.said if isinstance(said, StageUnable)]
        if refusals:
            if self._of != "graphs":
                assert _state(before) == state and device._weights.keys() == weights.keys()
            raise PeerError(refusals[0])
        if isinstance(message, ServeStage):
            assert control.said.popleft() == StageLoaded(epoch=message.epoch)
            if stage == 0:  # its settings may be such that it takes no right prompt; it takes no harm of one
                prompt = msgspec.structs.replace(self._prompt(0), epoch=message.epoch)
                _follow(device, prompt, [])
                if refusals := [said.reason for said in control.said if isinstance(said, StageUnable)]:
                    device.close()
                    raise PeerError(refusals[0])
        self._is_of_the_plan(self.devices[stage], device._serving, message, control)
        device.close()

    def _deliver(self, most: int) -> None:
        """Steps on their way, until each prompt has so many tokens, or its last."""
        while True:
            for control in self._controls:
                while control.said:
                    made = control.said.popleft()
                    assert isinstance(made, TokenGenerated)
                    assert made.place == len(self.tokens[made.prompt])
                    self.tokens[made.prompt].append(made.token)
            ways = [
                (source, target, cast("Any", lane).sent)
                for source, device in enumerate(self.devices)
                for target, lane in cast("_Serving", device._serving)._lanes.items()
            ]
            if (way := next((one for one in ways if one[2]), None)) is None:
                return
            source, target, sent = way
            step, tensors = sent.popleft()
            if target == 0 and len(self.tokens[step.prompt]) >= most:
                continue  # the chain is loaded again before it comes
            self._step(source, target, step, tensors)

    def _step(self, source: int, target: int, step: GenerateStep, tensors: list[Tensor]) -> None:
        serving = self.devices[target]._serving
        assert serving is not None
        self.messages += self._of == "devices"
        if self._lies is not None and self._of == "devices":
            take = partial(self._lie_of_device, source, target, tensors)
            self._lies.about(step, take, names=f"device 'd{source}'")
        right, arrived = landed(received(step), tensors, partial(serving._guard, source))
        assert isinstance(right, GenerateStep)
        serving.take(f"device 'd{source}'", right, arrived)
        assert not any(isinstance(said, StageUnable) for said in self._controls[target].said)

    def _lie_of_device(self, source: int, target: int, tensors: list[Tensor], message: AnyMessage) -> None:
        device, control = _copied(self.devices[target])
        serving = device._serving
        assert serving is not None
        other = self.devices[target]._serving._channels[source].other  # pyright: ignore[reportOptionalMemberAccess]
        try:
            message, arrived = landed(message, tensors, partial(serving._guard, source))
        except PeerError as e:
            raise PeerError(f"{other}: {e}") from None  # as the channel does
        assert isinstance(message, GenerateStep)
        state = _state(serving)
        serving.take(other, message, arrived)
        if refusals := [said.reason for said in control.said if isinstance(said, StageUnable)]:
            assert _state(serving) == state
            raise PeerError(refusals[0])
        self._is_of_the_plan(self.devices[target], serving, message, control)

    def _is_of_the_plan(
        self, before: StageServer, serving: _Serving | None, message: AnyMessage, control: _Control
    ) -> None:
        if serving is None:  # orders for a stage that it has not, or a stage of settings that take no right prompt
            assert not isinstance(message, GenerateStep)
            return
        order, context = serving.order, self._served.context
        if not isinstance(message, ServeStage):
            assert order.epoch == self._epoch and len(serving._running) <= len(PROMPTS) + 1
            assert len(serving._pending) <= len(PROMPTS)
            for one in serving._running.values():
                assert 0 < one.held <= one.new.capacity <= context
        if isinstance(message, GenerateStep) and message.epoch == order.epoch:
            assert before._serving is not None
            if (running := before._serving._running.get(message.prompt)) is not None:
                assert message.new is None and message.start == running.held, "it goes on from what was computed"
        for said in control.said:
            if isinstance(said, TokenGenerated):
                assert said.token < self._served.vocabulary and said.place < context
        for lane in serving._lanes.values():
            for step, _ in cast("Any", lane).sent:
                assert step.start + step.count <= context and step.source == order.stage


def _follow(device: StageServer, order: ServingOrder, tensors: Sequence[Tensor]) -> None:
    """As its process does."""
    try:
        device.follow(order, tensors)
    except Exception as e:
        error = of_order(e, CoordinatorMessage(order, list(tensors)))
        if not isinstance(error, PeerError | UserError | StepError):  # of operators: the graph is the coordinator's
            raise
        device.give_up(PeerError(f"coordinator: {error}"))


@pytest.mark.parametrize("of", ["coordinator", "graphs", "devices"])
def test_a_drawn_integer_is_refused_or_one_that_a_stage_may_get(
    of: str, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_server, "SendLane", _Lane)
    monkeypatch.setattr(stage_server, "start_heartbeats", lambda *_: None)
    right = Conversation(served, None, of)
    expected = right.run()
    assert [len(expected[number]) for number in (0, 1)] == [4, 4]
    lies = Lies(41, right.messages)
    assert Conversation(served, lies, of).run() == expected
    if of == "graphs":  # most integers of a graph are figures for planners
        assert lies.refused and lies.taken
    else:
        lies.told()
