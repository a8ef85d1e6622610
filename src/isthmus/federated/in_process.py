"""A federated run in one process: the coordinator and any number of executors, stepped in turn.

How one executor runs, with nobody to share the work with: messages between two processes take as long as a few small
clients train. Also the SP scheme, and what tests compare everything else with. `pick` decides which executor acts next,
so that any interleaving of a distributed run can be played. Deadlines are looked at between two pieces of work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

from isthmus.errors import InternalError
from isthmus.federated.client_trainer import ClientTrainer
from isthmus.federated.server import Server
from isthmus.protocol.federated_coordinator import FederatedCoordinator
from isthmus.protocol.federated_events import (
    BeginPhase,
    CommitRound,
    CoordinatorEvent,
    DismissExecutor,
    ExecutorEvent,
    FinishRounds,
    ForgetPhase,
    IgnoreSums,
    MergeSums,
    Notify,
    PlanRound,
    RoundPlanned,
    RoundRecord,
    RunInterrupted,
    StopExecutor,
    TasksTrained,
    Tick,
    TrainTasks,
    UnmaskSums,
    UpdateServer,
)
from isthmus.protocol.federated_executor import ExecutorMachine
from isthmus.protocol.federated_messages import (
    ExecutorDrained,
    ExecutorJoined,
    PhaseOpened,
    SumsSent,
    TasksReturned,
)
from isthmus.protocol.federated_planning import plan_round
from isthmus.protocol.machine import FromDevice
from isthmus.protocol.run_messages import Halt

TICK_S = 0.25


class _ExecutorSlot:
    """An executor: its machine, its client trainer, and what waits for it."""

    def __init__(self, name: str, site: ClientTrainer, clients_per_vmap: int) -> None:
        self.name = name
        self.site = site
        self.machine = ExecutorMachine(clients_per_vmap)
        self.inbox: deque[ExecutorEvent] = deque()
        self.work: deque[TrainTasks] = deque()

    def drop_work(self) -> None:
        """The machine has forgotten what is to be trained."""
        self.inbox.extend(TasksTrained(phase=train.phase, timed=()) for train in self.work)
        self.work.clear()


class InProcess:
    """Runs to the end in the calling thread."""

    def __init__(
        self,
        machine: FederatedCoordinator,
        server: Server,
        sites: Mapping[str, ClientTrainer],
        *,
        committed: Callable[[RoundRecord], None] = lambda _: None,
        pick: Callable[[Sequence[str]], int] = lambda ready: 0,
        clients_per_vmap: int = 1,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """Without a `clock`, in seconds, no time passes."""
        self.machine = machine
        self.server = server
        self._slots = {name: _ExecutorSlot(name, site, clients_per_vmap) for name, site in sites.items()}
        self._committed = committed
        self._pick = pick
        self._clock = clock
        self._looked_s = clock()
        self._interrupted = False
        self.trips = self.broadcast_bytes = self.value_bytes = 0
        """What passed between coordinator and executors so far: sums (messages and bytes), and broadcasts."""

    def interrupt(self) -> None:
        """The open round is dropped and the run ends, once the work that is under way is done."""
        self._interrupted = True

    def run(self) -> FinishRounds:
        """Events come of executors and of the clock: the run ends when no executor has anything left to do."""
        finish = self._decide(Tick(now_s=self._looked_s))  # deadlines count from a phase's opening
        for name in self._slots:
            finish = self._decide(FromDevice(name, ExecutorJoined())) or finish
        while finish is None:
            ready = [name for name, slot in self._slots.items() if slot.inbox or slot.work]
            if not ready:
                raise InternalError("federated: nobody has anything to do, and the run is not over")
            finish = self._act(self._slots[ready[self._pick(ready)]]) or self._look()
        return finish

    def _look(self) -> FinishRounds | None:
        """At the clock, and whether somebody wants it to end."""
        if self._interrupted:
            return self._decide(RunInterrupted())
        now_s = self._clock()
        if now_s - self._looked_s < TICK_S:
            return None
        self._looked_s = now_s
        return self._decide(Tick(now_s=now_s))

    def _act(self, slot: _ExecutorSlot) -> FinishRounds | None:
        """One thing: an event that waits, else one piece of work."""
        if slot.inbox:
            return self._answer(slot, slot.inbox.popleft())
        train = slot.work.popleft()
        timed, refused = slot.site.train(train.tasks)
        return self._answer(slot, TasksTrained(phase=train.phase, timed=timed, refused=refused))

    def _answer(self, slot: _ExecutorSlot, event: ExecutorEvent) -> FinishRounds | None:
        finish = None
        for instruction in slot.machine.handle(event):
            match instruction:
                case BeginPhase(opening=opening):
                    slot.drop_work()
                    broadcast = self.server.broadcast()
                    self.broadcast_bytes += sum(value.nbytes for value in broadcast.values())
                    slot.site.open(opening, broadcast)
                case TrainTasks():
                    slot.work.append(instruction)
                case ForgetPhase(kept=kept):
                    slot.drop_work()
                    slot.site.forget(kept)
                case ExecutorDrained() | TasksReturned():
                    finish = self._decide(FromDevice(slot.name, instruction)) or finish
                case SumsSent():
                    slot.site.hand_over()
                    finish = self._decide(FromDevice(slot.name, instruction)) or finish
                    self.server.settle()  # the executor's memory is its own again
                    slot.site.clear()
                case StopExecutor():
                    pass
        return finish

    def _decide(self, event: CoordinatorEvent) -> FinishRounds | None:
        for instruction in self.machine.handle(event):
            match instruction:
                case Notify(executor=executor, body=body):
                    if isinstance(body, PhaseOpened):
                        self.server.open(body.opening)
                    self._slots[executor].inbox.append(body)
                case PlanRound(problem=problem):
                    return self._decide(RoundPlanned(plan_round(problem)))
                case MergeSums(executor=executor):
                    partial = self._slots[executor].site.partial
                    sums = partial.tensors()
                    self.trips += bool(sums)
                    self.value_bytes += sum(value.nbytes for value in sums.values())
                    self.server.merge(sums, partial.weights(), partial.bounds())
                case UpdateServer(opening=opening):
                    if opening is not None:
                        self.server.open(opening)
                    self.server.absorb()
                case CommitRound(record=record):
                    self._committed(record)
                case FinishRounds():
                    return instruction
                case DismissExecutor(executor=executor, reason=reason):
                    raise InternalError(f"federated: {executor} {reason}")
                case UnmaskSums(phase=phase):
                    raise InternalError(f"federated: round {phase.round + 1}: sums in one process are not masked")
                case IgnoreSums() | Halt():
                    pass
        return None
