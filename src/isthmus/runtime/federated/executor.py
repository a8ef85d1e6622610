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

from torch import Tensor

from isthmus.errors import IsthmusError, PeerError, StepError, UserError
from isthmus.federated.client_trainer import ClientTrainer
from isthmus.protocol.federated_events import (
    BeginPhase,
    ExecutorEvent,
    ForgetPhase,
    StopExecutor,
    TasksTrained,
    TrainTasks,
)
from isthmus.protocol.federated_executor import ExecutorMachine
from isthmus.protocol.federated_messages import (
    ClientTask,
    ExecutorDrained,
    ExecutorJoined,
    ExecutorOrder,
    PhaseOpened,
    SumsSent,
    TasksReturned,
)
from isthmus.protocol.run_messages import DeviceFailed, Halt
from isthmus.protocol.secure_messages import KeysListed, SecureOrder, SharesDelivered, UnmaskAsked
from isthmus.runtime.federated.shared_memory import SharedMemory
from isthmus.runtime.messages.federated import FromExecutor, SummedValues, ToExecutor
from isthmus.runtime.messages.run import JoinRun
from isthmus.runtime.transport.channel import MessageChannel, dial
from isthmus.runtime.transport.message_sender import SWITCH_S, MessageSender, headers_of, start_heartbeats

Broadcast = dict[str, Tensor]
Act = tuple[BeginPhase, Broadcast] | tuple[TrainTasks, tuple[ClientTask, ...]] | SumsSent | ForgetPhase


class Executor:
    """The machine's driver. Two threads act, never both at once."""

    def __init__(
        self,
        site: ClientTrainer,
        channel: MessageChannel,
        sender: MessageSender,
        run: str,
        timeout_s: float,
        clients_per_vmap: int,
        shared: SharedMemory | None = None,
    ) -> None:
        """Without `shared` memory all values are sent."""
        self.machine = ExecutorMachine(clients_per_vmap)
        self.site = site
        self._channel = channel
        self._sender = sender
        self._run = run
        self._timeout_s = timeout_s
        self._deciding = threading.Lock()
        self._acting = threading.Lock()
        self._acts: deque[Act] = deque()
        self._wakeups: queue.SimpleQueue[Exception | StopExecutor | None] = queue.SimpleQueue()
        """Wakes the main thread: there are acts, or it is over."""
        self._broadcast: Broadcast = {}
        self._shared = shared
        if shared is not None:
            site.add_up_in(shared.accumulator.totals)

    def run(self) -> None:
        """Until halted. Raises what ended the connection, or training."""
        threading.Thread(target=self._listen, name="receive from coordinator", daemon=True).start()
        while not isinstance(wakeup := self._wakeups.get(), StopExecutor):
            if wakeup is not None:
                raise wakeup
            with self._acting:
                self._work_off()
        self._sender.flush()

    def _work_off(self) -> None:
        """The caller holds the lock."""
        while self._acts:
            match act := self._acts.popleft():
                case (BeginPhase(opening=opening), broadcast):
                    self.site.open(opening, broadcast)
                case (TrainTasks(phase=phase), _) if not self.machine.works_for(phase):
                    self._handle(
                        TasksTrained(phase=phase, timed=())
                    )  # dropped while a client of an earlier phase was trained
                case (TrainTasks(phase=phase, tasks=tasks), upcoming):
                    self.site.expect((*tasks, *upcoming))
                    if self._shared is not None:
                        self._shared.accumulator.wait(self._timeout_s)
                    timed, refused = self.site.train(tasks)
                    self._handle(TasksTrained(phase=phase, timed=timed, refused=refused))
                case SumsSent():
                    self._send_sums(act)
                case ForgetPhase(kept=kept):
                    self.site.forget(kept)

    def _act(self, brief: bool) -> None:
        """In the thread that receives: what there is to do now, by itself or by the main thread."""
        if not brief or not self._acting.acquire(blocking=False):  # the other still trains for a phase before
            self._wakeups.put(None)
            return
        try:
            self._work_off()
        finally:
            self._acting.release()

    def _listen(self) -> None:
        try:
            while (received := self._channel.receive(idle_s=self._timeout_s)) is not None:
                message, tensors = received
                if isinstance(message, ToExecutor):  # else a heartbeat
                    self._take(message, tensors)
                    if isinstance(message.body, Halt):
                        return
            self._wakeups.put(PeerError("coordinator: closed the connection"))
        except Exception as e:  # the main thread decides
            self._wakeups.put(e)

    def _take(self, message: ToExecutor, tensors: Sequence[Tensor]) -> None:
        match body := message.body:
            case PhaseOpened(brief=brief):
                broadcast = {h.name: t for h, t in zip(message.tensors, tensors, strict=True)}
                if self._shared is not None:
                    broadcast |= self._shared.broadcast_memory.get(message.in_shared_memory)
                self._on_order(body, broadcast)
                self._broadcast = broadcast
                self._handle(body)
                self._act(brief)
            case Halt():
                self._handle(body)
            case KeysListed() | SharesDelivered() | UnmaskAsked():
                self._on_order(body, {})
            case _:
                self._on_order(body, {})
                self._handle(body)
                self._act(brief=False)

    def _on_order(self, order: ExecutorOrder | SecureOrder, broadcast: Broadcast) -> None:
        """Before the machine: executors of one machine have no use for it."""

    def _handle(self, event: ExecutorEvent) -> None:
        """From both threads: one event at a time, answers at once, everything else to who acts, in order."""
        with self._deciding:
            for instruction in self.machine.handle(event):
                match instruction:
                    case ExecutorDrained() | TasksReturned():
                        self._sender.put(FromExecutor(run=self._run, body=instruction))
                    case BeginPhase():
                        self._acts.append((instruction, self._broadcast))
                    case TrainTasks():
                        self._acts.append((instruction, self.machine.upcoming))
                    case SumsSent() | ForgetPhase():
                        self._acts.append(instruction)
                    case StopExecutor():
                        self._wakeups.put(instruction)

    def _send_sums(self, sums: SumsSent) -> None:
        partial = self.site.partial
        tensors, shared_bounds = partial.tensors(), None
        if self._shared is not None and (bounds := partial.bounds()):
            shared_bounds = bounds
            tensors = {name: tensor for name, tensor in tensors.items() if name not in shared_bounds}
        self.site.hand_over()  # the last state is written while bounds are looked for
        if self._shared is not None and shared_bounds is not None:
            self._shared.accumulator.publish()
        values = SummedValues(weights=partial.weights(), shared_bounds=shared_bounds)
        message = FromExecutor(run=self._run, body=sums, values=values, tensors=headers_of(tensors))
        self._sender.put(message, list(tensors.values()))
        self._sender.flush()  # the sums' memory is used again
        self.site.clear()


def serve(
    address: str,
    name: str,
    run: str,
    prepare: Callable[[], ClientTrainer],
    timeout_s: float,
    clients_per_vmap: int,
    shared: SharedMemory | None = None,
) -> None:
    """`train_over` a connection to the coordinator at HOST:PORT."""
    sys.setswitchinterval(SWITCH_S)
    host, _, port = address.rpartition(":")
    channel = dial(host, int(port), "coordinator", timeout_s)
    train_over(channel, name, run, prepare, timeout_s, clients_per_vmap, shared)


def train_over(
    channel: MessageChannel,
    name: str,
    run: str,
    prepare: Callable[[], ClientTrainer],
    timeout_s: float,
    clients_per_vmap: int,
    shared: SharedMemory | None = None,
) -> None:
    """Join the coordinator, train until halted. The coordinator receives an error before it is raised."""

    def act(sender: MessageSender) -> None:
        site = prepare()
        sender.put(FromExecutor(run=run, body=ExecutorJoined()))
        Executor(site, channel, sender, run, timeout_s, clients_per_vmap, shared).run()

    take_part(channel, name, run, timeout_s, act)


def take_part(
    channel: MessageChannel, name: str, run: str, timeout_s: float, act: Callable[[MessageSender], None]
) -> None:
    """Join a run over a connection, and act while heartbeats are sent. An error is reported to the coordinator, then
    raised."""
    sender = MessageSender(channel, on_error=lambda _: channel.close())
    sender.put(JoinRun(run=run, device=name, host="", port=0))
    over = threading.Event()
    start_heartbeats(run, timeout_s, over, lambda: (sender,))
    try:
        act(sender)
    except Exception as e:
        jobs = isinstance(e, UserError | StepError)
        fault = "user" if jobs else "other" if isinstance(e, PeerError) else "device"
        reason = str(e) if isinstance(e, IsthmusError) else f"{type(e).__name__}: {e}"
        failed = DeviceFailed(reason=" ".join(reason.split())[:500], fault=fault)
        sender.put(FromExecutor(run=run, body=failed))
        raise
    finally:
        over.set()
        sender.flush()
        channel.close()
