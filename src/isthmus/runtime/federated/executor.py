"""An executor's process: joins the coordinator of a federated run, trains the clients that it is told to.

Model and algorithm are of this machine: code does not come over a link.

The main thread trains. Another receives, and answers what must not wait for a client to end: a recall. The clients of a
brief turn are trained by the one that receives it: the other takes as long to wake up as a small client takes to train.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections import deque
from collections.abc import Callable

from torch import Tensor

from isthmus.errors import IsthmusError, PeerError, StepError, UserError
from isthmus.federated.worksite import Worksite
from isthmus.protocol.federated_events import (
    Begin,
    ExecutorEvent,
    Forget,
    Halted,
    SendSums,
    Stop,
    Task,
    TellDrained,
    TellReturned,
    Train,
    Trained,
)
from isthmus.protocol.federated_events import Told as Said
from isthmus.protocol.federated_executor import FederatedExecutor
from isthmus.runtime.federated.shared_values import Shared
from isthmus.runtime.messages.federated import (
    DrainedMessage,
    ReturnedMessage,
    SumsMessage,
    ToldMessage,
    TurnMessage,
)
from isthmus.runtime.messages.run import Failed, HaltMessage, Heartbeat, Join, ReadyMessage
from isthmus.runtime.transport.channel import SocketChannel, dial
from isthmus.runtime.transport.post import SWITCH_S, Post, headers_of

Told = dict[str, Tensor]
Act = tuple[Begin, Told] | tuple[Train, tuple[Task, ...]] | SendSums | Forget


class Executor:
    """The machine's driver. Two threads act, never both at once."""

    def __init__(
        self, site: Worksite, channel: SocketChannel, post: Post, run: str, patience_s: float, together: int,
        shared: Shared | None = None,
    ) -> None:  # fmt: skip
        """Without `shared` memory all values are sent."""
        self.machine = FederatedExecutor(together)
        self.site = site
        self._channel = channel
        self._post = post
        self._run = run
        self._patience_s = patience_s
        self._deciding = threading.Lock()
        self._acting = threading.Lock()
        self._acts: deque[Act] = deque()
        self._bell: queue.SimpleQueue[Exception | Stop | None] = queue.SimpleQueue()
        """Wakes the main thread: there are acts, or it is over."""
        self._told: Told = {}
        self._shared = shared
        if shared is not None:
            site.add_up_in(shared.room.totals)

    def run(self) -> None:
        """Until halted. Raises what ended the connection, or training."""
        threading.Thread(target=self._listen, name="receive from coordinator", daemon=True).start()
        while not isinstance(rung := self._bell.get(), Stop):
            if rung is not None:
                raise rung
            with self._acting:
                self._work_off()
        self._post.flush()

    def _work_off(self) -> None:
        """Whoever calls it holds the lock."""
        while self._acts:
            match act := self._acts.popleft():
                case (Begin(opening=opening), told):
                    self.site.open(opening, told)
                case (Train(turn=turn), _) if not self.machine.works_for(turn):
                    self._handle(Trained(turn=turn, timed=()))  # dropped while a client of an earlier turn was trained
                case (Train(turn=turn, tasks=tasks), upcoming):
                    self.site.expect((*tasks, *upcoming))
                    if self._shared is not None:
                        self._shared.room.wait(self._patience_s)
                    timed, refused = self.site.train(tasks)
                    self._handle(Trained(turn=turn, timed=timed, refused=refused))
                case SendSums():
                    self._send_sums(act)
                case Forget(kept=kept):
                    self.site.forget(kept)

    def _act(self, brief: bool) -> None:
        """In the thread that receives: what there is to do now, by itself or by the main thread."""
        if not brief or not self._acting.acquire(blocking=False):  # the other still trains for a turn before
            self._bell.put(None)
            return
        try:
            self._work_off()
        finally:
            self._acting.release()

    def _listen(self) -> None:
        try:
            while (received := self._channel.receive(idle_s=self._patience_s)) is not None:
                message, tensors = received
                match message:
                    case TurnMessage(opened=opened):
                        self._told = {h.name: t for h, t in zip(message.tensors, tensors, strict=True)}
                        if self._shared is not None:
                            self._told |= self._shared.board.get(message.lie)
                        self._handle(opened)
                        self._act(opened.brief)
                    case ToldMessage(told=told):
                        self._heed(told)
                        self._handle(told)
                        self._act(brief=False)
                    case HaltMessage():
                        self._handle(Halted())
                        return
                    case _:
                        pass
            self._bell.put(PeerError("coordinator: closed the connection"))
        except Exception as e:  # the main thread decides
            self._bell.put(e)

    def _heed(self, told: Said) -> None:
        """For people: executors of one machine have none of their own."""

    def _handle(self, event: ExecutorEvent) -> None:
        """From both threads: one event at a time, answers at once, everything else to who acts, in order."""
        with self._deciding:
            for instruction in self.machine.handle(event):
                match instruction:
                    case TellDrained(turn=turn):
                        self._post.put(DrainedMessage(run=self._run, turn=turn))
                    case TellReturned(turn=turn, tasks=tasks):
                        self._post.put(ReturnedMessage(run=self._run, turn=turn, tasks=tasks))
                    case Begin():
                        self._acts.append((instruction, self._told))
                    case Train():
                        self._acts.append((instruction, self.machine.upcoming))
                    case SendSums() | Forget():
                        self._acts.append(instruction)
                    case Stop():
                        self._bell.put(instruction)

    def _send_sums(self, act: SendSums) -> None:
        partial = self.site.partial
        tensors, lent = partial.tensors(), None
        if self._shared is not None and (bounds := partial.bounds()):
            lent = bounds
            tensors = {name: tensor for name, tensor in tensors.items() if name not in lent}
        self.site.hand_over()  # the last state is written while bounds are looked for
        if self._shared is not None and lent is not None:
            self._shared.room.lend()
        self._post.put(
            SumsMessage(
                run=self._run, turn=act.turn, timed=act.timed, refused=act.refused, weights=partial.weights(),
                lent=lent, tensors=headers_of(tensors),
            ),
            list(tensors.values()),
        )  # fmt: skip
        self._post.flush()  # the sums' memory is used again
        self.site.clear()


def serve(
    address: str, name: str, run: str, prepare: Callable[[], Worksite], patience_s: float, together: int,
    shared: Shared | None = None,
) -> None:  # fmt: skip
    """Join the coordinator at HOST:PORT, train until halted. What goes wrong is told to it before it is raised."""
    sys.setswitchinterval(SWITCH_S)
    host, _, port = address.rpartition(":")
    channel = dial(host, int(port), "coordinator", patience_s)

    def act(post: Post) -> None:
        site = prepare()
        post.put(ReadyMessage(run=run))
        Executor(site, channel, post, run, patience_s, together, shared).run()

    take_part(channel, name, run, patience_s, act)


def take_part(channel: SocketChannel, name: str, run: str, patience_s: float, act: Callable[[Post], None]) -> None:
    """Join a run over a connection, and act while heartbeats are sent. What goes wrong is told before it is raised."""
    post = Post(channel, on_error=lambda _: channel.close())
    post.put(Join(run=run, device=name, host="", port=0))
    over = threading.Event()
    threading.Thread(target=_beat, args=(post, run, patience_s / 4, over), name="heartbeat", daemon=True).start()
    try:
        act(post)
    except Exception as e:
        jobs = isinstance(e, UserError | StepError)
        fault = "user" if jobs else "other" if isinstance(e, PeerError) else "device"
        reason = str(e) if isinstance(e, IsthmusError) else f"{type(e).__name__}: {e}"
        post.put(Failed(run=run, reason=" ".join(reason.split())[:500], fault=fault))
        raise
    finally:
        over.set()
        post.flush()
        channel.close()


def _beat(post: Post, run: str, every_s: float, over: threading.Event) -> None:
    beat = Heartbeat(run=run)
    while not over.wait(every_s):
        post.put(beat)
