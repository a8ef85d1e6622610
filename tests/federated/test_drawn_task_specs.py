"""Drawn integers in what a coordinator first asks of a site: its task, through the decoder, the owner's file and rules,
to the first round. What comes of it is a task that the run has, or the end of the site's connection, by an error that
names the coordinator. Nothing else is raised: a site's process goes on.

TaskMessage with TaskSpec, LocalConfig, Aggregation, AlgorithmSpec and ModelSpec: here. What follows in a run:
test_drawn_integers.py. AdmissionRules and Privacy have no integers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from torch import Tensor

from isthmus.api.make_plan import plan_for
from isthmus.errors import PeerError, UserError
from isthmus.federated.algorithms import AlgorithmSpec, load_algorithm
from isthmus.federated.local import LocalConfig
from isthmus.federated.resident import Resident
from isthmus.federated.robust import Aggregation
from isthmus.federated.server import Server
from isthmus.federated.task_spec import TaskSpec, load_site
from isthmus.models import build_model
from isthmus.protocol.federated_messages import ClientTask, ExecutorJoined, PhaseId, PhaseOpened, PhaseSetup, SumsSent
from isthmus.protocol.run_messages import DeviceFailed, Halt
from isthmus.protocol.secure_messages import KeysSent
from isthmus.runtime.federated import site_runner
from isthmus.runtime.federated.executor import take_part
from isthmus.runtime.federated.site_runner import SiteRunner
from isthmus.runtime.identity import Authority
from isthmus.runtime.messages.all_messages import AnyMessage
from isthmus.runtime.messages.federated import FromExecutor, TaskMessage, ToExecutor
from isthmus.runtime.messages.run import JoinRun
from isthmus.runtime.transport import reconnection
from isthmus.runtime.transport.message_sender import headers_of
from isthmus.runtime.transport.reconnection import CoordinatorConnection
from isthmus.training.learning_rate import LearningRate
from tests.drawn_integers import Lies, possible_threads, received
from tests.federated.hostile import MODEL
from tests.federated.sites import write_job
from tests.fleet_service.parties import certified

pytestmark = pytest.mark.thorough

NAMES, MOST, RUN = ("a", "b", "c", "d"), 64, "f" * 32
MOST_EPOCHS = 8
"""That are trained here. A site's owner reads how many a coordinator asks for."""


@pytest.fixture(autouse=True)
def _threads(monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    yield from possible_threads(monkeypatch)


class _Line:
    """A connection on which this is said, and then the end, when the site has answered."""

    def __init__(self, *said: tuple[AnyMessage, Sequence[Tensor]]) -> None:
        self._said = list(said)
        self.sent: list[Any] = []
        self.answered, self._closed = threading.Event(), threading.Event()
        self._halted = False

    def receive(self, *_: object, **__: object) -> Any:
        if self._said:
            message, tensors = self._said.pop(0)
            return message, list(tensors)
        self.answered.wait()
        if self._halted:
            self._closed.wait()
            return None
        self._halted = True
        return ToExecutor(run=RUN, body=Halt()), []

    def put(self, message: Any, tensors: Sequence[Tensor] = ()) -> None:
        self.sent.append(received(message).body if isinstance(message, FromExecutor) else message)
        if isinstance(self.sent[-1], SumsSent | KeysSent | DeviceFailed):
            self.answered.set()

    def flush(self) -> None: ...
    def close(self, flush_s: float = 0.0) -> None:
        self.answered.set()
        self._closed.set()


class Site:
    """The process of site `a`, and a coordinator of its run."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, *, secure: bool) -> None:
        write_job(folder, NAMES)
        certified(Authority(folder / "authority"), state := folder / "a-state")
        fail: Callable[[Any], None] = lambda _: None  # noqa: E731
        self.runner = SiteRunner(load_site(folder / "a.toml"), "a", state, log=lambda _: None, fail=fail, plan=plan_for)
        self.task_spec = TaskSpec(
            job="clinics",
            run="0" * 32,
            algorithm=AlgorithmSpec(name="fedavg"),
            model=MODEL,
            local=LocalConfig(epochs=2, batch_size=5, learning_rate=0.1),
            seed=3,
            client=0,
            rounds=4,
            minimum=2,
            sites=NAMES,
            aggregation=Aggregation(secure=True, most_samples=MOST) if secure else Aggregation(),
        )
        self.samples = MOST if secure else self.runner._data.samples
        resident = Resident(build_model(MODEL))
        server = Server(load_algorithm(self.task_spec.algorithm), resident.vector(), resident.buffers(), len(NAMES))
        self._broadcast = server.broadcast()
        monkeypatch.setattr(reconnection, "start_heartbeats", lambda *_: None)
        monkeypatch.setattr(site_runner, "own_mean_of", lambda *_: "")  # a line for people, which takes long

    def asked(self, asked: AnyMessage) -> list[Any]:
        """What it says to a coordinator that asks for this, and opens the first round. PeerError where it hangs up."""
        task_spec = cast(TaskMessage, asked).task_spec
        others = (len(NAMES) - 1) * MOST
        setup = PhaseSetup(phase=PhaseId(0), clients=len(NAMES), samples=self.samples + others)
        opened = PhaseOpened(opening=setup, tasks=(ClientTask(0, self.samples),))
        opening = ToExecutor(run=RUN, body=opened, tensors=headers_of(self._broadcast))
        opens = task_spec.local.epochs <= MOST_EPOCHS
        line = _Line((asked, ()), *[(opening, [*self._broadcast.values()])] * opens)
        if not opens:
            line.answered.set()
        join, dialled = JoinRun(run=RUN, device="a", host="", port=0), cast(Any, lambda: (line, line))
        connection = CoordinatorConnection(dialled, lambda: join, run=RUN, timeout_s=60.0)
        try:
            take_part(connection, self.runner._take_part)
        except UserError as e:  # by the word of its owner, which the coordinator is told
            assert isinstance(line.sent[-1], DeviceFailed) and "coordinator" in str(e)
            raise PeerError(str(e)) from None
        return line.sent


@pytest.mark.parametrize("secure", [False, True])
def test_a_task_is_one_that_the_run_has(secure: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site, lies = Site(tmp_path, monkeypatch, secure=secure), Lies(15, 1)
    right = TaskMessage(run=RUN, task_spec=site.task_spec)

    def take(message: AnyMessage) -> None:
        spec = cast(TaskMessage, message).task_spec
        _, joined, *answers = site.asked(message)
        assert joined == ExecutorJoined(samples=spec.aggregation.most_samples or site.runner._data.samples)
        assert spec.client == 0 and 1 <= spec.minimum <= len(NAMES)
        for answer in answers:
            assert spec.rounds > 0 and answer.phase == PhaseId(0)
            assert not isinstance(answer, SumsSent) or [(t.client, t.samples) for t in answer.timed] == [
                (0, site.samples)
            ]

    lies.about(right, take, names="coordinator")
    lies.told()
    assert [type(body) for body in site.asked(right)[1:]] == [ExecutorJoined, KeysSent if secure else SumsSent]


@pytest.mark.parametrize("minimum", [5, 1 << 31])
def test_a_sum_has_no_more_updates_than_there_are_sites(
    minimum: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a site would have masked its update and never said how to take the masks off."""
    site = Site(tmp_path, monkeypatch, secure=True)
    asked = TaskMessage(run=RUN, task_spec=msgspec.structs.replace(site.task_spec, minimum=minimum))
    with pytest.raises(
        PeerError, match=f"^coordinator: asked for updates in a sum {minimum} of the run, expected 1 to 4"
    ):
        site.asked(asked)


def test_a_schedule_is_not_stepped_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """2^48 rounds, which a frame may name, would have kept a thread of the site busy for thousands of years."""
    site = Site(tmp_path, monkeypatch, secure=False)
    rate = LearningRate(torch="StepLR", options={"step_size": 2})
    local = msgspec.structs.replace(site.task_spec.local, learning_rate=rate)
    asked = TaskMessage(run=RUN, task_spec=msgspec.structs.replace(site.task_spec, local=local, rounds=1 << 48))
    with pytest.raises(
        PeerError, match=r"^coordinator: asked for a schedule over rounds \d+ of the run, expected 1 to"
    ):
        site.asked(asked)
