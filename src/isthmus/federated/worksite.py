"""Where clients train: one resident module, the clients' data and states, and the sums of the open turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec
import torch
from torch import Tensor, nn

from isthmus.data.clients import ClientData
from isthmus.errors import PeerError, UserError
from isthmus.federated.algorithms import Algorithm, Combine, Pass, Update, Values
from isthmus.federated.local import LocalConfig, PlainLocal, Workspace
from isthmus.federated.partial import BUFFERS, Partial
from isthmus.federated.resident import Resident
from isthmus.federated.stacked import Stacked, StackedLocal
from isthmus.federated.states import NEVER, StateStore
from isthmus.protocol.federated_events import Opening, Refusal, Task, Timed, Turn
from isthmus.streams import torch_seed


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """What a worksite needs besides the model: the same on every executor of a run."""

    algorithm: Algorithm
    local: LocalConfig
    seed: int


class Worksite:
    """Trains the clients that it is told to, and folds their updates. One thread."""

    def __init__(
        self,
        work: Work,
        module: nn.Module,
        data: ClientData,
        states: StateStore | None,
        *,
        slow_down: Callable[[float, int], float] = lambda seconds, _: seconds,
        admit: Callable[[Update], Update] = lambda update: update,
    ) -> None:
        """`states` is None for algorithms that keep nothing. `slow_down(seconds, round)` is how long training that
        took `seconds` lasts on an emulated executor; `admit` refuses an update (PeerError) or clips it."""
        self.resident = Resident(module)
        self._work = work
        self._data = data
        self._states = states
        self._slow_down = slow_down
        self._admit = admit
        self._passes: Sequence[Pass] = work.algorithm.passes
        self._workspace = Workspace(self.resident.size, self.resident.dtype)
        self._draws = False
        self._stacked: Stacked | None = None
        self._told: Values = {}
        self._partials = [Partial(self._returns(number)) for number in range(len(self._passes))]
        self._scale = (1, 1)
        self._turn: Turn | None = None
        self._written: list[tuple[int, int]] = []
        self._replaced: list[tuple[int, int, int]] = []

    def warm_up(self, client: int = 0) -> None:
        """Compute one gradient: the first takes a hundred times as long, and would be fitted as a client's time.

        Also finds out whether the model draws random numbers: seeding torch takes as long as a small client.
        """
        model = self.resident.vector()
        columns = self._cast(self._data.load(client))
        few = {name: column[: self._work.local.batch_size] for name, column in columns.items()}
        buffers = self.resident.buffers()
        self.resident.gradient(model, few)
        self._draws = self.resident.draws(few)
        self.resident.set_buffers(buffers)

    def open(self, opening: Opening, told: Mapping[str, Tensor]) -> None:
        """A turn begins; what is left of another one is dropped."""
        self._turn = opening.turn
        self._told = dict(told)
        self._scale = (opening.samples, opening.clients)
        self.clear()
        self._written = []
        if self._states is not None:
            gone = [(client, old) for client, old, new in self._replaced if new <= opening.durable_round]
            self._replaced = [entry for entry in self._replaced if entry[2] > opening.durable_round]
            self._states.drop(gone)

    def _returns(self, number: int) -> Mapping[str, Combine]:
        returns = self._passes[number].returns
        return {**returns, BUFFERS: "weighted_mean"} if len(self.resident.buffers()) else returns

    def train(self, tasks: Sequence[Task]) -> tuple[tuple[Timed, ...], tuple[Refusal, ...]]:
        """Train clients one after another. An update that is not finite is refused, and nothing of it is left."""
        if len(tasks) > 1:
            return self._train_together(tasks)
        timed: list[Timed] = []
        refused: list[Refusal] = []
        for task in tasks:
            start_s = time.perf_counter()
            try:
                self._train_one(task)
            except PeerError as e:
                refused.append(Refusal(task.client, str(e)))
                continue
            seconds = time.perf_counter() - start_s
            assert self._turn is not None
            lasts_s = self._slow_down(seconds, self._turn.round)
            if lasts_s > seconds:
                time.sleep(lasts_s - seconds)
            timed.append(Timed(task.client, task.samples, lasts_s))
        return tuple(timed), tuple(refused)

    def _train_one(self, task: Task) -> None:
        assert self._turn is not None, "a turn is open"
        data = self._load(task)
        state = self._state(task)
        local = PlainLocal(
            self.resident, self._workspace, self._work.local, data,
            seed=self._work.seed, round_=self._turn.round, client=task.client,
        )  # fmt: skip
        if BUFFERS in self._told:
            self.resident.set_buffers(self._told[BUFFERS])
        if self._draws:
            torch.manual_seed(torch_seed(self._work.seed, self._turn.round, task.client))
        told = {name: value for name, value in self._told.items() if name != BUFFERS}
        update = self._passes[self._turn.number].client(local, told, state)
        if BUFFERS in self._told:
            values = {**update.values, BUFFERS: self.resident.buffers()}
            update = Update(values=values, state=update.state, weight=update.weight)
        self._take_in(task, update)

    def _train_together(self, tasks: Sequence[Task]) -> tuple[tuple[Timed, ...], tuple[Refusal, ...]]:
        """As one by one, but for the bits. Each gets an equal part of the time."""
        assert self._turn is not None, "a turn is open"
        start_s = time.perf_counter()
        if self._stacked is None:
            self._stacked = Stacked(self.resident)
        local = StackedLocal(
            self._stacked, self._work.local, [self._load(task) for task in tasks],
            seed=self._work.seed, round_=self._turn.round, clients=[task.client for task in tasks],
        )  # fmt: skip
        states = [state for task in tasks if (state := self._state(task)) is not None]
        stacked = {name: torch.stack([s[name] for s in states]) for name in states[0]} if states else None
        update = self._passes[self._turn.number].client(local, self._told, stacked)
        taken: list[Task] = []
        refused: list[Refusal] = []
        for row, task in enumerate(tasks):
            state = None if update.state is None else {name: value[row] for name, value in update.state.items()}
            values = {name: value[row] for name, value in update.values.items()}
            own = Update(values=values, state=state, weight=update.weight)
            try:
                self._take_in(task, own)
            except PeerError as e:
                refused.append(Refusal(task.client, str(e)))
                continue
            taken.append(task)
        seconds = time.perf_counter() - start_s
        lasts_s = self._slow_down(seconds, self._turn.round)
        if lasts_s > seconds:
            time.sleep(lasts_s - seconds)
        return tuple(Timed(t.client, t.samples, lasts_s / len(tasks)) for t in taken), tuple(refused)

    def _take_in(self, task: Task, update: Update) -> None:
        self.partial.fold(task.client, self._admit(update), task.samples)
        if update.state is not None:
            self._keep(task, update.state)

    def _load(self, task: Task) -> dict[str, Tensor]:
        data = self._data.load(task.client)
        samples = len(next(iter(data.values())))
        if samples != task.samples:
            raise UserError(f"client {task.client}: its data has {samples} samples, expected {task.samples}")
        return self._cast(data)

    def _cast(self, data: Mapping[str, Tensor]) -> dict[str, Tensor]:
        dtype = self.resident.dtype
        return {name: c.to(dtype) if c.dtype.is_floating_point else c for name, c in data.items()}

    def _state(self, task: Task) -> Values | None:
        if self._states is None:
            return None
        if task.state_round == NEVER:
            return self._work.algorithm.init_client(self._told["model"])
        return self._states.read(task.client, task.state_round)

    def _keep(self, task: Task, state: Values) -> None:
        assert self._turn is not None
        if self._states is None:
            raise UserError("algorithm: a client returned a state, but init_client gives none: return one there too")
        self._states.write(task.client, self._turn.round, state)
        self._written.append((task.client, self._turn.round))
        if task.state_round != NEVER:
            self._replaced.append((task.client, task.state_round, self._turn.round))

    @property
    def partial(self) -> Partial:
        """The open turn's sums."""
        assert self._turn is not None, "a turn is open"
        return self._partials[self._turn.number]

    def clear(self) -> None:
        """The sums are sent: more clients of the turn begin anew."""
        self.partial.begin(*self._scale)

    def forget(self, kept: Collection[int] = ()) -> None:
        """The turn is dropped: its sums, and the states that it wrote of all clients but those `kept`."""
        if self._states is not None:
            gone = {entry for entry in self._written if entry[0] not in kept}
            self._states.drop(gone)
            self._replaced = [(c, old, new) for c, old, new in self._replaced if (c, new) not in gone]
        self._written = []
        self._turn = None
