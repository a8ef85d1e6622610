"""A federated run in one process: the coordinator and any number of executors, stepped in turn.

How one executor runs, with nobody to share the work with: messages between two processes take as long as a few small
clients train. Also the SP scheme, and what tests compare everything else with. `pick` decides which executor acts next,
so that any interleaving of a distributed run can be played. Deadlines are looked at between two pieces of work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

from isthmus.errors import InternalError
from isthmus.federated.server import Server
from isthmus.federated.worksite import Worksite
from isthmus.protocol.federated_coordinator import FederatedCoordinator
from isthmus.protocol.federated_events import (
    Absorb,
    Begin,
    Commit,
    CoordinatorEvent,
    Dismiss,
    Drained,
    ExecutorEvent,
    Finish,
    Forget,
    Halt,
    Ignore,
    Interrupted,
    Joined,
    Merge,
    Open,
    Record,
    Returned,
    SendSums,
    Stop,
    Summed,
    Tell,
    TellDrained,
    TellReturned,
    Tick,
    Train,
    Trained,
)
from isthmus.protocol.federated_executor import FederatedExecutor

TICK_S = 0.25


class _Seat:
    """An executor: its machine, its worksite, and what waits for it."""

    def __init__(self, name: str, site: Worksite, together: int) -> None:
        self.name = name
        self.site = site
        self.machine = FederatedExecutor(together)
        self.inbox: deque[ExecutorEvent] = deque()
        self.work: deque[Train] = deque()

    def drop_work(self) -> None:
        """The machine has forgotten what is to be trained."""
        self.inbox.extend(Trained(turn=train.turn, timed=()) for train in self.work)
        self.work.clear()


class InProcess:
    """Runs to the end in the calling thread."""

    def __init__(
        self,
        machine: FederatedCoordinator,
        server: Server,
        sites: Mapping[str, Worksite],
        *,
        committed: Callable[[Record], None] = lambda _: None,
        pick: Callable[[Sequence[str]], int] = lambda ready: 0,
        together: int = 1,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """Without a `clock`, in seconds, no time passes."""
        self.machine = machine
        self.server = server
        self._seats = {name: _Seat(name, site, together) for name, site in sites.items()}
        self._committed = committed
        self._pick = pick
        self._clock = clock
        self._looked_s = clock()
        self._interrupted = False
        self.trips = self.told_bytes = self.value_bytes = 0
        """What passed between coordinator and executors so far: sums (messages and bytes), and broadcasts."""

    def interrupt(self) -> None:
        """The open round is dropped and the run ends, once the work that is under way is done."""
        self._interrupted = True

    def run(self) -> Finish:
        """Events come of executors and of the clock: the run ends when no executor has anything left to do."""
        finish = self._decide(Tick(now_s=self._looked_s))  # deadlines count from a turn's opening
        for name in self._seats:
            finish = self._decide(Joined(executor=name)) or finish
        while finish is None:
            ready = [name for name, seat in self._seats.items() if seat.inbox or seat.work]
            if not ready:
                raise InternalError("federated: nobody has anything to do, and the run is not over")
            finish = self._act(self._seats[ready[self._pick(ready)]]) or self._look()
        return finish

    def _look(self) -> Finish | None:
        """At the clock, and whether somebody wants it to end."""
        if self._interrupted:
            return self._decide(Interrupted())
        now_s = self._clock()
        if now_s - self._looked_s < TICK_S:
            return None
        self._looked_s = now_s
        return self._decide(Tick(now_s=now_s))

    def _act(self, seat: _Seat) -> Finish | None:
        """One thing: an event that waits, else one piece of work."""
        if seat.inbox:
            return self._answer(seat, seat.inbox.popleft())
        train = seat.work.popleft()
        timed, refused = seat.site.train(train.tasks)
        return self._answer(seat, Trained(turn=train.turn, timed=timed, refused=refused))

    def _answer(self, seat: _Seat, event: ExecutorEvent) -> Finish | None:
        finish = None
        for instruction in seat.machine.handle(event):
            match instruction:
                case Begin(opening=opening):
                    seat.drop_work()
                    told = self.server.broadcast()
                    self.told_bytes += sum(value.nbytes for value in told.values())
                    seat.site.open(opening, told)
                case Train():
                    seat.work.append(instruction)
                case Forget(kept=kept):
                    seat.drop_work()
                    seat.site.forget(kept)
                case TellDrained(turn=turn):
                    finish = self._decide(Drained(executor=seat.name, turn=turn)) or finish
                case TellReturned(turn=turn, tasks=tasks):
                    finish = self._decide(Returned(executor=seat.name, turn=turn, tasks=tasks)) or finish
                case SendSums(turn=turn, timed=timed, refused=refused):
                    seat.site.hand_over()
                    told = Summed(executor=seat.name, turn=turn, timed=timed, refused=refused)
                    finish = self._decide(told) or finish
                    self.server.settle()  # the executor's memory is its own again
                    seat.site.clear()
                case Stop():
                    pass
        return finish

    def _decide(self, event: CoordinatorEvent) -> Finish | None:
        for instruction in self.machine.handle(event):
            match instruction:
                case Open(executor=executor, event=opened):
                    self.server.open(opened.opening)
                    self._seats[executor].inbox.append(opened)
                case Tell(executor=executor, event=told):
                    self._seats[executor].inbox.append(told)
                case Merge(executor=executor):
                    partial = self._seats[executor].site.partial
                    sums = partial.tensors()
                    self.trips += bool(sums)
                    self.value_bytes += sum(value.nbytes for value in sums.values())
                    self.server.merge(sums, partial.weights(), partial.bounds())
                case Absorb():
                    self.server.absorb()
                case Commit(record=record):
                    self._committed(record)
                case Finish():
                    return instruction
                case Dismiss(executor=executor, reason=reason):
                    raise InternalError(f"federated: {executor} {reason}")
                case Ignore() | Halt():
                    pass
        return None
