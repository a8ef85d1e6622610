"""A small population and runs over it in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from isthmus.accelerators import HOST, Accelerator
from isthmus.data.dataset import ColumnSpec
from isthmus.federated import (
    AlgorithmSpec,
    ClientTrainer,
    LocalConfig,
    Server,
    StateForm,
    StateStore,
    TrainingTask,
    load_algorithm,
)
from isthmus.federated.admission import AdmissionRules, bounded
from isthmus.federated.algorithms import Algorithm, Values
from isthmus.federated.in_process import InProcess
from isthmus.federated.resident import Resident
from isthmus.models import MLP, MLPConfig
from isthmus.programs.merging import Finish
from isthmus.programs.open_phase import RoundRecord
from isthmus.programs.rounds import RoundPort, Rounds
from isthmus.protocol.federated_messages import ExecutorJoined, ExecutorReport
from isthmus.protocol.federated_participation import Buffer, Participation, cohort
from isthmus.protocol.federated_planning import RoundRules
from isthmus.protocol.federated_scheduler import ThroughputModel
from isthmus.session.session import Loss, Observation
from tests.federated.twins import BATCH, EPOCHS, ETA, SEED
from tests.programs.ports import Asked, Recorder

T = TypeVar("T")
CLIENTS, PER_ROUND = 9, 5
ANY = AdmissionRules()
LOCAL = LocalConfig(epochs=EPOCHS, batch_size=BATCH, learning_rate=ETA)


class ListedData:
    """Clients' samples held in a list."""

    def __init__(self, clients: list[dict[str, Tensor]]) -> None:
        self.clients = clients

    @property
    def columns(self) -> dict[str, ColumnSpec]:
        return {}

    @property
    def sizes(self) -> np.ndarray:
        return np.array([len(c["labels"]) for c in self.clients])

    @property
    def fingerprint(self) -> str:
        return "listed"

    def load(self, client: int) -> dict[str, Tensor]:
        return self.clients[client]

    def load_many(self, clients: Sequence[int]) -> dict[str, Tensor]:
        return {name: torch.cat([self.clients[c][name] for c in clients]) for name in self.clients[0]}


def population(clients: int = CLIENTS, per_size: int = 1) -> ListedData:
    """Sizes of 3 to 20 samples, `per_size` clients of each; labels that a client's own direction decides."""
    draws = torch.Generator().manual_seed(1)
    found: list[dict[str, Tensor]] = []
    for client in range(clients):
        n = 3 + client // per_size * 7 % 18
        x = torch.randn(n, 6, generator=draws, dtype=torch.float64)
        found.append({"pixel_values": x, "labels": (x[:, client % 6] > 0).long() + client % 2})
    return ListedData(found)


def module() -> nn.Module:
    torch.manual_seed(0)
    return MLP(MLPConfig(features=6, width=5, layers=1, classes=3)).double()


def members(round_: int, sizes: np.ndarray) -> np.ndarray:
    return cohort(Participation(clients=PER_ROUND), sizes, SEED, round_)


class Run:
    """A run of `executors` in this process."""

    def __init__(
        self,
        name: str,
        options: dict[str, object],
        folder: Path,
        *,
        executors: int = 1,
        rounds: int = 10,
        pick: Callable[[Sequence[str]], int] = lambda ready: 0,
        clients_per_vmap: int = 1,
        clients_per_size: int = 1,
        buffer: Buffer | None = None,
        kept: Values | None = None,
        accelerator: Accelerator = HOST,
        data: ListedData | None = None,
        model: Callable[[], nn.Module] = module,
        local: LocalConfig = LOCAL,
        around: Callable[[Algorithm], Algorithm] = lambda algorithm: algorithm,
        bounds: AdmissionRules = ANY,
        drawn: Callable[[int], np.ndarray] | None = None,
        **rules: object,
    ) -> None:
        data = data or population(per_size=clients_per_size)
        algorithm = around(load_algorithm(AlgorithmSpec(name=name, options=options)))
        work = TrainingTask(algorithm=algorithm, local=local, seed=SEED, rounds=rounds)
        resident = Resident(model())
        first = algorithm.init_client(resident.vector())
        stores = [
            None if first is None else StateStore(folder, StateForm(first), part=(k, executors))
            for k in range(executors)
        ]
        self.sites = {
            f"e{k}": ClientTrainer(
                work,
                model(),
                data,
                store,
                accelerator=accelerator,
                admit=lambda update: bounded(update, bounds, algorithm.change),
            )
            for k, store in enumerate(stores)
        }
        late = 0 if buffer is None else max(10, rounds)
        self.server = Server(algorithm, resident.vector(), resident.buffers(), len(data.clients), past=late)
        if kept is not None:
            self.server.restore(kept, rules.get("first_round", 0))
        self.records: list[RoundRecord] = []
        self.machine = Rounds(
            self.sites,
            RoundRules(rounds=rounds, passes=len(algorithm.passes), **{"needed": PER_ROUND, **rules}),
            data.sizes,
            drawn or (lambda r: members(r, data.sizes) if buffer is None else np.array(list(buffer.round(r)))),
            ThroughputModel(executors, window_rounds=5),
            states=None if first is None else np.full(len(data.clients), -1, dtype=np.int32),
            late=lambda r: {} if buffer is None else buffer.round(r),
        )
        self.driver = InProcess(
            self.machine,
            self.server,
            self.sites,
            committed=self.records.append,
            pick=pick,
            clients_per_vmap=clients_per_vmap,
        )

    def run(self) -> Finish:
        return self.driver.run()

    @property
    def model(self) -> Tensor:
        return self.server.values["model"]


class Asking(Rounds):
    """The machine by itself: each call returns what it asks then, but for lines for people."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._recorder = Recorder(RoundPort)
        self.port = self._recorder.port

    def after_report(self, executor: str, report: ExecutorReport) -> list[Asked]:
        if isinstance(report, ExecutorJoined):
            self.joined(executor)
        self.heard(executor, report)
        return self._took()

    def after_loss(self, executor: str, reason: str) -> list[Asked]:
        self.lost(Loss(executor, reason))
        return self._took()

    def after_tick(self, now_s: float) -> list[Asked]:
        self.clock(now_s)
        self.looked(Observation())
        return self._took()

    def _took(self) -> list[Asked]:
        return [call for call in self._recorder.took() if call[0] != "note"]


def orders(out: Sequence[Asked], kind: type[T]) -> list[tuple[str, T]]:
    """Executors that are sent an order of this kind."""
    sent = [(str(call[1]), call[2]) for call in out if call[0] == "notify"]
    return [(executor, order) for executor, order in sent if isinstance(order, kind)]


def commits(out: Sequence[Asked]) -> list[RoundRecord]:
    return [call[1] for call in out if isinstance(call[1], RoundRecord)]


def finish_of(out: Sequence[Asked]) -> Finish:
    """How the run ended, which is said last."""
    finish = out[-1][1]
    assert isinstance(finish, Finish)
    return finish
