"""A federated run in one process: the coordinator and any number of executors, stepped in turn.

How one executor runs, with nobody to share the work with: messages between two processes take as long as a few small
clients train. Also the SP scheme, and what tests compare everything else with. `pick` decides which executor acts next,
so that any interleaving of a distributed run can be played. Deadlines are looked at between two pieces of work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from isthmus.errors import InternalError
from isthmus.federated.client_trainer import ClientTrainer
from isthmus.federated.server import Server
from isthmus.programs.merging import Finish
from isthmus.programs.open_phase import RoundRecord
from isthmus.programs.rounds import RoundPort, Rounds
from isthmus.protocol.federated_executor import ExecutorPort, FederatedExecutor
from isthmus.protocol.federated_messages import (
    ClientTask,
    ExecutorJoined,
    ExecutorOrder,
    ExecutorReport,
    PhaseId,
    PhaseOpened,
    PhaseReport,
    PhaseSetup,
    SumsSent,
)
from isthmus.session.session import Observation

TICK_S = 0.25


class _ExecutorSlot(ExecutorPort):
    """An executor: its policy, its client trainer, and what waits for it."""

    def __init__(self, name: str, site: ClientTrainer, clients_per_vmap: int, driver: InProcess) -> None:
        self.site = site
        self.policy = FederatedExecutor(self, clients_per_vmap)
        self.inbox: deque[ExecutorOrder | PhaseId] = deque()
        """Orders, and phases whose clients are not trained any more."""
        self.work: deque[tuple[PhaseId, Sequence[ClientTask]]] = deque()
        self._name, self._driver = name, driver

    def take(self, waited: ExecutorOrder | PhaseId) -> None:
        """Take the first of the inbox."""
        if isinstance(waited, PhaseId):
            self.policy.trained(waited, ())
        else:
            self.policy.ordered(waited)

    def train_next(self) -> None:
        phase, tasks = self.work.popleft()
        timed, refused = self.site.train(tasks)
        self.policy.trained(phase, timed, refused)

    def _drop_work(self) -> None:
        self.inbox.extend(phase for phase, _ in self.work)
        self.work.clear()

    # What the policy asks

    def begin(self, opening: PhaseSetup) -> None:
        self._drop_work()
        self.site.open(opening, self._driver.broadcast())

    def train(self, phase: PhaseId, tasks: Sequence[ClientTask]) -> None:
        self.work.append((phase, tasks))

    def answer(self, report: PhaseReport) -> None:
        self._driver.heard(self._name, report)

    def send_sums(self, sums: SumsSent) -> None:
        self.site.hand_over()
        self.answer(sums)
        self._driver.server.settle()  # the executor's memory is its own again
        self.site.clear()

    def forget(self, phase: PhaseId, kept: Sequence[int]) -> None:
        self._drop_work()
        self.site.forget(kept)


class InProcess(RoundPort):
    """Runs to the end in the calling thread. Nobody joins, can be waited for or is lost here."""

    def __init__(
        self,
        machine: Rounds,
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
        machine.port, machine.notes_waits = self, False
        self.server = server
        self._slots = {name: _ExecutorSlot(name, site, clients_per_vmap, self) for name, site in sites.items()}
        self._committed = committed
        self._pick = pick
        self._clock = clock
        self._looked_s = clock()
        self._interrupted = False
        self._finish: Finish | None = None
        self.trips = self.broadcast_bytes = self.value_bytes = 0
        """Traffic between coordinator and executors so far: sums (messages and bytes), and broadcasts."""

    def interrupt(self) -> None:
        """The open round is dropped and the run ends, once the work that is under way is done."""
        self._interrupted = True

    def run(self) -> Finish:
        """Events come of executors and of the clock: the run ends when no executor has anything left to do."""
        self.machine.clock(self._looked_s)  # deadlines count from a phase's opening
        for name in self._slots:
            self.machine.joined(name)
            self.heard(name, ExecutorJoined())
        while self._finish is None:
            ready = [name for name, slot in self._slots.items() if slot.inbox or slot.work]
            if not ready:
                raise InternalError("federated: nobody has anything to do, and the run is not over")
            self._act(self._slots[ready[self._pick(ready)]])
            if self._finish is None:
                self._look()
        return self._finish

    def broadcast(self) -> dict[str, Tensor]:
        found = self.server.broadcast()
        self.broadcast_bytes += sum(value.nbytes for value in found.values())
        return found

    def heard(self, executor: str, report: ExecutorReport) -> None:
        self.machine.heard(executor, report)

    def _look(self) -> None:
        """At the clock, and whether somebody wants it to end."""
        if self._interrupted:
            self.machine.stop()
        elif (now_s := self._clock()) - self._looked_s >= TICK_S:
            self._looked_s = now_s
            self.machine.clock(now_s)
            self.machine.looked(Observation())

    def _act(self, slot: _ExecutorSlot) -> None:
        """One thing: an order that waits, else one piece of work."""
        if slot.inbox:
            slot.take(slot.inbox.popleft())
        else:
            slot.train_next()

    # What the coordinator asks

    def notify(self, executor: str, order: ExecutorOrder) -> None:
        if isinstance(order, PhaseOpened):
            self.server.open(order.opening)
        self._slots[executor].inbox.append(order)

    def merge(self, executor: str, phase: PhaseId) -> None:
        partial = self._slots[executor].site.partial
        sums = partial.tensors()
        self.trips += bool(sums)
        self.value_bytes += sum(value.nbytes for value in sums.values())
        self.server.partial.merge(sums, partial.weights(), partial.bounds())

    def dismiss(self, executor: str, reason: str) -> None:
        raise InternalError(f"federated: {executor} {reason}")

    def update_server(self, phase: PhaseId, opening: PhaseSetup | None = None) -> None:
        if opening is not None:
            self.server.open(opening)
        self.server.absorb()

    def commit(self, record: RoundRecord) -> None:
        self._committed(record)

    def finished(self, finish: Finish) -> None:
        self._finish = finish
