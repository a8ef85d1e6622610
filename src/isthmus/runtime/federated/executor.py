"""An executor's process: joins the coordinator of a federated run, trains the clients that it is asked to.

Model and algorithm are of this machine: code does not come over a link.

The main thread trains. A second thread receives, and answers recalls, which must not wait for a client to end. It also
trains the clients of a brief phase: waking the main thread takes as long as training a small client.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, TypeVar

from torch import Tensor

from isthmus.errors import PeerError
from isthmus.federated.client_trainer import ClientTrainer
from isthmus.protocol.federated_executor import FederatedExecutor
from isthmus.protocol.federated_messages import (
    ClientTask,
    ExecutorDrained,
    ExecutorJoined,
    ExecutorOrder,
    PhaseId,
    PhaseOpened,
    PhaseSetup,
    SumsSent,
    TasksReturned,
)
from isthmus.protocol.run_messages import Halt
from isthmus.protocol.secure_messages import KeysListed, SecureOrder, SharesDelivered, UnmaskAsked
from isthmus.runtime.federated.shared_memory import SharedMemory
from isthmus.runtime.messages.all_messages import AnyMessage
from isthmus.runtime.messages.federated import (
    FromExecutor,
    StateFileGiven,
    StatesFound,
    SummedValues,
    TaskMessage,
    ToExecutor,
    TrainClients,
)
from isthmus.runtime.messages.run import Heartbeat, JoinRun
from isthmus.runtime.transport.channel import dial
from isthmus.runtime.transport.message_sender import SWITCH_S, MessageSender, headers_of
from isthmus.runtime.transport.reconnection import CoordinatorConnection, OpenConnection, direct, reporting

Broadcast = dict[str, Tensor]
First = TypeVar("First", bound=TrainClients | TaskMessage)


class Executor:
    """The policy's host. Two threads act, never both at once."""

    def __init__(
        self,
        site: ClientTrainer,
        connection: OpenConnection[MessageSender],
        clients_per_vmap: int,
        shared: SharedMemory | None = None,
    ) -> None:
        """Without `shared` memory all values are sent."""
        self.policy = FederatedExecutor(self, clients_per_vmap)
        self.site = site
        self._connection = connection
        self._sender = connection.sender
        self._run = connection.run
        self._deciding = threading.Lock()
        self._acting = threading.Lock()
        self._acts: deque[Callable[[], None]] = deque()
        self._wakeups: queue.SimpleQueue[Exception | Literal["act", "stop"]] = queue.SimpleQueue()
        """Wakes the main thread: there are acts, or it is over."""
        self._broadcast: Broadcast = {}
        self._shared = shared
        if shared is not None:
            site.add_up_in(shared.accumulator.totals)

    def run(self) -> None:
        """Until halted. Raises what ended the connection, or training."""
        threading.Thread(target=self._listen, name="receive from coordinator", daemon=True).start()
        while (wakeup := self._wakeups.get()) != "stop":
            if isinstance(wakeup, Exception):
                raise wakeup
            with self._acting:
                self._work_off()
        self._sender.flush()

    def _work_off(self) -> None:
        """The caller holds the lock."""
        while self._acts:
            self._acts.popleft()()

    def _act(self, brief: bool) -> None:
        """In the thread that receives: what there is to do now, by itself or by the main thread."""
        if not brief or not self._acting.acquire(blocking=False):  # the other still trains for a phase before
            self._wakeups.put("act")
            return
        try:
            self._work_off()
        finally:
            self._acting.release()

    def _listen(self) -> None:
        try:
            self._connection.receive(self._take)
        except Exception as e:  # the main thread decides
            self._wakeups.put(e)

    def _take(self, message: AnyMessage, tensors: Sequence[Tensor]) -> None:
        if not isinstance(message, ToExecutor):  # a heartbeat
            return
        match body := message.body:
            case PhaseOpened(brief=brief):
                broadcast = {h.name: t for h, t in zip(message.tensors, tensors, strict=True)}
                if self._shared is not None:
                    broadcast |= self._shared.broadcast_memory.get(message.in_shared_memory)
                self._on_order(body, broadcast)
                self._broadcast = broadcast
                self._order(body)
                self._act(brief)
            case Halt():
                self._order(body)
            case StatesFound() | StateFileGiven():
                self.states_came(body, tensors)
            case KeysListed() | SharesDelivered() | UnmaskAsked():
                self._on_order(body, {})
            case _:
                self._on_order(body, {})
                self._order(body)
                self._act(brief=False)

    def _on_order(self, order: ExecutorOrder | SecureOrder, broadcast: Broadcast) -> None:
        """Before the policy: executors of one machine have no use for it."""

    def states_came(self, answer: StatesFound | StateFileGiven, tensors: Sequence[Tensor]) -> None:
        """An answer about states of clients."""
        raise PeerError(f"coordinator: sent {type(answer).__name__}, which was not asked for")

    def _order(self, order: ExecutorOrder | Halt) -> None:
        with self._deciding:
            self.policy.ordered(order)

    # What the policy asks: answers are sent at once, everything else is done in order by the thread that acts

    def begin(self, opening: PhaseSetup) -> None:
        self._acts.append(partial(self.site.open, opening, self._broadcast))

    def train(self, phase: PhaseId, tasks: Sequence[ClientTask]) -> None:
        self._acts.append(partial(self._train, phase, tasks, self.policy.upcoming))

    def answer(self, report: ExecutorDrained | TasksReturned) -> None:
        self._sender.put(FromExecutor(run=self._run, body=report))

    def send_sums(self, sums: SumsSent) -> None:
        self._acts.append(partial(self._send_sums, sums))

    def forget(self, phase: PhaseId, kept: Sequence[int]) -> None:
        self._acts.append(partial(self.site.forget, kept))

    def stop(self) -> None:
        self._wakeups.put("stop")

    def _train(self, phase: PhaseId, tasks: Sequence[ClientTask], upcoming: Sequence[ClientTask]) -> None:
        timed, refused = (), ()
        if self.policy.works_for(phase):  # else it was dropped while a client of an earlier phase was trained
            self.site.expect((*tasks, *upcoming))
            if self._shared is not None:
                self._shared.accumulator.wait(self._connection.timeout_s)
            timed, refused = self.site.train(tasks)
        with self._deciding:
            self.policy.trained(phase, timed, refused)

    def _send_sums(self, sums: SumsSent) -> None:
        own = self.site.partial
        tensors, shared_bounds = own.tensors(), None
        if self._shared is not None and (bounds := own.bounds()):
            shared_bounds = bounds
            tensors = {name: tensor for name, tensor in tensors.items() if name not in shared_bounds}
        self.site.hand_over()  # the last state is written while bounds are looked for
        if self._shared is not None and shared_bounds is not None:
            self._shared.accumulator.publish()
        values = SummedValues(weights=own.weights(), shared_bounds=shared_bounds)
        message = FromExecutor(run=self._run, body=sums, values=values, tensors=headers_of(tensors))
        self._sender.put(message, list(tensors.values()))
        self._sender.flush()  # the sums' memory is used again
        self.site.clear()


def first_message(connection: OpenConnection[MessageSender], kind: type[First], what: str) -> First | None:
    """Wait for what is to be trained; None when the run is over before it began. PeerError for another message."""
    while True:
        message, _ = connection.next()
        if isinstance(message, kind):
            return message
        if isinstance(message, ToExecutor) and isinstance(message.body, Halt):
            return None
        if not isinstance(message, Heartbeat):
            raise PeerError(f"coordinator: sent {type(message).__name__}, expected {what}")


def serve(
    address: str,
    name: str,
    run: str,
    prepare: Callable[[], ClientTrainer],
    timeout_s: float,
    clients_per_vmap: int,
    shared: SharedMemory | None = None,
) -> None:
    """Join the coordinator at HOST:PORT, train until halted. The coordinator receives an error before it is raised."""
    sys.setswitchinterval(SWITCH_S)
    host, _, port = address.rpartition(":")
    channel = dial(host, int(port), "coordinator", timeout_s)

    def act(connection: OpenConnection[MessageSender]) -> None:
        site = prepare()
        connection.sender.put(FromExecutor(run=run, body=ExecutorJoined()))
        Executor(site, connection, clients_per_vmap, shared).run()

    join = JoinRun(run=run, device=name, host="", port=0)
    take_part(CoordinatorConnection(lambda: direct(channel), lambda: join, run=run, timeout_s=timeout_s), act)


def take_part(
    connection: CoordinatorConnection[MessageSender], act: Callable[[OpenConnection[MessageSender]], None]
) -> None:
    """Act over one connection after another. An error is reported to the coordinator, then raised."""

    def reported(opened: OpenConnection[MessageSender]) -> None:
        with reporting(lambda failed: opened.sender.put(FromExecutor(run=opened.run, body=failed))):
            act(opened)

    connection.serve(reported)
