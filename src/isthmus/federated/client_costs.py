"""The costs of a client on any device: FLOPs and bytes, counted in a round of clients with a few samples each."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from isthmus.data.clients import ClientData, Redrawn
from isthmus.data.dataset import ColumnSpec
from isthmus.errors import UserError
from isthmus.federated.admission import first_state
from isthmus.federated.client_trainer import ClientTrainer, TrainingTask
from isthmus.federated.in_process import InProcess
from isthmus.federated.job import FederatedJob, build
from isthmus.federated.resident import Resident
from isthmus.federated.server import Server
from isthmus.federated.states import StateForm, StateStore
from isthmus.graph.flop_counter import flop_counter
from isthmus.programs.rounds import Rounds
from isthmus.protocol.federated_messages import NONE, ClientTask, ClientTime, PhaseSetup, RefusedUpdate
from isthmus.protocol.federated_planning import RoundRules
from isthmus.protocol.federated_scheduler import ThroughputModel

FEW_SAMPLES = 2  # batch norm takes two. FLOPs are proportional to samples.
RATE = 1e-6  # the learning rate of the counted round: no number becomes infinite
EXECUTOR = "counting"


class PassCosts(msgspec.Struct, frozen=True, kw_only=True):
    flops: int
    """FLOPs of one of a client's samples in all epochs, forward and backward, as torch counts them: matrix products,
    convolutions, attention and recurrent layers."""
    broadcast_bytes: int  # to each executor
    sums_bytes: int  # from each executor, whatever its clients
    collected_bytes: int  # from each executor besides, for each of its clients


class ClientCosts(msgspec.Struct, frozen=True, kw_only=True):
    passes: tuple[PassCosts, ...]
    state_bytes: int  # 0 for algorithms whose clients keep nothing
    model_bytes: int

    @property
    def memory_bytes(self) -> int:
        """Return the bytes that an executor holds at least: model, gradient, broadcast and sums. What a batch takes is
        not in it."""
        values = max(one.broadcast_bytes + one.sums_bytes for one in self.passes)
        return 2 * self.model_bytes + values + self.state_bytes


def client_costs(job: FederatedJob, data: ClientData) -> ClientCosts:
    """Train a round of the job's algorithm on a few samples in this process, and count. UserError where that fails, or
    where nothing can be counted."""
    few = _FewSamples(data, max(1, job.federated.aggregation.fewest), job.training.seed)
    population = len(data.sizes)
    algorithm = job.algorithm(population)
    module = build(job)
    resident = Resident(module)
    server = Server(algorithm, resident.vector(), resident.buffers(), population)
    first = first_state(algorithm, server.values["model"])
    form = None if first is None else StateForm(first)
    local = msgspec.structs.replace(job.local, learning_rate=RATE, optimizer=(), clip_norm=0.0)
    with tempfile.TemporaryDirectory() as folder:
        trainer = _Counting(
            TrainingTask(algorithm=algorithm, local=local, seed=job.training.seed),
            module,
            few,
            None if form is None else StateStore(Path(folder), form),
        )
        clients = len(few.sizes)
        machine = Rounds(
            [EXECUTOR],
            RoundRules(rounds=1, passes=server.passes, needed=clients, planner="uniform", steals=False),
            few.sizes,
            lambda _: np.arange(clients),
            ThroughputModel(1, window_rounds=0),
            states=None if form is None else np.full(clients, NONE, dtype=np.int32),
        )
        finish = InProcess(machine, server, {EXECUTOR: trainer}).run()
    if finish.outcome != "done":
        raise UserError(f"fleet: the costs of a client cannot be counted: {finish.reason or finish.outcome}")
    late = 1 + job.federated.participation.staleness  # models of rounds before are broadcast too
    passes = [
        msgspec.structs.replace(one, broadcast_bytes=late * one.broadcast_bytes)
        for _, one in sorted(trainer.counted.items())
    ]
    if not all(one.flops for one in passes):
        raise UserError("fleet: the model's FLOPs cannot be counted: it has no matrix product and no convolution")
    state_bytes = 0 if form is None else form.size_bytes
    return ClientCosts(passes=tuple(passes), state_bytes=state_bytes, model_bytes=resident.vector().nbytes)


class _FewSamples:
    """Clients that all have the same few samples: those of a client of median size."""

    def __init__(self, data: ClientData, clients: int, seed: int) -> None:
        chosen = int(np.argsort(data.sizes)[len(data.sizes) // 2])
        drawn = data.of_round(seed, 0) if isinstance(data, Redrawn) else data
        self._samples = {name: column[:FEW_SAMPLES] for name, column in drawn.load(chosen).items()}
        self._clients = clients
        self._columns = data.columns

    @property
    def columns(self) -> Mapping[str, ColumnSpec]:
        return self._columns

    @property
    def sizes(self) -> NDArray[np.int64]:
        return np.full(self._clients, len(next(iter(self._samples.values()))), dtype=np.int64)

    @property
    def fingerprint(self) -> str:
        return "a few samples"

    def load(self, client: int) -> dict[str, Tensor]:
        return {name: column.clone() for name, column in self._samples.items()}

    def load_many(self, clients: Sequence[int]) -> dict[str, Tensor]:
        return {name: torch.cat([column] * len(clients)) for name, column in self._samples.items()}


class _Counting(ClientTrainer):
    """Keeps what was counted, by pass, of the client that was trained last."""

    def __init__(self, work: TrainingTask, module: nn.Module, data: ClientData, states: StateStore | None) -> None:
        super().__init__(work, module, data, states)
        self.counted: dict[int, PassCosts] = {}
        self._number = self._broadcast_bytes = 0

    def open(self, opening: PhaseSetup, broadcast: Mapping[str, Tensor]) -> None:
        self._number = opening.phase.number
        self._broadcast_bytes = sum(value.nbytes for value in broadcast.values())
        super().open(opening, broadcast)

    def train(self, tasks: Sequence[ClientTask]) -> tuple[tuple[ClientTime, ...], tuple[RefusedUpdate, ...]]:
        with flop_counter() as counter:
            found = super().train(tasks)
        sent = self.partial.tensors()
        sums = sum(value.nbytes for name, value in sent.items() if name in self.partial.bounds())
        self.counted[self._number] = PassCosts(
            flops=-(-counter.get_total_flops() // tasks[0].samples),
            broadcast_bytes=self._broadcast_bytes,
            sums_bytes=sums,
            collected_bytes=(sum(value.nbytes for value in sent.values()) - sums) // max(1, self.partial.clients),
        )
        return found
