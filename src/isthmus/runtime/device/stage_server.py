"""A device's side of a service that generates text: one stage, its neighbours, and the caches of prompts in flight.

Everything but the links' lanes runs in the device's main thread: what links bring goes to its inbox as a callable.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from isthmus.accelerators import Accelerator
from isthmus.accelerators.copies import to_host
from isthmus.errors import Diverged, IsthmusError, PeerError, UserError
from isthmus.graph.opgraph import Ref
from isthmus.graph.serving import POSITIONS
from isthmus.protocol.generation import PromptFailed, StageLoaded, StageReport, StageUnable, TokenGenerated
from isthmus.runtime.device.coordinator_link import CoordinatorLink
from isthmus.runtime.device.peer_connections import PeerConnections
from isthmus.runtime.messages.all_messages import AnyMessage
from isthmus.runtime.messages.assignment import (
    COORDINATOR,
    GenerateStep,
    NewPrompt,
    ServeStage,
    ServingOrder,
    ServingReport,
)
from isthmus.runtime.messages.run import Heartbeat
from isthmus.runtime.transport.channel import SocketChannel
from isthmus.runtime.transport.lanes import SendLane
from isthmus.runtime.transport.message_sender import headers_of, start_heartbeats
from isthmus.session.session import in_one_line
from isthmus.training.engine_operators import engine_operators
from isthmus.training.generation import PromptCache, ServedStage, TokenChooser

FORGOTTEN = 1024  # so many prompts that were cancelled are remembered: their first tokens may be on the way still


class _Arrived(NamedTuple):
    """The inputs of a step that have arrived, by source."""

    tokens: int
    new: NewPrompt | None
    inputs: dict[Ref, Tensor]
    sources: frozenset[int]


class StageServer:
    def __init__(
        self,
        run: str,
        peers: PeerConnections,
        control: CoordinatorLink,
        inbox: queue.SimpleQueue[object],
        accelerator: Accelerator,
    ) -> None:
        self._run = run
        self._peers = peers
        self._control = control
        self._inbox = inbox
        self._accelerator = accelerator
        self._weights: dict[str, Tensor] = {}  # weights of the stage, and of no other
        self._epoch = -1  # the epoch of the newest stage that was to be loaded
        self._serving: _Serving | None = None

    def follow(self, order: ServingOrder, tensors: Sequence[Tensor]) -> None:
        """An order of the coordinator's. One that no coordinator gives is reported to it, by its name."""
        if isinstance(order, ServeStage):
            sent = {h.name: t for h, t in zip(order.tensors, tensors, strict=True)}
            try:
                check_stage(order, self._epoch, {*self._weights, *sent})
            except PeerError as e:
                self._report(StageUnable(epoch=order.epoch, reason=in_one_line(_named("coordinator", e))))
                return
            self._weights |= sent
            self._load(order)
        elif self._serving is not None and order.epoch == self._serving.order.epoch:
            if isinstance(order, GenerateStep):
                self._serving.take("coordinator", order, [])
            else:
                self._serving.forget(order.prompts)

    def close(self) -> None:
        if self._serving is not None:
            self._serving.close()
        self._serving = None

    def give_up(self, error: IsthmusError) -> None:
        """The stage cannot be loaded, or not compute, as it was ordered."""
        self.close()
        print(in_one_line(error), file=sys.stderr, flush=True)
        self._report(StageUnable(epoch=self._epoch, reason=in_one_line(error)))

    def _load(self, order: ServeStage) -> None:
        self.close()
        self._epoch = order.epoch
        torch.set_num_threads(order.threads)
        here = engine_operators("torch")
        if lacked := here.lacks(order.graph.schemas):
            raise UserError(
                f"operators: torch {here.torch} lacks {', '.join(lacked)} at the schema of the coordinator's"
            )
        names = weights_of(order)
        self._weights = {name: value for name, value in self._weights.items() if name in names}
        try:
            channels = self._peers.connect(order, lambda: self._control.outdated(order.epoch))
        except PeerError as e:
            self._report(StageUnable(epoch=order.epoch, reason=in_one_line(e)))
            return
        stage = ServedStage(order.graph, self._weights, accelerator=self._accelerator)
        self._serving = _Serving(order, stage, channels, self._inbox, self._report, self._failed)
        self._report(StageLoaded(epoch=order.epoch))

    def _failed(self, epoch: int, error: Exception) -> None:
        """A link of the stage broke, or brought what no party of this chain sends."""
        if self._serving is None or epoch != self._serving.order.epoch:
            return
        self.close()
        print(in_one_line(error), file=sys.stderr, flush=True)
        self._report(StageUnable(epoch=epoch, reason=in_one_line(error)))

    def _report(self, body: StageReport) -> None:
        self._control.send(ServingReport(run=self._run, body=body))


def _named(party: str, error: PeerError) -> PeerError:
    return PeerError(f"{party}: {error}")


@dataclass
class _Running:
    cache: PromptCache
    new: NewPrompt
    chooser: TokenChooser | None  # the chooser of the last stage
    held: int = 0  # tokens that were computed: the next one's position


class _Serving:
    def __init__(
        self,
        order: ServeStage,
        stage: ServedStage,
        channels: Mapping[int, SocketChannel],
        inbox: queue.SimpleQueue[object],
        report: Callable[[StageReport], None],
        failed: Callable[[int, Exception], None],
    ) -> None:
        """`failed` is called in the main thread, with the epoch."""
        self.order = order
        self._stage = stage
        self._inbox = inbox
        self._report = report
        self._failed = failed
        graph = stage.graph
        self._crossing = {source: graph.received_from(source) for source in range(order.stage)}
        self._sources = {c.source for c in graph.receives} or {COORDINATOR}
        self._targets = sorted({c.target for c in graph.sends})
        self._pending: dict[tuple[int, int], _Arrived] = {}
        self._running: dict[int, _Running] = {}
        self._forgotten: deque[int] = deque(maxlen=FORGOTTEN)
        self._over = threading.Event()
        self._channels = dict(channels)
        self._lanes = {
            n.stage: SendLane(channels[n.stage], shape=n.shape, timeout_s=order.timeout_s, on_error=self._broken)
            for n in order.neighbours
        }
        start_heartbeats(order.run, order.timeout_s, self._over, self._lanes.values)
        for source in self._channels:
            threading.Thread(target=self._receive, args=(source,), name=f"receive {source}", daemon=True).start()

    # In the links' threads

    def _broken(self, error: Exception) -> None:
        if not self._over.is_set():
            self._inbox.put(partial(self._failed, self.order.epoch, error))

    def _receive(self, source: int) -> None:
        channel = self._channels[source]
        idle_s = None  # who has not begun may still be loading: the coordinator knows
        try:
            while (received := channel.receive(partial(self._guard, source), idle_s)) is not None:
                idle_s = self.order.timeout_s
                if isinstance(received[0], GenerateStep):
                    self._inbox.put(partial(self.take, channel.other, *received))
                del received  # while it waits, the link must not keep tensors alive
            raise PeerError(f"{channel.other}: closed the link")
        except Exception as e:
            self._broken(e)

    def _guard(self, source: int, message: AnyMessage) -> None:
        """Refuse what no neighbour sends, before its tensors are received."""
        if message.run != self.order.run:
            raise PeerError(f"a frame of run {message.run!r} arrived, expected {self.order.run!r}")
        if isinstance(message, Heartbeat):
            return
        if not isinstance(message, GenerateStep) or (message.source, message.epoch) != (source, self.order.epoch):
            raise PeerError(f"stage {source} sent {type(message).__name__} that is not of this chain")
        check_step(self.order, message)
        expected = [(c.spec.dtype, c.spec.shape_at(message.count)) for c in self._crossing.get(source, ())]
        if [(h.dtype, h.shape) for h in message.tensors] != expected:
            raise PeerError(f"stage {source} sent other tensors than cross the cut")

    # In the device's main thread

    def take(self, sender: str, step: GenerateStep, tensors: Sequence[Tensor]) -> None:
        """`arrived`, of a party that is named where no such step can come; then the stage is given up."""
        try:
            self.arrived(step, tensors)
        except PeerError as e:
            self._failed(self.order.epoch, _named(sender, e))

    def arrived(self, step: GenerateStep, tensors: Sequence[Tensor]) -> None:
        """New tokens of a prompt, or a part of what crosses to this stage. PeerError, which does not name the sender,
        for what does not go on from what was computed."""
        running, begins = self._running.get(step.prompt), step.new is not None and step.prompt not in self._forgotten
        if self._over.is_set() or not (begins or running is not None):
            return
        check_step(self.order, step)
        source = COORDINATOR if step.tokens else step.source
        before = self._pending.get((step.prompt, step.start), _Arrived(step.count, step.new, {}, frozenset()))
        self._check_next(step, source, running, before)
        self._pending.pop((step.prompt, step.start), None)
        inputs = {c.value: t for c, t in zip(self._crossing.get(step.source, ()), tensors, strict=True)}
        if step.tokens:
            inputs[Ref(self.order.token_input)] = torch.tensor([step.tokens])
        found = _Arrived(step.count, step.new, before.inputs | inputs, before.sources | {source})
        if found.sources >= self._sources:
            self._compute(step, found)
        else:
            self._pending[step.prompt, step.start] = found

    def _check_next(self, step: GenerateStep, source: int, running: _Running | None, before: _Arrived) -> None:
        if source not in self._sources or source in before.sources:
            raise PeerError(f"sent a step of prompt {step.prompt} at {step.start} as of stage {source}")
        held, capacity = (0, step.start + step.count) if running is None else (running.held, running.new.capacity)
        if step.start != held or step.start + step.count > capacity:
            raise PeerError(
                f"sent {step.count} tokens of prompt {step.prompt} at {step.start}, after {held} of at most {capacity}"
            )
        if (step.count, step.new) != (before.tokens, before.new):
            raise PeerError(f"sent a step of prompt {step.prompt} at {step.start} unlike the other stages'")

    def forget(self, prompts: Sequence[int]) -> None:
        self._forgotten.extend(prompts)
        for prompt in prompts:
            self._running.pop(prompt, None)
        self._pending = {key: found for key, found in self._pending.items() if key[0] not in prompts}

    def _compute(self, step: GenerateStep, found: _Arrived) -> None:
        began_s = time.monotonic()
        if found.new is not None:
            self._running[step.prompt] = self._begun(found.new)
        running = self._running[step.prompt]
        out = self._stage.run(running.cache, step.start, found.inputs, step.count)
        running.held += step.count
        if self.order.flops_per_s is not None:
            least_s = self._stage.flops(step.count) / self.order.flops_per_s
            time.sleep(max(0.0, least_s - (time.monotonic() - began_s)))
        for target in self._targets:
            sent = {str(n): out[c.value] for n, c in enumerate(self._stage.graph.sent_to(target))}
            self._send(target, step, found.new, to_host(self._stage.accelerator, sent))
        if (loss := self._stage.graph.loss) is not None:
            self._choose(step, out[loss])

    def _begun(self, new: NewPrompt) -> _Running:
        graph, chooser = self._stage.graph, None
        if graph.loss is not None:
            logits = next(op.outputs[graph.loss.index] for op in graph.ops if op.name == graph.loss.op)
            chooser = TokenChooser(new.sampling, new.made, logits.shape_at(1)[-1])
        return _Running(self._stage.cache(new.capacity), new, chooser)

    def _send(self, target: int, step: GenerateStep, new: NewPrompt | None, tensors: Mapping[str, Tensor]) -> None:
        message = self._step(step.prompt, step.start, step.count)
        message = msgspec.structs.replace(message, new=new, tensors=headers_of(tensors))
        self._lanes[target].put(message, list(tensors.values()))

    def _step(self, prompt: int, start: int, count: int) -> GenerateStep:
        order = self.order
        return GenerateStep(
            run=order.run, epoch=order.epoch, prompt=prompt, source=order.stage, start=start, count=count
        )

    def _choose(self, step: GenerateStep, logits: Tensor) -> None:
        running = self._running[step.prompt]
        chooser, capacity = running.chooser, running.new.capacity
        assert chooser is not None, "the last stage chooses"
        place, end = chooser.made, step.start + step.count
        try:
            token, last = chooser.choose(logits)
        except (Diverged, UserError) as e:
            failed = PromptFailed(
                epoch=self.order.epoch, prompt=step.prompt, reason=str(e), of_request=isinstance(e, UserError)
            )
            self._report(failed)
            return
        last = last or end + 1 >= capacity
        made = TokenGenerated(epoch=self.order.epoch, prompt=step.prompt, place=place, token=token, last=last)
        self._report(made)
        following = msgspec.structs.replace(self._step(step.prompt, end, 1), tokens=(token,))
        if last:
            self.forget([step.prompt])
        elif self.order.stage == 0:
            self._inbox.put(partial(self.arrived, following, []))
        else:
            self._lanes[0].put(following)

    def close(self) -> None:
        self._over.set()
        for lane in self._lanes.values():
            lane.close(0.0)
        for channel in self._channels.values():
            channel.close()


def check_stage(order: ServeStage, epoch: int, weights: Collection[str]) -> None:
    """`epoch`: of the newest stage that was loaded before. `weights` are those at hand, and those of the order."""
    graph = order.graph
    if order.epoch <= epoch:
        raise PeerError(f"sent a stage of epoch {order.epoch}, after one of epoch {epoch}")
    if order.stage != graph.index:
        raise PeerError(f"sent stage {order.stage} with the graph of stage {graph.index}")
    if absent := sorted(weights_of(order) - set(weights)):
        raise PeerError(f"sent stage {order.stage} without its weights {', '.join(absent)}")
    needed = {c.source for c in graph.receives} | {c.target for c in graph.sends}
    needed |= {0} if graph.loss is not None and order.stage > 0 else set()
    others = [neighbour.stage for neighbour in order.neighbours]
    if order.stage in others or len(set(others)) < len(others) or not needed.issubset(others):
        raise PeerError(f"sent stage {order.stage} with neighbours {others}, expected {sorted(needed)}")


def weights_of(order: ServeStage) -> set[str]:
    """Names of the variables that the stage has to be given."""
    return {op.target for op in order.graph.variables() if op.target != POSITIONS}


def check_step(order: ServeStage, step: GenerateStep) -> None:
    """Whether this stage may get such a step at all."""
    new, first = step.new, not order.graph.receives
    if (step.start == 0) != (new is not None):
        raise PeerError(f"sent a step at position {step.start} {'with' if new else 'without'} its prompt's settings")
    if step.start + step.count > order.context:
        raise PeerError(f"sent a step of {step.count} tokens at {step.start}, the model has {order.context} positions")
    if new is not None:
        _check_new(order, step, new)
    if len(step.tokens) != (step.count if first else 0):
        raise PeerError(f"sent {len(step.tokens)} tokens in a step of {step.count} to stage {order.stage}")
    if strange := [token for token in step.tokens if token >= order.vocabulary]:
        raise PeerError(f"sent token {strange[0]}, the model has 0 to {order.vocabulary - 1}")
    if first:
        _check_source(order, step)


def _check_new(order: ServeStage, step: GenerateStep, new: NewPrompt) -> None:
    most = new.sampling.max_tokens
    if new.made >= min(most, step.count):
        raise PeerError(f"sent {step.count} tokens of which {new.made} were generated, the request is for {most}")
    if new.capacity != min(order.context, step.count - new.made + most) or step.count > new.capacity:
        raise PeerError(f"sent {step.count} tokens, {new.made} of them generated of {most}, for {new.capacity}")


def _check_source(order: ServeStage, step: GenerateStep) -> None:
    """Prompts come of the coordinator, and each further token of the last stage."""
    last = max((neighbour.stage for neighbour in order.neighbours), default=order.stage)
    if step.source != (last if step.new is None else COORDINATOR) or (step.new is None and step.count != 1):
        raise PeerError(f"sent {step.count} tokens at {step.start} as of stage {step.source}")
