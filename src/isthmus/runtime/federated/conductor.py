"""The driver of a federated coordinator: its instructions carried out over connections to executors' processes."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

import msgspec
from torch import Tensor

from isthmus.errors import Diverged, PeerError, UserError
from isthmus.federated.server import Server
from isthmus.protocol.federated_coordinator import FederatedCoordinator
from isthmus.protocol.federated_events import (
    Absorb,
    Commit,
    CoordinatorEvent,
    CoordinatorInstruction,
    Dismiss,
    Dropped,
    Finish,
    Granted,
    Halt,
    Ignore,
    Interrupted,
    Lost,
    Merge,
    Open,
    Record,
    Tell,
    Tick,
    Turn,
)
from isthmus.runtime.conducting.deadlines import Deadlines, Waits
from isthmus.runtime.federated.intake import Intake
from isthmus.runtime.federated.shared_values import Board
from isthmus.runtime.messages.every import AnyMessage
from isthmus.runtime.messages.federated import ToldMessage, TurnMessage
from isthmus.runtime.messages.run import Failed, HaltMessage, Heartbeat, Join
from isthmus.runtime.processes.interrupting import Stop
from isthmus.runtime.transport.channel import SocketChannel
from isthmus.runtime.transport.post import SWITCH_S, Post, headers_of
from isthmus.runtime.transport.reception import Heard, Reception
from isthmus.training.layout import TensorHeader

TICK_S = 0.25
LAST_WORDS_S = 0.5
"""How long to wait for the exit of a process whose connection closed: it says more."""


class RoundMeasure(msgspec.Struct, frozen=True, kw_only=True):
    """What the driver saw of a round. Bytes are whole frames, of all executors, and what they read and wrote in shared
    memory in place of frames."""

    seconds: float
    opened_at_s: float
    """Since 1970, by this machine's clock."""
    sent_bytes: int
    received_bytes: int
    trips: int = 0
    """Messages that brought values: sums or collected ones."""
    value_bytes: int = 0
    """Of those values, without headers."""


def ended(finish: Finish) -> Finish:
    """How a run ended that is done or interrupted; PeerError and Diverged where it could not go on."""
    if finish.outcome == "diverged":
        raise Diverged(finish.reason)
    if finish.outcome == "lost":
        raise PeerError(finish.reason)
    return finish


class Outgoing(Protocol):
    """A connection's way out, for one thread."""

    def put(self, message: AnyMessage, tensors: Sequence[Tensor] = ()) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


def post(channel: SocketChannel, patience_s: float, fail: Callable[[Exception], None]) -> Outgoing:
    """Messages are sent at once: a process of this machine takes them."""
    return Post(channel, fail)


class Office(msgspec.Struct, frozen=True, kw_only=True):
    """How a conductor and its executors talk. The default is for processes of this machine."""

    run: str
    patience_s: float
    reception: type[Reception] = Reception
    out: Callable[[SocketChannel, float, Callable[[Exception], None]], Outgoing] = post
    """(channel, patience, what to tell of a failure) -> its way out."""
    last_words_s: float = LAST_WORDS_S
    board: Board | None = None
    """Where executors of this machine read the broadcast."""
    returns: bool = False
    """Whoever is lost may come back: whatever goes wrong with one executor is no failure of the run."""


class FederatedConductor:
    """Runs the machine over the connections that its reception is given.

    What an executor says is acted on by the thread that receives it, one at a time: another thread would first have to
    wake up, which takes as long as to decide. The thread that calls `conduct` looks at the clock.
    """

    def __init__(
        self,
        machine: FederatedCoordinator,
        server: Server,
        intake: Intake,
        office: Office,
        *,
        committed: Callable[[Record, RoundMeasure], Callable[[], None] | None],
        note: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`committed` is called before the next round opens, and what it returns once executors are at work on that
        one. `note` is told of losses."""
        self._machine = machine
        self._server = server
        self._intake = intake
        self._office = office
        self._run, self._patience_s = office.run, office.patience_s
        self._committed = committed
        self._note = note
        self._deciding = threading.Lock()
        self._begun = threading.Event()
        self._ended: Callable[[], Mapping[str, str]] = dict
        self._bell: queue.SimpleQueue[Interrupted | None] = queue.SimpleQueue()
        """Wakes the thread that conducts: for Ctrl-C, and at the end. A signal may put where it could not lock."""
        self._joining = Waits(note)
        self._deadlines = Deadlines(self._patience_s, 0.0, note)
        self._posts: dict[str, Outgoing] = {}
        self._reasons: dict[str, str] = {}
        self._behind: set[str] = set()
        """Sites whose last round ended without them."""
        """Why executors were lost that are not back."""
        self._left: set[str] = set()
        """Of them, those that are lost."""
        self._channels: list[SocketChannel] = []
        self._dismissed: set[str] = set()
        """Whom we have hung up on, until their connection is seen to end."""
        self._turn: Turn | None = None
        self._told: Mapping[str, Tensor] = {}
        self._lie: tuple[TensorHeader, ...] = ()
        self._shown_bytes = 0
        self._opened_s = 0.0
        self._counted = (0, 0, 0, 0)
        self._later: list[Callable[[], None]] = []
        self._finish: Finish | None = None
        self._failure: BaseException | None = None
        self._over = threading.Event()
        self.reception = office.reception(
            self._run, machine.executors, heard=self._hear, guard=intake.guard, patience_s=self._patience_s
        )
        """Takes the executors' connections."""

    def conduct(self, ended: Callable[[], Mapping[str, str]] = dict, stop: Stop | None = None) -> Finish:
        """Run to the end; `ended` tells of which executors the process has ended, and how.

        To stop is to drop the open round and to end. Raises UserError for what an executor refused as the user's.
        """
        self._ended = ended
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()
        before_s = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_S)
        try:
            with (stop or Stop()).calls(lambda: self._bell.put(Interrupted())):
                finish = self._watch()
            for out in self._posts.values():
                out.flush()
        finally:
            sys.setswitchinterval(before_s)
            self._over.set()
            self.reception.close()
        if self._failure is not None:
            raise self._failure
        return finish

    def bytes(self) -> tuple[int, int]:
        """Sent and received so far, whole frames, of all executors."""
        counts = [channel.statistics() for channel in self._channels]
        return sum(c.sent_bytes for c in counts), sum(c.received_bytes for c in counts)

    def _beat(self) -> None:
        while not self._over.wait(self._patience_s / 4):
            for out in self._reachable():
                out.put(Heartbeat(run=self._run))

    def _tell_waits(self, now_s: float) -> None:
        joining = self._machine.statistics().phase == "joining"
        missing = set(self._machine.executors) - (self._posts.keys() - self._left) if joining else set[str]()
        what = "for sites that left" if self._left & missing else "to join"
        self._joining.look(what, missing, now_s, until=self._until(now_s, missing))
        self._deadlines.lag(*self._machine.behind, now_s)

    def _until(self, now_s: float, missing: Collection[str]) -> str:
        """What the wait for those who come and go is for, how it ends, and why they left."""
        if (waiting := self._machine.waiting) is None:
            return ""
        here = f"{len(self._machine.executors) - len(missing)} of {len(self._machine.executors)} sites are here"
        end = f"the round begins with {waiting.needed}"
        if waiting.until_s is not None:
            left = f"in {max(0.0, waiting.until_s - now_s):.0f} s"
            end = f"{left} the round begins without the others" if waiting.goes_on else f"{end}, {left} the run ends"
        gone = "; ".join(f"{name} left: {self._reasons[name]}" for name in sorted(missing) if name in self._reasons)
        return f" ({here}; {end}{'; ' if gone else ''}{gone})"

    def _absent(self, late: bool) -> list[CoordinatorEvent]:
        """One that never joined, of processes that were started for the run; how long sites may take the machine
        decides."""
        if self._office.returns:
            return []
        if late and (missing := set(self._machine.executors) - self._posts.keys()):
            return [self._lost(min(missing), f"it did not join within {self._patience_s:g} s")]
        if gone := self._ended().keys() - self._posts.keys():
            return [self._lost(min(gone), "its process ended before it joined")]
        return []

    def _reachable(self) -> list[Outgoing]:
        return [out for name, out in list(self._posts.items()) if name not in self._left]

    def _watch(self) -> Finish:
        """Until the run is over: look at the clock, and at who is missing."""
        looked_s = time.monotonic()
        join_by_s = looked_s + self._patience_s
        self._machine.handle(Tick(now_s=looked_s))  # before any turn: deadlines count from its opening
        self._begun.set()
        while self._finish is None:
            events: list[CoordinatorEvent] = []
            with contextlib.suppress(queue.Empty):
                if (rung := self._bell.get(timeout=TICK_S)) is not None:
                    events.append(rung)
            now_s = time.monotonic()
            with self._deciding:
                if now_s - looked_s >= TICK_S and self._finish is None:
                    looked_s = now_s
                    self._tell_waits(now_s)
                    events.append(Tick(now_s=now_s))
                    events += self._absent(now_s > join_by_s)
                self._decide(events)
        return self._finish

    def _hear(self, heard: Heard) -> None:
        """In the thread that receives it."""
        self._begun.wait()
        with self._deciding:
            if self._finish is not None:
                return
            try:
                self._decide(self._translate(heard))
            except BaseException as e:  # the thread that conducts raises it
                self._failure = e
                self._end(Finish("lost", str(e)))

    def _decide(self, events: Sequence[CoordinatorEvent]) -> None:
        """Whoever calls it holds the lock. What can wait until executors are at work again comes last."""
        for event in events:
            instructions = self._machine.handle(event)
            finish = self._carry_out(instructions)
            if isinstance(event, Lost) and (finish is None or event.reason not in finish.reason):
                who = "site" if self._office.returns else "executor"
                self._note(f"{who} {event.executor} was lost: {event.reason}")
            if any(isinstance(i, Open) for i in instructions):
                self._machine.look_ahead()
            for act in self._later:
                act()
            self._later.clear()
            if finish is not None:
                self._end(finish)
        if self._failure is not None and self._finish is None:
            self._carry_out([Halt()])
            self._end(Finish("lost", str(self._failure)))

    def _end(self, finish: Finish) -> None:
        self._finish = finish
        self._bell.put(None)

    def _translate(self, heard: Heard) -> Sequence[CoordinatorEvent]:
        executor, message, tensors = heard
        match message:
            case None | Exception():
                if executor in self._dismissed or executor in self._left:  # that is known already
                    self._dismissed.discard(executor)
                    return []
                reason = "its connection closed" if message is None else str(message)
                return [self._lost(executor, reason.removeprefix(f"device {executor!r}: "))]
            case Join():
                self._welcome(executor)
            case Failed(fault="user", reason=reason) if not self._office.returns:
                self._failure = UserError(reason)
            case Failed(reason=reason):
                return [self._lost(executor, reason)]
            case Heartbeat():
                pass
            case _:
                try:
                    event = self._intake.hear(executor, message, tensors)
                except PeerError as e:
                    self._dismiss(executor)
                    return [self._lost(executor, str(e))]
                return [] if event is None else [event]
        return []

    def _dismiss(self, executor: str) -> None:
        self._dismissed.add(executor)
        self._left.add(executor)
        self.reception.channel(executor).close()

    def _welcome(self, executor: str) -> None:
        channel = self.reception.channel(executor)
        self._channels.append(channel)

        def fail(error: Exception) -> None:
            channel.close()  # the thread that receives from it tells of the loss
            if not (self._over.is_set() or executor in self._left):
                self._note(f"executor {executor}: {error}")

        if (former := self._posts.get(executor)) is not None:
            former.close()
        if self._reasons.pop(executor, None) is not None:
            self._note(f"site {executor} is back")
        self._left.discard(executor)
        self._posts[executor] = self._office.out(channel, self._patience_s, fail)
        if (greeting := self._intake.greeting(executor)) is not None:
            self._posts[executor].put(greeting)

    def _lost(self, executor: str, reason: str) -> Lost:
        self._left.add(executor)
        deadline_s = time.monotonic() + self._office.last_words_s
        while executor not in self._ended() and time.monotonic() < deadline_s:
            time.sleep(0.01)
        self._reasons[executor] = self._ended().get(executor, reason)
        return Lost(executor=executor, reason=self._reasons[executor])

    def _note_behind(self, site: str, round_: int) -> None:
        if site not in self._behind:
            self._behind.add(site)
            ended = f"round {round_} ended without its update, which counts nowhere if it comes"
            self._note(f"site {site}: {ended}; rounds go on without it until it is in time")

    def _carry_out(self, instructions: Sequence[CoordinatorInstruction]) -> Finish | None:
        finish: Finish | None = None
        for instruction in instructions:
            match instruction:
                case Open(executor=executor, event=opened):
                    self._open(opened.opening.turn)
                    self._server.open(opened.opening)
                    headers = headers_of(self._told)
                    message = TurnMessage(run=self._run, opened=opened, lie=self._lie, tensors=headers)
                    self._posts[executor].put(message, list(self._told.values()))
                    self._shown_bytes += sum(h.nbytes for h in self._lie)
                case Tell(executor=executor, event=told):
                    if isinstance(told, Granted):
                        self._intake.settle()  # it will add up where its last sums lie
                    if isinstance(told, Dropped) and self._office.returns and not told.again:
                        self._note_behind(executor, told.turn.round + 1)
                    self._posts[executor].put(ToldMessage(run=self._run, told=told))
                case Merge(executor=executor):
                    self._intake.merge(executor)
                    if executor in self._behind:
                        self._behind.remove(executor)
                        self._note(f"site {executor} is in time again")
                case Ignore(executor=executor):
                    self._intake.ignore(executor)
                case Dismiss(executor=executor, reason=reason):
                    self._note(f"executor {executor} {reason}: dismissed")
                    self._dismiss(executor)
                case Absorb():
                    self._server.absorb()
                    self._intake.settle()
                case Commit(record=record):
                    if (later := self._committed(record, self._measure())) is not None:
                        self._later.append(later)
                case Halt():
                    for out in self._reachable():
                        out.put(HaltMessage(run=self._run))
                case Finish():
                    finish = instruction
        return finish

    def _open(self, turn: Turn) -> None:
        if turn == self._turn:
            return
        self._intake.settle()  # of an attempt that was dropped
        if turn.attempt and (self._turn is None or turn.attempt != self._turn.attempt):
            self._note(f"round {turn.round + 1} is tried again")
        if self._turn is None or turn.round != self._turn.round:
            self._opened_s = time.monotonic()
        told = self._server.broadcast()
        lie = None if self._office.board is None else self._office.board.put(told)
        self._turn, self._told, self._lie = turn, told if lie is None else {}, lie or ()

    def _measure(self) -> RoundMeasure:
        """Since the round before."""
        sent, received = self.bytes()
        sent, received = sent + self._shown_bytes, received + self._intake.shared_bytes
        counts = (sent, received, self._intake.trips, self._intake.value_bytes)
        before, self._counted = self._counted, counts
        sent, received, trips, value_bytes = (now - then for now, then in zip(counts, before, strict=True))
        seconds = time.monotonic() - self._opened_s
        return RoundMeasure(
            seconds=seconds, opened_at_s=time.time() - seconds, sent_bytes=sent, received_bytes=received, trips=trips,
            value_bytes=value_bytes,
        )  # fmt: skip
