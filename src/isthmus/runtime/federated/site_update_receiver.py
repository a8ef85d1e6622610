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
from isthmus.programs.masked import TakeMasksOff
from isthmus.protocol.federated_messages import NONE, ExecutorJoined, ExecutorReport, PhaseId, SumsSent, TasksReturned
from isthmus.runtime.federated.update_receiver import check_frame, unmasked
from isthmus.runtime.messages.all_messages import AnyMessage
from isthmus.runtime.messages.federated import SentValues, SiteValues, TaskMessage

SLACK = 2  # an update so many times too large is received, to be refused by name; a larger one ends the connection
SLACK_BYTES = 1 << 16


class SiteUpdateReceiver:
    """An `UpdateReceiver`. `note` gets every update that does not count, with its sender and the reason."""

    values: type[SentValues] = SiteValues  # the type of the values that sites send

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
        self._figures: dict[int, dict[str, Mapping[str, float]]] = {}
        most = max(sum(math.prod(f.shape) * f.dtype.itemsize for f in forms.values()) for forms in server.forms)
        self._most_bytes = SLACK * most + SLACK_BYTES
        self.prepare()

    def prepare(self) -> None:
        """For a subclass."""

    def guard(self, executor: str, message: AnyMessage) -> None:
        check_frame(message, self.values)
        size_bytes = sum(h.nbytes for h in message.tensors)
        if size_bytes > self._most_bytes:
            raise PeerError(f"sent {size_bytes} bytes of values, expected at most {self._most_bytes}")

    def hello(self, executor: str) -> AnyMessage | None:
        self._samples.pop(executor, None)  # it has a new connection, on which it joins
        return TaskMessage(run=self._run, task_spec=self._offer(self._clients[executor]))

    def on_report(
        self, executor: str, report: ExecutorReport, values: SentValues | None, tensors: dict[str, Tensor]
    ) -> ExecutorReport:
        if isinstance(report, ExecutorJoined):
            if report.samples is None:
                raise PeerError("joined without its number of samples")
            if executor in self._samples:
                raise PeerError(f"joined again, with {report.samples} samples, on one connection")
            most = self._offer(self._clients[executor]).aggregation.most_samples
            if most is not None and report.samples != most:
                raise PeerError(
                    f"joined with {report.samples} samples, expected {most}: federated.aggregation.most_samples"
                )
            self._samples[executor] = report.samples
            self._note(f"site {executor} takes part with {'' if most is None else 'at most '}{report.samples} samples")
        elif executor not in self._samples:
            raise PeerError(f"sent {type(report).__name__} before it had joined")
        elif isinstance(report, TasksReturned):
            raise PeerError("gave back clients, which no site is asked for")
        elif isinstance(report, SumsSent) and isinstance(values, self.values):
            self.trips += 1
            self.value_bytes += sum(t.nbytes for t in tensors.values())
            return self._keep(executor, report, values, tensors)
        return report

    def _check_of(self, executor: str, sums: SumsSent, client: int, samples: int) -> None:
        """PeerError for an update that is not of the site's client."""
        if [(t.client, t.samples) for t in sums.timed] != [(client, samples)] or sums.refused:
            raise PeerError(f"sent an update that is not of client {client} with {samples} samples")
        keeps, round_ = self._server.keeps, sums.phase.round
        may = {round_} if keeps and self._server.passes == 1 else {round_, NONE} if keeps else {NONE}
        if (state := sums.timed[0].state) not in may:
            raise PeerError(f"sent an update with state {state}, expected {' or '.join(map(str, sorted(may)))}")

    def _keep(self, executor: str, sums: SumsSent, values: SentValues, tensors: dict[str, Tensor]) -> SumsSent:
        """Keep an update that counts. Of one that is refused, the machine learns that."""
        assert isinstance(values, SiteValues), "the frame was checked"
        update = ClientUpdate(values=tensors, weight=values.weight)
        client, samples, phase = self._clients[executor], self._samples[executor], sums.phase
        self._check_of(executor, sums, client, samples)
        late = self._rounds_late(executor, phase)
        if late is not None:
            try:
                steps = self._offer(client).local.steps(samples)
                admitted = self._server.admit(update, samples, self._rules, steps)
            except PeerError as e:
                self._note(f"site {executor}: its update of round {phase.round + 1} is refused: {e}")
                return SumsSent(phase=phase, timed=(), refused=(refusal_of(client, e),))
            self._updates[executor] = staleness_weight(admitted, late)
            if values.figures and not late:
                self._figures.setdefault(phase.round, {})[executor] = values.figures
        return sums

    def merge(self, executor: str) -> None:
        update = self._updates.pop(executor, None)
        if update is not None:
            self._server.partial.fold(self._clients[executor], update, self._samples[executor])

    def take_figures(self, round_: int) -> dict[str, Mapping[str, float]]:
        """Return each site's figures of its own data in the round; those of earlier rounds are forgotten."""
        found = self._figures.pop(round_, {})
        self._figures = {number: figures for number, figures in self._figures.items() if number > round_}
        return found

    def settle(self) -> None:
        """An update is read when it is taken in."""

    def unmask(self, recovered: TakeMasksOff) -> frozenset[tuple[str, str]]:
        unmasked(recovered)

    def ignore(self, executor: str) -> None:
        self._updates.pop(executor, None)
        self._note(f"site {executor}: sent an update when none was due: it is ignored")
