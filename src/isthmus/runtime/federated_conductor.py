"""The driver of a federated coordinator: its instructions carried out over connections to executors' processes."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec
from torch import Tensor

from isthmus.errors import IsthmusError, PeerError, UserError
from isthmus.federated.server import Server
from isthmus.protocol.federated_coordinator import FederatedCoordinator
from isthmus.protocol.federated_events import (
    Absorb,
    Commit,
    CoordinatorEvent,
    CoordinatorInstruction,
    Drained,
    Finish,
    Halt,
    Ignore,
    Interrupted,
    Joined,
    Lost,
    Merge,
    Open,
    Record,
    Returned,
    Summed,
    Tell,
    Tick,
    Turn,
)
from isthmus.runtime.federated_messages import (
    DrainedMessage,
    ReturnedMessage,
    SumsMessage,
    ToldMessage,
    TurnMessage,
)
from isthmus.runtime.interrupting import interruptible
from isthmus.runtime.messages import AnyMessage, Failed, HaltMessage, Heartbeat, Join, ReadyMessage
from isthmus.runtime.post import SWITCH_S, Post, headers_of
from isthmus.runtime.reception import Heard, Reception

TICK_S = 0.25
LAST_WORDS_S = 0.5
"""How long to wait for the exit of a process whose connection closed: it says more."""


class RoundMeasure(msgspec.Struct, frozen=True, kw_only=True):
    """What the driver saw of a round. Bytes are whole frames, of all executors."""

    seconds: float
    sent_bytes: int
    received_bytes: int
    trips: int = 0
    """Messages that brought values: sums or collected ones."""
    value_bytes: int = 0
    """Of those values, without headers."""


class FederatedConductor:
    """Runs the machine in the thread that calls `conduct`, over the connections that its reception is given."""

    def __init__(
        self,
        machine: FederatedCoordinator,
        server: Server,
        run: str,
        *,
        patience_s: float,
        committed: Callable[[Record, RoundMeasure], None],
        pinned: Mapping[str, int] = {},
        note: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`pinned` are the clients of executors that have one only. `note` is told of losses."""
        self._machine = machine
        self._server = server
        self._run = run
        self._patience_s = patience_s
        self._committed = committed
        self._pinned = pinned
        self._note = note
        self._heard: queue.SimpleQueue[Heard | CoordinatorEvent] = queue.SimpleQueue()
        self._posts: dict[str, Post] = {}
        self._sums: dict[str, tuple[SumsMessage, list[Tensor]]] = {}
        self._turn: Turn | None = None
        self._told: Mapping[str, Tensor] = {}
        self._opened_s = 0.0
        self._counted = (0, 0)
        self._trips = self._value_bytes = 0
        self._failure: IsthmusError | None = None
        self._over = threading.Event()
        self.reception = Reception(
            run, machine.executors, heard=self._heard.put, guard=self._guard, patience_s=patience_s
        )  # fmt: skip
        """Takes the executors' connections."""

    def conduct(self, ended: Callable[[], Mapping[str, str]] = dict) -> Finish:
        """Run to the end; `ended` tells of which executors the process has ended, and how.

        Ctrl-C drops the open round and ends. Raises UserError for what an executor refused as the user's.
        """
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()
        before_s = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_S)
        try:
            with interruptible(lambda: self._heard.put(Interrupted())):
                finish = self._loop(ended)
            for post in self._posts.values():
                post.flush()
        finally:
            sys.setswitchinterval(before_s)
            self._over.set()
            self.reception.close()
        if self._failure is not None:
            raise self._failure
        return finish

    def bytes(self) -> tuple[int, int]:
        """Sent and received so far, whole frames, of all executors."""
        counts = [self.reception.channel(name).statistics() for name in self._posts]
        return sum(c.sent_bytes for c in counts), sum(c.received_bytes for c in counts)

    def _beat(self) -> None:
        while not self._over.wait(self._patience_s / 4):
            for post in list(self._posts.values()):
                post.put(Heartbeat(run=self._run))

    def _loop(self, ended: Callable[[], Mapping[str, str]]) -> Finish:
        finish: Finish | None = None
        looked_s = time.monotonic()
        join_by_s = looked_s + self._patience_s
        self._machine.handle(Tick(now_s=looked_s))  # before any turn: deadlines count from its opening
        while finish is None:
            events: list[CoordinatorEvent] = []
            with contextlib.suppress(queue.Empty):
                events += self._translate(self._heard.get(timeout=TICK_S), ended)
            now_s = time.monotonic()
            if now_s - looked_s >= TICK_S:
                looked_s = now_s
                events.append(Tick(now_s=now_s))
                if now_s > join_by_s and (missing := set(self._machine.executors) - self._posts.keys()):
                    events += [self._lost(min(missing), f"it did not join within {self._patience_s:g} s", ended)]
                elif gone := ended().keys() - self._posts.keys():
                    events += [self._lost(min(gone), "its process ended before it joined", ended)]
            for event in events:
                instructions = self._machine.handle(event)
                finish = self._carry_out(instructions) or finish
                if any(isinstance(i, Open) for i in instructions):
                    self._machine.look_ahead()
            if self._failure is not None:
                return self._carry_out([Halt()]) or Finish("lost", str(self._failure))
        return finish

    def _guard(self, executor: str, message: AnyMessage) -> None:
        """Refuse what no executor sends, before its tensors are received. Any thread."""
        if not isinstance(message, ReadyMessage | DrainedMessage | ReturnedMessage | SumsMessage | Failed | Heartbeat):
            raise PeerError(f"sent {type(message).__name__} to the coordinator")
        if message.tensors and not isinstance(message, SumsMessage):
            raise PeerError(f"sent {type(message).__name__} with tensors")

    def _translate(
        self, heard: Heard | CoordinatorEvent, ended: Callable[[], Mapping[str, str]]
    ) -> Sequence[CoordinatorEvent]:
        if not isinstance(heard, tuple):
            return [heard]
        executor, message, tensors = heard
        match message:
            case None | Exception():
                reason = "its connection closed" if message is None else str(message)
                return [self._lost(executor, reason.removeprefix(f"device {executor!r}: "), ended)]
            case Join():
                channel = self.reception.channel(executor)
                self._posts[executor] = Post(channel, on_error=lambda e, name=executor: self._heard.put((name, e, [])))
            case ReadyMessage():
                return [Joined(executor=executor, client=self._pinned.get(executor))]
            case DrainedMessage(turn=turn):
                return [Drained(executor=executor, turn=turn)]
            case ReturnedMessage(turn=turn, tasks=tasks):
                return [Returned(executor=executor, turn=turn, tasks=tasks)]
            case SumsMessage(turn=turn):
                self._sums[executor] = (message, tensors)
                self._trips += bool(message.tensors)
                self._value_bytes += sum(h.nbytes for h in message.tensors)
                return [Summed(executor=executor, turn=turn, timed=message.timed, refused=message.refused)]
            case Failed(fault="user"):
                self._failure = UserError(message.reason)
            case Failed():
                return [self._lost(executor, message.reason, ended)]
            case _:
                pass
        return []

    def _lost(self, executor: str, reason: str, ended: Callable[[], Mapping[str, str]]) -> Lost:
        deadline_s = time.monotonic() + LAST_WORDS_S
        while executor not in ended() and time.monotonic() < deadline_s:
            time.sleep(0.01)
        reason = ended().get(executor, reason)
        self._note(f"executor {executor} was lost: {reason}")
        return Lost(executor=executor, reason=reason)

    def _carry_out(self, instructions: Sequence[CoordinatorInstruction]) -> Finish | None:
        finish: Finish | None = None
        for instruction in instructions:
            match instruction:
                case Open(executor=executor, event=opened):
                    self._open(opened.opening.turn)
                    self._server.open(opened.opening)
                    headers = headers_of(self._told)
                    message = TurnMessage(run=self._run, opened=opened, tensors=headers)
                    self._posts[executor].put(message, list(self._told.values()))
                case Tell(executor=executor, event=told):
                    self._posts[executor].put(ToldMessage(run=self._run, told=told))
                case Merge(executor=executor):
                    self._merge(executor)
                case Ignore(executor=executor):
                    self._sums.pop(executor, None)
                case Absorb():
                    self._server.absorb()
                case Commit(record=record):
                    self._committed(record, self._measure())
                case Halt():
                    for post in self._posts.values():
                        post.put(HaltMessage(run=self._run))
                case Finish():
                    finish = instruction
        return finish

    def _open(self, turn: Turn) -> None:
        if turn == self._turn:
            return
        if self._turn is None or turn.round != self._turn.round:
            self._opened_s = time.monotonic()
        self._turn, self._told = turn, self._server.broadcast()

    def _measure(self) -> RoundMeasure:
        sent, received = self.bytes()
        before, self._counted = self._counted, (sent, received)
        trips, value_bytes = self._trips, self._value_bytes
        self._trips = self._value_bytes = 0
        return RoundMeasure(
            seconds=time.monotonic() - self._opened_s, sent_bytes=sent - before[0],
            received_bytes=received - before[1], trips=trips, value_bytes=value_bytes,
        )  # fmt: skip

    def _merge(self, executor: str) -> None:
        """PeerError here is another party's fault, but its clients count as in already: the run must end."""
        message, tensors = self._sums.pop(executor)
        named = {h.name: t for h, t in zip(message.tensors, tensors, strict=True)}
        try:
            self._server.merge(named, message.clients, message.weight, message.weights)
        except PeerError as e:
            self._failure = PeerError(f"executor {executor!r}: {e}")
