"""A site: one client whose data stay here. It trains as in a simulation, and hands out its update unsummed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from isthmus.data.dataset import ColumnSpec, Dataset, joined
from isthmus.errors import UserError
from isthmus.federated.algorithms import Update
from isthmus.federated.worksite import Worksite
from isthmus.protocol.federated_events import Opening, Refusal, Task, Timed


class OwnData:
    """A whole data set as the one client that there is, whatever its number."""

    def __init__(self, dataset: Dataset) -> None:
        """UserError for one without samples."""
        self.samples = len(dataset)
        if not self.samples:
            raise UserError("data: holds no samples: a client without data cannot train")
        self._dataset = dataset

    @property
    def columns(self) -> Mapping[str, ColumnSpec]:
        return self._dataset.columns

    @property
    def sizes(self) -> NDArray[np.int64]:
        return np.array([self.samples])

    @property
    def fingerprint(self) -> str:
        return self._dataset.fingerprint

    def load(self, client: int) -> dict[str, Tensor]:
        return self._dataset.batch(np.arange(self.samples), list(self.columns))

    def load_many(self, clients: Sequence[int]) -> dict[str, Tensor]:
        return joined([self.load(client) for client in clients])


class Site(Worksite):
    """Nothing is folded here. Which of its states counts is the coordinator's word: whether an update got in cannot be
    known on this side of a connection that broke."""

    update: Update | None = None
    """Of the client that was trained last."""
    _durable_round = -1

    def open(self, opening: Opening, told: Mapping[str, Tensor]) -> None:
        super().open(opening, told)
        self._durable_round = opening.durable_round

    def train(self, tasks: Sequence[Task]) -> tuple[tuple[Timed, ...], tuple[Refusal, ...]]:
        for task in tasks:
            # A state that is on the coordinator's disk makes those before it useless, and those after it never came.
            if self._states is not None and task.state_round <= self._durable_round:
                self._states.sweep({task.client: task.state_round})
        return super().train(tasks)

    def _take_in(self, task: Task, update: Update) -> None:
        self.update = update
        if update.state is not None:
            self._keep(task, update.state)

    def _keep(self, task: Task, state: Mapping[str, Tensor]) -> None:
        assert self._turn is not None, "a turn is open"
        if self._states is None:
            raise UserError("algorithm: a client returned a state, but init_client gives none: return one there too")
        self._states.write(task.client, self._turn.round, state)
