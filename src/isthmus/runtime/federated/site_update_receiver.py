"""Updates of sites: each is one client's, and is checked by itself before it is folded in."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from torch import Tensor

from isthmus.errors import PeerError
from isthmus.federated.admission import AdmissionRules, refusal_of
from isthmus.federated.algorithms import ClientUpdate
from isthmus.federated.server import Server
from isthmus.federated.stale_models import staleness_weight
from isthmus.federated.task_spec import TaskSpec
from isthmus.protocol.federated_events import (
    ClientTime,
    CoordinatorEvent,
    ExecutorDrained,
    ExecutorJoined,
    PhaseId,
    SumsSent,
)
from isthmus.protocol.run_messages import DeviceFailed
from isthmus.runtime.messages.all_messages import AnyMessage
from isthmus.runtime.messages.federated import DrainedMessage
from isthmus.runtime.messages.run import Heartbeat, content
from isthmus.runtime.messages.site import RegisteredMessage, TaskMessage, UpdateMessage

SLACK = 2
"""An update so many times too large is received, to be refused by name; a larger one ends the connection."""
SLACK_BYTES = 1 << 16


class SiteUpdateReceiver:
    """As `UpdateReceiver`. `note` gets every update that does not count, with its sender and the reason."""

    def __init__(
        self,
        server: Server,
        clients: Mapping[str, int],
        task_spec: Callable[[int], TaskSpec],
        rules: AdmissionRules,
        run: str,
        note: Callable[[str], None],
        *,
        rounds_late: Callable[[str, PhaseId], int | None],
    ) -> None:
        """`clients` are the sites' numbers; `task_spec` says what a client is asked to do; `rounds_late` is the
        coordinator's: late updates are scaled down."""
        self.trips = self.value_bytes = self.shared_bytes = 0
        self._server = server
        self._clients = clients
        self._offer = task_spec
        self._rules = rules
        self._run = run
        self._note = note
        self._rounds_late = rounds_late
        self._samples: dict[str, int] = {}
        self._updates: dict[str, ClientUpdate] = {}
        most = max(sum(math.prod(f.shape) * f.dtype.itemsize for f in forms.values()) for forms in server.forms)
        self._most_bytes = SLACK * most + SLACK_BYTES

    def guard(self, executor: str, message: AnyMessage) -> None:
        said = content(message)
        if not isinstance(said, RegisteredMessage | UpdateMessage | DrainedMessage | DeviceFailed | Heartbeat):
            raise PeerError(f"sent {type(said).__name__} to the coordinator")
        size_bytes = sum(h.nbytes for h in message.tensors)
        allowed = self._most_bytes if isinstance(message, UpdateMessage) else 0
        if size_bytes > allowed:
            raise PeerError(f"sent {size_bytes} bytes of values, expected at most {allowed}")

    def hello(self, executor: str) -> AnyMessage | None:
        return TaskMessage(run=self._run, task_spec=self._offer(self._clients[executor]))

    def on_message(self, executor: str, message: AnyMessage, tensors: list[Tensor]) -> CoordinatorEvent | None:
        client = self._clients[executor]
        match message:
            case RegisteredMessage(samples=samples):
                self._samples[executor] = samples
                self._note(f"site {executor} takes part with {samples} samples")
                return ExecutorJoined(executor=executor, client=client, samples=samples)
            case DrainedMessage(phase=phase) if executor in self._samples:
                return ExecutorDrained(executor=executor, phase=phase)
            case UpdateMessage() if executor in self._samples:
                self.trips += 1
                self.value_bytes += sum(h.nbytes for h in message.tensors)
                named = {h.name: t for h, t in zip(message.tensors, tensors, strict=True)}
                return self._update(executor, message, ClientUpdate(values=named, weight=message.weight))
            case _:
                raise PeerError(f"sent {type(message).__name__} before it was registered")

    def _update(self, executor: str, message: UpdateMessage, update: ClientUpdate) -> SumsSent:
        client, samples, phase = self._clients[executor], self._samples[executor], message.phase
        late = self._rounds_late(executor, phase)
        if late is not None:
            try:
                admitted = self._server.admit(update, samples, self._rules)
            except PeerError as e:
                self._note(f"site {executor}: its update of round {phase.round + 1} is refused: {e}")
                return SumsSent(executor=executor, phase=phase, timed=(), refused=(refusal_of(client, e),))
            self._updates[executor] = staleness_weight(admitted, late)
        timed = ClientTime(client, samples, message.seconds, message.state, message.renewed)
        return SumsSent(executor=executor, phase=phase, timed=(timed,))

    def merge(self, executor: str) -> None:
        update = self._updates.pop(executor, None)
        if update is not None:
            self._server.fold(self._clients[executor], update, self._samples[executor])

    def settle(self) -> None:
        """An update is read when it is taken in."""

    def ignore(self, executor: str) -> None:
        self._updates.pop(executor, None)
        self._note(f"site {executor}: sent an update when none was due: it is ignored")
