"""Drawn integers in the frames between a federated coordinator and its executors, both ways."""

from __future__ import annotations

import contextlib
import copy
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from isthmus.errors import PeerError, UserError
from isthmus.federated import ClientTrainer
from isthmus.federated.algorithms import Algorithm
from isthmus.federated.in_process import InProcess
from isthmus.federated.partial import AggregationWeights
from isthmus.federated.robust import Aggregation, Robust
from isthmus.programs.merging import Finish
from isthmus.programs.open_phase import RoundRecord
from isthmus.programs.rounds import RoundPort
from isthmus.protocol.federated_executor import ExecutorPort, FederatedExecutor
from isthmus.protocol.federated_messages import (
    ClientTask,
    ClientTime,
    ExecutorDrained,
    ExecutorJoined,
    LinearFit,
    PhaseClosed,
    PhaseId,
    PhaseOpened,
    PhaseSetup,
    SumsSent,
    TasksGranted,
    TasksRecalled,
    TasksReturned,
)
from isthmus.protocol.secure_messages import KeysListed, UnmaskAsked
from isthmus.runtime.federated.update_receiver import SumsReceiver
from isthmus.runtime.messages.federated import FromExecutor, SummedValues, ToExecutor
from isthmus.runtime.transport.message_sender import headers_of
from tests.drawn_integers import DRAWN, Lies, landed, received
from tests.federated.drawn_rounds import NAMES, RUN, DrawnRounds, named
from tests.federated.populations import Run, population
from tests.programs.ports import Recorder

pytestmark = pytest.mark.thorough


@pytest.fixture(autouse=True)
def no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients take the time of their samples."""
    train = ClientTrainer.train

    def timed(self: Any, tasks: Sequence[ClientTask]) -> Any:
        found, refused = train(self, tasks)
        return tuple(msgspec.structs.replace(t, seconds=0.001 * t.samples) for t in found), refused

    monkeypatch.setattr(ClientTrainer, "train", timed)


@pytest.mark.parametrize(("algorithm", "secure"), [("scaffold", False), ("mime", True)])
def test_rounds_of_sites_are_those_of_honest_parties(algorithm: str, secure: bool, tmp_path: Path) -> None:
    rounds = max(4, DRAWN // 100)
    frames = rounds * len(NAMES) * 4 if secure else rounds * 2  # two are enough for a round
    lies = Lies(7, frames), Lies(8, frames)
    (tmp_path / "honest").mkdir()
    (tmp_path / "lied").mkdir()
    honest = DrawnRounds(tmp_path / "honest", algorithm, rounds, secure=secure)
    lied = DrawnRounds(tmp_path / "lied", algorithm, rounds, secure=secure, to_coordinator=lies[0], to_sites=lies[1])
    honest.run()
    lied.run()
    assert torch.equal(lied.server.values["model"], honest.server.values["model"])
    assert lied.records == honest.records and len(lied.records) == rounds
    assert lied.told == honest.told
    for one in lies:
        one.told()


@pytest.mark.parametrize("name", ["model", "buffers/other"])
def test_a_model_in_another_form_is_the_coordinators_fault(name: str, tmp_path: Path) -> None:
    """Its frame may be right in itself. No client is trained, and the site's process goes on: its model was right
    before. A first model in another form is this site's own, which leaves."""
    run = DrawnRounds(tmp_path, "fedavg", 1, secure=False)
    run.run()
    site: Any = run.sites["a"]
    site._latest = None
    sent = {"model": run.server.values["model"], name: torch.zeros(7)}
    opening = PhaseSetup(phase=PhaseId(0), clients=1, samples=3)
    opened = ToExecutor(run=RUN, body=PhaseOpened(opening=opening, tasks=(ClientTask(0, 3),)), tensors=headers_of(sent))
    expected = "float64 [53]" if name == "model" else "none"
    with pytest.raises(PeerError, match=re.escape(f"coordinator: sent '{name}' as float32 [7], expected {expected}")):
        site._take(opened, [*sent.values()])
    site._own._same_model, site._latest = False, None
    with pytest.raises(UserError, match=r"expected .*: this site's code makes another model$"):
        site._take(opened, [*sent.values()])


@pytest.mark.parametrize("kind", [TasksGranted, TasksRecalled, PhaseClosed, KeysListed, UnmaskAsked])
def test_what_no_site_is_asked_is_refused(kind: Any, tmp_path: Path) -> None:
    """A site has one client, which comes with the opening: more tasks would train it twice, or send what it has not."""
    run = DrawnRounds(tmp_path, "fedavg", 1, secure=False)
    line = LinearFit(1.0, 1.0)
    more = {
        TasksGranted: {"tasks": (ClientTask(0, 3),)},
        TasksRecalled: {"own": line, "thief": line},
        KeysListed: {"peers": ()},
        UnmaskAsked: {"summed": NAMES, "dropped": ()},
    }
    order = ToExecutor(run=RUN, body=kind(phase=PhaseId(0), **more.get(kind, {})))
    with pytest.raises(PeerError, match=f"coordinator: sent {kind.__name__}, "):
        run.sites["a"]._take(order, [])


@pytest.mark.parametrize("clients", [(), (0, 0)])
def test_a_phase_of_a_site_has_its_client_once(clients: Sequence[int], tmp_path: Path) -> None:
    run = DrawnRounds(tmp_path, "fedavg", 1, secure=False)
    tasks = tuple(ClientTask(client, 3) for client in clients)
    opening = PhaseSetup(phase=PhaseId(0), clients=2, samples=9)
    said = f"coordinator: asked for clients at this site {len(clients)} of the run, expected 1"
    with pytest.raises(PeerError, match=said):
        run.sites["a"]._take(ToExecutor(run=RUN, body=PhaseOpened(opening=opening, tasks=tasks)), [])


@pytest.mark.parametrize(
    ("client", "told"), [(0, ""), (1, "called site 'a' client 1 of the run, expected 0"), (9, "client 9 ")]
)
def test_a_site_is_the_client_that_the_run_has_under_its_name(client: int, told: str, tmp_path: Path) -> None:
    task_spec = DrawnRounds(tmp_path, "fedavg", 1, secure=False).task_spec(client)
    with pytest.raises(PeerError, match=told) if told else contextlib.nullcontext():
        task_spec.check_site("a")


class LiedTo(InProcess):
    """Executors with everybody's data: before what each says, and is told, come lies."""

    def __init__(self, run: Run, to_coordinator: Lies, to_executors: Lies) -> None:
        order = random.Random(3)
        pick = lambda ready: order.randrange(len(ready))  # noqa: E731
        super().__init__(run.machine, run.server, run.sites, committed=run.records.append, pick=pick)
        self._receiver = SumsReceiver(run.server)
        self._sizes = population().sizes
        self._to_coordinator, self._to_executors = to_coordinator, to_executors
        self.kinds: set[type] = set()

    def heard(self, executor: str, report: Any) -> None:
        self.kinds.add(type(report))
        if not isinstance(report, ExecutorJoined):
            self._lie_to_coordinator(executor, report)
        super().heard(executor, report)

    def _act(self, slot: Any) -> None:
        if slot.inbox and not isinstance(order := slot.inbox[0], PhaseId):
            self.kinds.add(type(order))
            self._lie_to_executor(slot.policy, ToExecutor(run=RUN, body=order))
        super()._act(slot)

    def _lie_to_executor(self, policy: FederatedExecutor, right: ToExecutor) -> None:
        self._to_executors.about(right, lambda lie: self._tell(policy, lie))

    def _lie_to_coordinator(self, name: str, body: Any) -> None:
        partial = self._slots[name].site.partial if isinstance(body, SumsSent) else None
        tensors = {} if partial is None else partial.tensors()
        values = None if partial is None else SummedValues(weights=partial.weights())
        right = FromExecutor(run=RUN, body=body, values=values, tensors=headers_of(tensors))
        self._to_coordinator.about(right, lambda lie: self._hear(name, [*tensors.values()], lie), names=name)

    def _hear(self, name: str, tensors: Sequence[Tensor], lie: Any) -> None:
        receiver = copy.deepcopy(self._receiver)
        with named(name):
            _, found = landed(lie, tensors, lambda message: receiver.guard(name, message))
            values = {header.name: tensor for header, tensor in zip(lie.tensors, found, strict=True)}
            report = receiver.on_report(name, lie.body, lie.values, values)
        asked = Recorder(RoundPort)
        machine: Any = copy.deepcopy(self.machine, {id(self): asked})
        held = {n: dict(tasks) for n, tasks in machine._open.held.items()}
        machine.heard(name, report)
        for call in asked.asked:
            match call:
                case "dismiss", executor, reason:
                    raise PeerError(f"{executor} {reason}")
                case "merge", executor, _:
                    assert executor == name and {t.client for t in report.timed} <= held[name].keys()
                    receiver.merge(name)
                    assert lie.values.weights.clients == len(report.timed)
                case "ignore", executor, _:
                    assert executor == name
                case "notify", _, PhaseOpened(tasks=tasks) | TasksGranted(tasks=tasks):
                    assert all(task.samples == self._sizes[task.client] and not task.late for task in tasks)
                    assert len({task.client for task in tasks}) == len(tasks)
                case "commit", RoundRecord() as record:
                    trained = [t for timed in record.trained.values() for t in timed]
                    assert len({t.client for t in trained}) == len(trained)
                    assert all(t.samples == self._sizes[t.client] for t in trained)
                case "finished", Finish(outcome=outcome):
                    assert outcome == "done"
                case _:
                    pass

    def _tell(self, policy: FederatedExecutor, lie: Any) -> None:
        """It trains what it is given, once, and tells of it."""
        port = Recorder(ExecutorPort)
        policy = copy.deepcopy(policy, {id(policy.port): port})
        trained: list[int] = []
        policy.ordered(lie.body)
        while port.asked:
            asked: Any = port.asked.pop(0)
            match asked:
                case ("train", phase, tasks):
                    trained += [task.client for task in tasks]
                    policy.trained(phase, [ClientTime(task.client, task.samples, 0.1) for task in tasks])
                case (_, SumsSent() | TasksReturned() | ExecutorDrained() as report):
                    received(FromExecutor(run=RUN, body=report))
                case _:
                    pass
        given = getattr(lie.body, "tasks", ())
        if isinstance(lie.body, PhaseOpened):
            assert trained == [task.client for task in given]


@pytest.mark.parametrize("algorithm", ["scaffold", "mime"])
def test_rounds_of_executors_are_those_of_honest_parties(algorithm: str, tmp_path: Path) -> None:
    rounds = max(4, DRAWN // 100)
    options = {"executors": 3, "rounds": rounds, "stealing_pays_s": 0.0}
    honest, run = (Run(algorithm, {}, tmp_path / str(n), **options) for n in range(2))
    to_coordinator, to_executors = Lies(9, 8 * rounds), Lies(10, 8 * rounds)
    lied = LiedTo(run, to_coordinator, to_executors)
    assert honest.run() == lied.run() == Finish("done")
    assert torch.equal(run.model, honest.model)
    assert trained(run) == trained(honest) and len(trained(run)) == rounds
    assert lied.kinds >= {SumsSent, ExecutorDrained, TasksReturned}
    assert lied.kinds >= {PhaseOpened, TasksRecalled, TasksGranted, PhaseClosed}
    to_coordinator.told()
    to_executors.told()


def trained(run: Run) -> list[list[int]]:
    """By round, the clients."""
    return [sorted(t.client for timed in record.trained.values() for t in timed) for record in run.records]


class LiedToOfWeights(LiedTo):
    """Beside sums that are right."""

    def _lie_to_coordinator(self, name: str, body: Any) -> None:
        if isinstance(body, SumsSent):
            partial = self._slots[name].site.partial
            tensors, values = partial.tensors(), SummedValues(weights=partial.weights())
            right = FromExecutor(run=RUN, body=body, values=values, tensors=headers_of(tensors))
            take = lambda lie: self._hear(name, [*tensors.values()], lie)  # noqa: E731
            self._to_coordinator.about(right, take, names=name, keep=("body", "tensors"))

    def _lie_to_executor(self, policy: FederatedExecutor, right: ToExecutor) -> None:
        """It hears the truth."""


def _collecting(algorithm: Algorithm) -> Algorithm:
    return Robust(inner=algorithm, rule=Aggregation(rule="median"))


@pytest.mark.parametrize("collects", [False, True])
def test_weights_of_sums_are_those_of_their_clients(collects: bool, tmp_path: Path) -> None:
    options: dict[str, Any] = {"executors": 2, "rounds": 4, "around": _collecting} if collects else {"executors": 2}
    honest, run = (Run("fedavg", {}, tmp_path / str(n), **options) for n in range(2))
    lies = Lies(14, 8)
    assert honest.run() == LiedToOfWeights(run, lies, lies).run() == Finish("done")
    assert torch.equal(run.model, honest.model) and trained(run) == trained(honest)
    if collects:  # each weight is of a client, and all of them are the total
        assert lies.refused >= DRAWN and not lies.taken
    else:
        lies.told()


@pytest.mark.parametrize("collects", [False, True])
@pytest.mark.parametrize("each", [{0: 1 << 20}, {0: 1 << 62}, {7: 3 << 20}])
def test_weights_of_clients_come_where_their_values_do(collects: bool, each: dict[int, int], tmp_path: Path) -> None:
    """They were taken in of any clients where nothing is collected, and of one more than it may count."""
    around = {"around": _collecting} if collects else {}
    server = Run("fedavg", {}, tmp_path, **around).server
    server.open(PhaseSetup(phase=PhaseId(0), clients=2, samples=3))
    model = torch.zeros(53, dtype=torch.float64)
    tensors = {f"{c}/delta": model for c in (0, 1)} if collects else {"delta": torch.zeros(53, dtype=torch.int64)}
    right = {0: 1 << 20, 1: 2 << 20} if collects else {}
    server.partial.check(tensors, {0, 1}, AggregationWeights(clients=2, total=3 << 20, each=right))
    wrong = AggregationWeights(clients=2, total=min(sum(each.values()), 6 << 20), each=each)
    with pytest.raises(PeerError, match="sent weights"):
        server.partial.check(tensors, {0, 1}, wrong)


def test_no_client_counts_more_than_the_cohort(tmp_path: Path) -> None:
    server = Run("fedavg", {}, tmp_path, around=_collecting).server
    server.open(PhaseSetup(phase=PhaseId(0), clients=2, samples=3))
    tensors = {f"{c}/delta": torch.zeros(53, dtype=torch.float64) for c in (0, 1)}
    weights = AggregationWeights(clients=2, total=4 << 20, each={0: 4 << 20, 1: 0})
    with pytest.raises(PeerError, match="sent weights that are not those of its clients"):
        server.partial.check(tensors, {0, 1}, weights)
