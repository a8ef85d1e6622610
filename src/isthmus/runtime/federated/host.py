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
from isthmus.protocol.deadlines import Deadlines, Waits
from isthmus.protocol.federated_coordinator import FederatedCoordinator
from isthmus.protocol.federated_events import (
    CommitRound,
    CoordinatorEvent,
    CoordinatorInstruction,
    DismissExecutor,
    ExecutorLost,
    FinishRounds,
    IgnoreSums,
    MergeSums,
    Notify,
    PhaseUnderWay,
    PlanRound,
    RoundPlanned,
    RoundRecord,
    RunInterrupted,
    Tick,
    UpdateServer,
)
from isthmus.protocol.federated_messages import PhaseDropped, PhaseId, PhaseOpened, TasksGranted
from isthmus.protocol.federated_planning import plan_round
from isthmus.protocol.machine import FromDevice
from isthmus.protocol.run_messages import DeviceFailed, Halt
from isthmus.runtime.federated.shared_memory import SharedBroadcast
from isthmus.runtime.federated.update_receiver import UpdateReceiver
from isthmus.runtime.messages.all_messages import AnyMessage
from isthmus.runtime.messages.federated import FromExecutor, ToExecutor
from isthmus.runtime.messages.run import JoinRun
from isthmus.runtime.processes.signals import Stop
from isthmus.runtime.transport.acceptor import Acceptor, ReceivedMessage
from isthmus.runtime.transport.channel import SocketChannel
from isthmus.runtime.transport.message_sender import SWITCH_S, MessageSender, headers_of, start_heartbeats
from isthmus.training.layout import TensorHeader

TICK_S = 0.25
EXIT_TICK_S = 0.01
EXIT_GRACE_S = 0.5
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


def ended(finish: FinishRounds) -> FinishRounds:
    """How a run ended that is done or interrupted; PeerError and Diverged where it could not go on."""
    if finish.outcome == "diverged":
        raise Diverged(finish.reason)
    if finish.outcome == "lost":
        raise PeerError(finish.reason)
    return finish


class MessageOutput(Protocol):
    """A connection's way out, for one thread."""

    def put(self, message: AnyMessage, tensors: Sequence[Tensor] = ()) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


def direct_output(channel: SocketChannel, timeout_s: float, fail: Callable[[Exception], None]) -> MessageOutput:
    """Messages are sent at once: a process of this machine takes them."""
    return MessageSender(channel, fail)


class ConnectionPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """How the coordinator and its executors talk. The default is for processes of this machine."""

    run: str
    timeout_s: float
    acceptor: type[Acceptor] = Acceptor
    out: Callable[[SocketChannel, float, Callable[[Exception], None]], MessageOutput] = direct_output
    """(channel, timeout in seconds, callback for an error) -> the output for messages to the executor."""
    exit_grace_s: float = EXIT_GRACE_S
    broadcast_memory: SharedBroadcast | None = None
    """Where executors of this machine read the broadcast."""
    may_reconnect: bool = False
    """A lost executor may come back: an executor's failure does not end the run."""


class FederatedHost:
    """Runs the machine over the connections that its acceptor hands on.

    What an executor says is acted on by the thread that receives it, one at a time: another thread would first have to
    wake up, which takes as long as to decide. The thread that calls `coordinate` looks at the clock.
    """

    def __init__(
        self,
        machine: FederatedCoordinator,
        server: Server,
        receiver: UpdateReceiver,
        policy: ConnectionPolicy,
        *,
        committed: Callable[[RoundRecord, RoundMeasure], Callable[[], None] | None],
        note: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`committed` is called before the next round opens, and what it returns once executors are at work on that
        one. `note` receives a line for each lost executor."""
        self._machine = machine
        self._server = server
        self._receiver = receiver
        self._policy = policy
        self._run, self._timeout_s = policy.run, policy.timeout_s
        self._committed = committed
        self._note = note
        self._deciding = threading.Lock()
        self._begun = threading.Event()
        self._ended: Callable[[], Mapping[str, str]] = dict
        self._bell: queue.SimpleQueue[RunInterrupted | None] = queue.SimpleQueue()
        """Wakes the thread in `coordinate`: for Ctrl-C, and at the end. A signal may put where it could not lock."""
        self._joining = Waits(note)
        self._deadlines = Deadlines(self._timeout_s, 0.0, note)
        self._senders: dict[str, MessageOutput] = {}
        self._reasons: dict[str, str] = {}
        """Why executors were lost that are not back."""
        self._behind: set[str] = set()
        """Sites whose last round ended without them."""
        self._left: set[str] = set()
        """Of them, those that are lost."""
        self._channels: list[SocketChannel] = []
        self._ending: dict[str, tuple[str, float]] = {}
        """Executors whose connection closed: why, and how long to wait for their process's exit."""
        self._dismissed: set[str] = set()
        """Whom we have hung up on, until their connection is seen to end."""
        self._phase_id: PhaseId | None = None
        self._broadcast: Mapping[str, Tensor] = {}
        self._in_shared_memory: tuple[TensorHeader, ...] = ()
        self._shown_bytes = 0
        self._opened_s = 0.0
        self._counted = (0, 0, 0, 0)
        self._later: list[Callable[[], None]] = []
        self._finish: FinishRounds | None = None
        self._failure: BaseException | None = None
        self._over = threading.Event()
        self.acceptor = policy.acceptor(
            self._run, machine.executors, on_message=self._on_message, guard=receiver.guard, timeout_s=self._timeout_s
        )
        """Takes the executors' connections."""

    def coordinate(self, ended: Callable[[], Mapping[str, str]] = dict, stop: Stop | None = None) -> FinishRounds:
        """Run to the end. `ended` returns, by executor, how the executor's process ended. `stop` drops the open round
        and ends the run. UserError if an executor reports a mistake of the user's.
        """
        self._ended = ended
        start_heartbeats(self._run, self._timeout_s, self._over, self._reachable)
        before_s = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_S)
        try:
            with (stop or Stop()).calls(lambda: self._bell.put(RunInterrupted())):
                finish = self._watch()
            for out in self._senders.values():
                out.flush()
        finally:
            sys.setswitchinterval(before_s)
            self._over.set()
            self.acceptor.close()
        if self._failure is not None:
            raise self._failure
        return finish

    def bytes(self) -> tuple[int, int]:
        """Sent and received so far, whole frames, of all executors."""
        counts = [channel.statistics() for channel in self._channels]
        return sum(c.sent_bytes for c in counts), sum(c.received_bytes for c in counts)

    def _tell_waits(self, now_s: float) -> None:
        joining = self._machine.statistics().phase == "joining"
        missing = set(self._machine.executors) - (self._senders.keys() - self._left) if joining else set[str]()
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
        if self._policy.may_reconnect:
            return []
        if late and (missing := set(self._machine.executors) - self._senders.keys()):
            return [self._lost(min(missing), f"it did not join within {self._timeout_s:g} s")]
        if gone := self._ended().keys() - self._senders.keys():
            return [self._lost(min(gone), "its process ended before it joined")]
        return []

    def _reachable(self) -> list[MessageOutput]:
        return [out for name, out in list(self._senders.items()) if name not in self._left]

    def _watch(self) -> FinishRounds:
        """Until the run is over: look at the clock, and at who is missing."""
        looked_s = time.monotonic()
        join_by_s = looked_s + self._timeout_s
        self._machine.handle(Tick(now_s=looked_s))  # before any phase: deadlines count from its opening
        self._begun.set()
        while self._finish is None:
            events: list[CoordinatorEvent] = []
            with contextlib.suppress(queue.Empty):
                if (rung := self._bell.get(timeout=EXIT_TICK_S if self._ending else TICK_S)) is not None:
                    events.append(rung)
            now_s = time.monotonic()
            with self._deciding:
                events += self._ended_by(now_s)
                if now_s - looked_s >= TICK_S and self._finish is None:
                    looked_s = now_s
                    self._tell_waits(now_s)
                    events.append(Tick(now_s=now_s))
                    events += self._absent(now_s > join_by_s)
                self._decide(events)
        return self._finish

    def _on_message(self, received: ReceivedMessage) -> None:
        """In the thread that receives it."""
        self._begun.wait()
        with self._deciding:
            if self._finish is not None:
                return
            try:
                self._decide(self._translate(received))
            except BaseException as e:  # the thread in `coordinate` raises it
                self._failure = e
                self._end(FinishRounds("lost", str(e)))

    def _decide(self, events: Sequence[CoordinatorEvent]) -> None:
        """The caller holds the lock. Work that can wait until executors have new tasks comes last."""
        for event in events:
            finish = self._step(event)
            if isinstance(event, ExecutorLost) and (finish is None or event.reason not in finish.reason):
                who = "site" if self._policy.may_reconnect else "executor"
                self._note(f"{who} {event.executor} was lost: {event.reason}")
            for act in self._later:
                act()
            self._later.clear()
            if finish is not None:
                self._end(finish)
        if self._failure is not None and self._finish is None:
            self._carry_out([Halt()])
            self._end(FinishRounds("lost", str(self._failure)))

    def _step(self, event: CoordinatorEvent) -> FinishRounds | None:
        instructions = self._machine.handle(event)
        finish = self._carry_out(instructions)
        if any(isinstance(i, Notify) and isinstance(i.body, PhaseOpened) for i in instructions):
            finish = self._step(PhaseUnderWay()) or finish
        return finish

    def _end(self, finish: FinishRounds) -> None:
        self._finish = finish
        self._bell.put(None)

    def _translate(self, received: ReceivedMessage) -> Sequence[CoordinatorEvent]:
        executor, message, tensors = received
        match message:
            case None | Exception():
                if executor in self._dismissed or executor in self._left:  # that is known already
                    self._dismissed.discard(executor)
                    return []
                reason = "its connection closed" if message is None else str(message)
                return self._ends(executor, reason.removeprefix(f"device {executor!r}: "))
            case JoinRun():
                self._welcome(executor)
            case FromExecutor():
                return self._reported(executor, message, tensors)
            case _:  # a heartbeat
                pass
        return []

    def _reported(self, executor: str, message: FromExecutor, tensors: Sequence[Tensor]) -> Sequence[CoordinatorEvent]:
        report = message.body
        if isinstance(report, DeviceFailed):
            if report.fault == "user" and not self._policy.may_reconnect:
                self._failure = UserError(report.reason)
                return []
            return self._ends(executor, report.reason)
        named = {h.name: t for h, t in zip(message.tensors, tensors, strict=True)}
        try:
            return [FromDevice(executor, self._receiver.on_report(executor, report, message.values, named))]
        except PeerError as e:
            self._dismiss(executor)
            return self._ends(executor, str(e))

    def _dismiss(self, executor: str) -> None:
        self._dismissed.add(executor)
        self._left.add(executor)
        self.acceptor.channel(executor).close()

    def _welcome(self, executor: str) -> None:
        channel = self.acceptor.channel(executor)
        self._channels.append(channel)

        def fail(error: Exception) -> None:
            channel.close()  # its receiving thread reports the loss
            if not (self._over.is_set() or executor in self._left):
                self._note(f"executor {executor}: {error}")

        if (former := self._senders.get(executor)) is not None:
            former.close()
        if self._reasons.pop(executor, None) is not None:
            self._note(f"site {executor} is back")
        self._left.discard(executor)
        self._senders[executor] = self._policy.out(channel, self._timeout_s, fail)
        if (hello := self._receiver.hello(executor)) is not None:
            self._senders[executor].put(hello)

    def _ends(self, executor: str, reason: str) -> list[CoordinatorEvent]:
        """Its connection is of no more use. How its process ended says more, and is known a little later."""
        self._left.add(executor)
        if not self._policy.exit_grace_s:
            return [self._lost(executor, reason)]
        self._ending[executor] = reason, time.monotonic() + self._policy.exit_grace_s
        self._bell.put(None)
        return []

    def _ended_by(self, now_s: float) -> list[CoordinatorEvent]:
        """Executors whose process's exit is known, or is not waited for any longer."""
        ended = self._ended() if self._ending else {}
        known = [name for name, (_, until_s) in self._ending.items() if name in ended or now_s >= until_s]
        return [self._lost(name, self._ending.pop(name)[0]) for name in known]

    def _lost(self, executor: str, reason: str) -> ExecutorLost:
        self._left.add(executor)
        self._reasons[executor] = self._ended().get(executor, reason)
        return ExecutorLost(executor=executor, reason=self._reasons[executor])

    def _note_behind(self, site: str, round_: int) -> None:
        if site not in self._behind:
            self._behind.add(site)
            ended = f"round {round_} ended without its update, which is ignored if it comes"
            self._note(f"site {site}: {ended}; rounds do not wait for this site until it is in time again")

    def _carry_out(self, instructions: Sequence[CoordinatorInstruction]) -> FinishRounds | None:
        finish: FinishRounds | None = None
        for instruction in instructions:
            match instruction:
                case Notify(executor=executor, body=PhaseOpened(opening=opening) as body):
                    self._open(opening.phase)
                    self._server.open(opening)
                    headers, in_shared_memory = headers_of(self._broadcast), self._in_shared_memory
                    message = ToExecutor(run=self._run, body=body, in_shared_memory=in_shared_memory, tensors=headers)
                    self._senders[executor].put(message, list(self._broadcast.values()))
                    self._shown_bytes += sum(h.nbytes for h in in_shared_memory)
                case Notify(executor=executor, body=body):
                    if isinstance(body, TasksGranted):
                        self._receiver.settle()  # it will add up where its last sums lie
                    if isinstance(body, PhaseDropped) and self._policy.may_reconnect and not body.again:
                        self._note_behind(executor, body.phase.round + 1)
                    self._senders[executor].put(ToExecutor(run=self._run, body=body))
                case PlanRound(problem=problem):  # a short round's plan is made sooner than another thread wakes up
                    finish = self._step(RoundPlanned(plan_round(problem))) or finish
                case MergeSums(executor=executor):
                    self._receiver.merge(executor)
                    if executor in self._behind:
                        self._behind.remove(executor)
                        self._note(f"site {executor} is in time again")
                case IgnoreSums(executor=executor):
                    self._receiver.ignore(executor)
                case DismissExecutor(executor=executor, reason=reason):
                    self._note(f"executor {executor} {reason}: dismissed")
                    self._dismiss(executor)
                case UpdateServer():
                    self._server.absorb()
                    self._receiver.settle()
                case CommitRound(record=record):
                    if (later := self._committed(record, self._measure())) is not None:
                        self._later.append(later)
                case Halt():
                    for out in self._reachable():
                        out.put(ToExecutor(run=self._run, body=instruction))
                case FinishRounds():
                    finish = instruction
        return finish

    def _open(self, phase: PhaseId) -> None:
        if phase == self._phase_id:
            return
        self._receiver.settle()  # of an attempt that was dropped
        if phase.attempt and (self._phase_id is None or phase.attempt != self._phase_id.attempt):
            self._note(f"round {phase.round + 1} is tried again")
        if self._phase_id is None or phase.round != self._phase_id.round:
            self._opened_s = time.monotonic()
        notice = self._server.broadcast()
        in_shared_memory = None if self._policy.broadcast_memory is None else self._policy.broadcast_memory.put(notice)
        self._phase_id, self._broadcast, self._in_shared_memory = (
            phase,
            notice if in_shared_memory is None else {},
            in_shared_memory or (),
        )

    def _measure(self) -> RoundMeasure:
        """Since the round before."""
        sent, received = self.bytes()
        sent, received = sent + self._shown_bytes, received + self._receiver.shared_bytes
        counts = (sent, received, self._receiver.trips, self._receiver.value_bytes)
        before, self._counted = self._counted, counts
        sent, received, trips, value_bytes = (now - then for now, then in zip(counts, before, strict=True))
        seconds = time.monotonic() - self._opened_s
        return RoundMeasure(
            seconds=seconds,
            opened_at_s=time.time() - seconds,
            sent_bytes=sent,
            received_bytes=received,
            trips=trips,
            value_bytes=value_bytes,
        )
