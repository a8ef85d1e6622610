"""Where clients train: one resident module, the clients' data and states, and the sums of the open phase."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec
import torch
from torch import Tensor, nn

from isthmus.accelerators import HOST, Accelerator
from isthmus.accelerators.copies import all_to_device, to_host
from isthmus.combinations import refused
from isthmus.data.clients import ClientData, Redrawn
from isthmus.data.dataset import may_be_left_out
from isthmus.errors import PeerError, UserError, users_code
from isthmus.federated.admission import checked, first_state, named, refusal_of, unwritten
from isthmus.federated.algorithms import Algorithm, ClientUpdate, Combine, LocalTrainer, Pass, Values
from isthmus.federated.algorithms.algorithm import Wrapping
from isthmus.federated.emulated_speed import Pacer
from isthmus.federated.local import LocalConfig, PlainLocal, StepsByRound, Workspace
from isthmus.federated.partial import PartialSum, sums_on
from isthmus.federated.resident import Resident, as_values, buffers_of, is_buffer
from isthmus.federated.server import staleness_weight, without_stale_models
from isthmus.federated.stacked import Stacked, StackedLocal, check_alike, rows_for
from isthmus.federated.states import StateLost, States
from isthmus.protocol.federated_messages import NONE, ClientTask, ClientTime, PhaseId, PhaseSetup, RefusedUpdate
from isthmus.rng import torch_seed


class TrainingTask(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of a client trainer besides the model, equal on every executor of a run."""

    algorithm: Algorithm
    local: LocalConfig  # as `tabled`
    seed: int
    rounds: int = 1  # rounds of the run, over which a learning rate falls


class ClientTrainer:
    """Trains the clients that it is asked to, and folds their updates. One thread."""

    def __init__(
        self,
        work: TrainingTask,
        module: nn.Module,
        data: ClientData,
        states: States | None,
        *,
        pacer: Pacer | None = None,
        admit: Callable[[ClientUpdate], ClientUpdate] | None = None,
        log: Callable[[str], None] = lambda _: None,
        accelerator: Accelerator = HOST,
    ) -> None:
        """`states` is None for algorithms that keep nothing. `pacer` makes an executor as slow as an emulated one;
        `admit` refuses an update (PeerError) or clips it; `log` is
        told of states that are lost."""
        self.resident = Resident(module, accelerator, work.local.computes)
        self.resident.micro_batches = work.local.micro_batches
        self._labels = [name for name, column in data.columns.items() if may_be_left_out(column)]
        self.resident.uneven = self._counts = bool(self._labels)
        """Whether labels are counted for every client: else only for clients with one that is left out."""
        self._accelerator = accelerator
        self._work = work
        self._steps = StepsByRound(work.local, work.rounds)
        if not work.local.is_plain:
            self._steps.check_parameters(self.resident.named(self.resident.vector()))
        self._data, self._redrawn = data, data if isinstance(data, Redrawn) else None
        self._states = states
        self._pacer = pacer or Pacer(lambda seconds, _: seconds)
        self._admit = admit
        self._log = log
        self._passes: Sequence[Pass] = work.algorithm.passes
        self.averages_buffers = not isinstance(work.algorithm, Wrapping)
        """Whether what training changes of buffers is averaged; else it may change none."""
        self._workspace = Workspace(self.resident)
        self._draws = False  # whether a client's training draws from torch's generator
        self._tried: set[int] = set()  # passes of which a client was trained, and seen to draw or not
        self._stacked = Stacked(self.resident)
        self._compared: set[int] = set()
        """Passes of which a client was trained by itself too, after it was together with others."""
        self._broadcast: Values = {}
        self._past: list[Values] = []  # the broadcast of the round before, and so on
        self.add_up_in([{}] * len(self._passes))
        self._scale = (1, 1)
        self._phase_id: PhaseId | None = None
        self._renewed: set[int] = set()  # clients of this phase whose state of before is lost
        self._written: list[tuple[int, int]] = []  # (client, state) of this phase
        self._replaced: list[tuple[int, int, int]] = []
        """(state, the one in its place, the round that is to be on disk before it can go)."""

    def add_up_in(self, accumulators: Sequence[Mapping[str, Tensor]]) -> None:
        """From the next phase on, in this memory: by pass, int64 [numbers] of every value that is summed."""
        down = self._down_one if sums_on(self._accelerator.device) else None
        forms = as_values(self.resident.buffer_forms)
        sizes = {name: math.prod(form) for name, form in forms.items()}
        self._partials = [
            PartialSum(self._returns(n), sizes, accumulator, down=down) for n, accumulator in enumerate(accumulators)
        ]

    def _down_one(self, value: Tensor) -> Tensor:
        return to_host(self._accelerator, {"": value})[""]

    def _summable(self, update: ClientUpdate) -> ClientUpdate:
        """Where its values can be added up."""
        if sums_on(self._accelerator.device):
            return update
        return ClientUpdate(values=to_host(self._accelerator, update.values), state=update.state, weight=update.weight)

    def warm_up(self, client: int = 0, shapes: Sequence[tuple[int, int]] = ()) -> None:
        """Compute one gradient: the first takes a hundred times as long, and would be fitted as a client's time. The
        same for clients trained as one, of these `shapes` (rows, samples of a batch).

        Also finds out whether the model draws random numbers: seeding torch takes as long as a small client.
        """
        self._workspace.rewind()
        model = self.resident.vector(out=self._workspace.take())
        columns = self._cast(self._data.load(client))
        few = {name: column[: self._work.local.batch_size] for name, column in columns.items()}
        with users_code(self.resident.given(f"client {client}'s", few)):
            # No vector of a gradient is made: it may never be needed.
            self.resident.descend(model, few, 0.0, out=model)
        changed = self._changes({})
        self._draws = self.resident.draws(few)
        if self._labels and self.resident.micro_batches == 1:  # parts of a batch round as those of a pipeline do
            self._counts = self.resident.counts(few)
            self.resident.uneven = self._is_uneven(columns)
        if shapes and (self._draws or changed):
            what = "random numbers" if self._draws else "running statistics"
            raise refused(what, "clients together", what)
        for rows, samples in shapes:
            one = {name: column[:1] for name, column in columns.items()}
            several = {name: c.expand(rows, samples, *c.shape[1:]).clone() for name, c in one.items()}
            with users_code(f"model, of {rows} clients together"):
                self._stacked.trace(model.expand(rows, -1).clone(), several)

    def open(self, opening: PhaseSetup, broadcast: Mapping[str, Tensor]) -> None:
        """A phase begins; what is left of another one is dropped."""
        self._phase_id = opening.phase
        self._pacer.received(lambda: sum(value.nbytes for value in broadcast.values()))
        self._pacer.open(opening.phase.round, opening.phase.number)
        self._broadcast, self._past = without_stale_models(all_to_device(self._accelerator, broadcast))
        self._scale = (opening.samples, opening.clients)
        self.clear()
        self._written = []
        self._renewed.clear()
        if self._states is not None:
            self._states.free(old for old, _, round_ in self._replaced if round_ <= opening.durable_round)
            self._replaced = [entry for entry in self._replaced if entry[2] > opening.durable_round]

    def _returns(self, number: int) -> Mapping[str, Combine]:
        returns = self._passes[number].returns
        if not self.averages_buffers:
            return returns
        return {**returns, **dict.fromkeys(as_values(self.resident.buffer_forms), "weighted_mean")}

    def _changes(self, since: Values) -> Values:
        """Return the last training's changes of the model's buffers, by the names of values. UserError where they are
        not averaged."""
        changes = self.resident.buffer_changes(since)
        if changes and not self.averages_buffers:
            got = f"a buffer {next(iter(changes))!r} that training changes"
            raise refused("running statistics", "privacy or aggregation", got)
        return as_values(changes)

    def train(self, tasks: Sequence[ClientTask]) -> tuple[tuple[ClientTime, ...], tuple[RefusedUpdate, ...]]:
        """Train clients one after another. An update that is not finite is refused, and nothing of it is left."""
        if len(tasks) > 1:
            return self._train_vmapped(tasks)
        timed: list[ClientTime] = []
        refused: list[RefusedUpdate] = []
        for task in tasks:
            self._pacer.begin()
            update = self._update_of(task, self._state_of(task))
            try:
                state = self._take_in(task, update)
            except PeerError as e:
                refused.append(refusal_of(task.client, e))
                continue
            timed.append(self._timed(task, self._pacer.end(task.samples), state))
        return tuple(timed), tuple(refused)

    def _update_of(self, task: ClientTask, state: Values | None) -> ClientUpdate:
        assert self._phase_id is not None, "a phase is open"
        round_, whole_broadcast = self._phase_id.round - task.late, self._broadcast_to(task)
        local = self._local(task, round_)
        self.resident.set_buffers(buffers_of(whole_broadcast))
        first = self._phase_id.number not in self._tried
        if self._draws or first:
            torch.manual_seed(torch_seed(self._work.seed, round_, task.client))
        before = self._accelerator.random_state() if first else None
        broadcast = {name: value for name, value in whole_broadcast.items() if not is_buffer(name)}
        with users_code(self._who(task)):
            update = self._returned(broadcast, lambda one: one.client(local, broadcast, state))
        if before is not None:  # it may be the algorithm that draws
            self._tried.add(self._phase_id.number)
            self._draws = self._draws or not torch.equal(before, self._accelerator.random_state())
        changes = self._changes(buffers_of(whole_broadcast))
        return ClientUpdate(values={**update.values, **changes}, state=update.state, weight=update.weight)

    def _local(self, task: ClientTask, round_: int) -> LocalTrainer:
        return PlainLocal(
            self.resident,
            self._workspace,
            self._work.local,
            self._load([task]),
            steps=self._steps.at(round_),
            seed=self._work.seed,
            round_=round_,
            client=task.client,
        )

    def _broadcast_to(self, task: ClientTask) -> Values:
        """Return the broadcast of the round in which it began."""
        return self._past[task.late - 1] if task.late else self._broadcast

    def _who(self, task: ClientTask) -> str:
        alone = self._work.local.why_alone(task.samples) if self.resident.buffer_forms else ""
        return f"client {task.client}" + (f" ({alone})" if alone else "")

    def _train_vmapped(self, tasks: Sequence[ClientTask]) -> tuple[tuple[ClientTime, ...], tuple[RefusedUpdate, ...]]:
        """Train the same as one by one, but for the bits. Each gets an equal part of the time.

        The first one is repeated until they are as many as `rows_for` says, and its copies thrown away.
        """
        assert self._phase_id is not None, "a phase is open"
        self._pacer.begin()
        round_ = self._phase_id.round - tasks[0].late
        rows = [*tasks, *[tasks[0]] * (rows_for(len(tasks)) - len(tasks))]
        whole_broadcast = self._broadcast_to(tasks[0])
        self.resident.set_buffers(buffers_of(whole_broadcast))
        broadcast = {name: value for name, value in whole_broadcast.items() if not is_buffer(name)}
        states = self._states_of(rows)
        compare = self._phase_id.number not in self._compared
        alone = None
        if compare:
            self._compared.add(self._phase_id.number)
            alone = self._update_of(tasks[0], None if states is None else {n: v[0].clone() for n, v in states.items()})
            if self._draws:
                raise refused("random numbers", "clients together", "random numbers", "federated.algorithm")
            if any(is_buffer(name) for name in alone.values):
                raise refused("running statistics", "clients together", "running statistics")
            self._pacer.begin()
        local = StackedLocal(
            self._stacked,
            self._work.local,
            self._load(rows),
            steps=self._steps.at(round_),
            seed=self._work.seed,
            round_=round_,
            clients=[task.client for task in rows],
        )
        with users_code(f"{len(tasks)} clients together"):
            update = self._returned(broadcast, lambda one: one.client(local, broadcast, states))
        _check_rows(update.values, len(rows))
        taken, rejected = self._take_in_rows(tasks, update)
        each_s = self._pacer.end(sum(task.samples for task in tasks)) / len(tasks)
        if alone is not None:
            check_alike(alone, update)
        return tuple(self._timed(task, each_s, state) for task, state in taken), rejected

    def _timed(self, task: ClientTask, seconds: float, state: int) -> ClientTime:
        return ClientTime(task.client, task.samples, seconds, state, task.client in self._renewed)

    def _returned(self, broadcast: Values, train: Callable[[Pass], ClientUpdate]) -> ClientUpdate:
        """UserError for what is no update, for a state that got lost, and for a client that wrote to what others are
        told too: their bits would depend on who trained where."""
        assert self._phase_id is not None, "a phase is open"
        with unwritten(broadcast, "a client", "received", "a copy of its own"):
            update = checked(train(self._passes[self._phase_id.number]))
        if self._states is not None and update.state is None and len(self._passes) == 1:
            raise UserError("algorithm: a client returned no state, but init_client gives one: return it always")
        return update

    def _take_in_rows(
        self, tasks: Sequence[ClientTask], update: ClientUpdate
    ) -> tuple[Sequence[tuple[ClientTask, int]], tuple[RefusedUpdate, ...]]:
        """All of them at once where that can be; else, and to find out whose numbers are bad, one by one. Returns the
        clients that are in, with their new states."""
        if self._admit is None and not self.partial.collects:
            with contextlib.suppress(PeerError):
                first = ClientUpdate(
                    values={n: v[: len(tasks)] for n, v in update.values.items()}, weight=update.weight
                )
                values = self._summable(staleness_weight(first, tasks[0].late, rows=True))
                self.partial.fold_rows(values, len(tasks), tasks[0].samples)
                return self._keep_rows(tasks, range(len(tasks)), update, update.values), ()
        counted = update.values
        taken: list[int] = []
        refused: list[RefusedUpdate] = []
        for row, task in enumerate(tasks):
            one = ClientUpdate(values={n: v[row] for n, v in update.values.items()}, weight=update.weight)
            try:
                admitted = self._fold(task, one)
            except PeerError as e:
                refused.append(refusal_of(task.client, e))
                continue
            taken.append(row)
            if admitted is not one:
                counted = {n: v.clone() for n, v in counted.items()} if counted is update.values else counted
                for name, value in admitted.values.items():
                    counted[name][row] = value
        return self._keep_rows(tasks, taken, update, counted), tuple(refused)

    def _keep_rows(
        self, tasks: Sequence[ClientTask], taken: Sequence[int], update: ClientUpdate, counted: Values
    ) -> list[tuple[ClientTask, int]]:
        """The tasks of these rows, with their clients' new states."""
        kept = [tasks[row] for row in taken]
        states = self._state_after(update, counted)
        if states is not None:
            _check_rows(states, len(next(iter(counted.values()))))
            rows = slice(len(kept)) if kept == [*tasks[: len(kept)]] else list(taken)
            states = {name: value[rows] for name, value in states.items()}
        return list(zip(kept, self._keep(kept, states), strict=True)) if kept else []

    def _state_after(self, update: ClientUpdate, counted: Values) -> Values | None:
        """Return the states of clients whose values were counted as these. UserError for what is no state, and for one
        that does not follow clipped values where the server's values add up what clients keep."""
        clipped = counted is not update.values
        if clipped and isinstance(update.state, dict) and not self._work.algorithm.state_can_be_lost:
            what = (
                "algorithm: a client's values were clipped, and its state is that of before: expected a function of the"
            )
            raise UserError(f"{what} values that are counted (or state_can_be_lost, if the server adds up no states)")
        with users_code("algorithm: the state of a client"):
            state = update.kept(counted)
        return None if state is None else named(state, "a client, as its state,")

    def expect(self, tasks: Sequence[ClientTask]) -> None:
        """These clients come next, in this order: their states are brought nearer."""
        if self._states is not None:
            self._states.expect(task.state for task in tasks if task.state != NONE)

    def hand_over(self) -> None:
        """Write the states where other executors read them. Call it before anybody learns of them, and before the sums
        are sent."""
        self._pacer.sends(lambda: sum(value.nbytes for value in self.partial.tensors().values()))
        if self._states is not None:
            self._states.flush()

    def _take_in(self, task: ClientTask, update: ClientUpdate) -> int:
        """Returns the client's new state."""
        admitted = self._fold(task, update)
        return self._keep_one(task, self._state_after(update, admitted.values))

    def _fold(self, task: ClientTask, update: ClientUpdate) -> ClientUpdate:
        """Returns the update as it is counted."""
        admitted = update if self._admit is None else self._admit(update)
        self.partial.fold(task.client, self._summable(staleness_weight(admitted, task.late)), task.samples)
        return admitted

    def _load(self, tasks: Sequence[ClientTask]) -> dict[str, Tensor]:
        """The samples of all of them, one client after another. They are to be trained before others are loaded."""
        assert self._phase_id is not None, "a phase is open"
        several = len(tasks) > 1
        source = self._data
        if self._redrawn is not None:
            source = self._redrawn.of_round(self._work.seed, self._phase_id.round - tasks[0].late)
        data = source.load_many([t.client for t in tasks]) if several else source.load(tasks[0].client)
        samples, expected = len(next(iter(data.values()))), sum(t.samples for t in tasks)
        if samples != expected:
            who = "clients" if several else "client"
            named = ", ".join(str(t.client) for t in tasks)
            raise UserError(f"{who} {named}: the data has {samples} samples, expected {expected}")
        self.resident.uneven = self._is_uneven(data)
        return self._cast(data)

    def _is_uneven(self, data: Mapping[str, Tensor]) -> bool:
        return self._counts or any(bool((data[name] < 0).any()) for name in self._labels)

    def _cast(self, data: Mapping[str, Tensor]) -> dict[str, Tensor]:
        dtype = self.resident.computes
        cast = {name: c.to(dtype) if c.dtype.is_floating_point else c for name, c in data.items()}
        return all_to_device(self._accelerator, cast)

    def _state_of(self, task: ClientTask) -> Values | None:
        """Return the client's state; that of `init_client` if it comes for the first time."""
        if self._states is None:
            return None
        (kept,), found = self._kept([task])
        if not kept:
            return first_state(self._work.algorithm, self._broadcast["model"])
        return {name: value[0] for name, value in found.items()}

    def _states_of(self, tasks: Sequence[ClientTask]) -> Values | None:
        """The same of several, stacked."""
        if self._states is None:
            return None
        kept, found = self._kept(tasks)
        if all(kept):
            return found
        first = first_state(self._work.algorithm, self._broadcast["model"])
        assert first is not None, "clients keep something"
        states = {name: value.expand(len(tasks), *value.shape) for name, value in first.items()}
        if not any(kept):
            return states
        rows = self.resident.up(torch.tensor(kept).nonzero().flatten())
        return {name: value.index_copy(0, rows, found[name]) for name, value in states.items()}

    def _kept(self, tasks: Sequence[ClientTask]) -> tuple[list[bool], Values]:
        """Return which of the tasks' clients have a state, and those states, stacked. UserError for one that is lost
        and that the algorithm cannot do without."""
        assert self._states is not None, "clients keep something"
        while True:
            kept = [task.state != NONE and task.client not in self._renewed for task in tasks]
            read = [task for task, has in zip(tasks, kept, strict=True) if has]
            try:
                found = self._states.read([t.client for t in read], [t.state for t in read]) if read else {}
                return kept, all_to_device(self._accelerator, found)
            except StateLost as lost:
                if not self._work.algorithm.state_can_be_lost:
                    raise lost.refusal() from None
                self._renewed |= lost.clients
                self._log(f"{lost}; {_clients(lost.clients)} on with a new one")

    def _keep_one(self, task: ClientTask, state: Values | None) -> int:
        return self._keep([task], None if state is None else {name: _row(value) for name, value in state.items()})[0]

    def _keep(self, tasks: Sequence[ClientTask], states: Values | None) -> Sequence[int]:
        """The clients' new states, stacked, are kept until it is known what becomes of the phase."""
        assert self._phase_id is not None, "a phase is open"
        if states is None:
            return [NONE] * len(tasks)
        if self._states is None:
            raise UserError("algorithm: a client returned a state, but init_client gives none: return one there too")
        # What is no tensor is left as it is, to be refused by name.
        tensors = {n: v for n, v in states.items() if isinstance(v, Tensor)}  # pyright: ignore[reportUnnecessaryIsInstance]
        here = {**states, **to_host(self._accelerator, tensors)}
        numbers = self._states.write([t.client for t in tasks], self._phase_id.round, here)
        for task, number in zip(tasks, numbers, strict=True):
            self._written.append((task.client, number))
            if task.state != NONE:
                self._replaced.append((task.state, number, self._phase_id.round))
        return numbers

    @property
    def partial(self) -> PartialSum:
        """The open phase's sums."""
        assert self._phase_id is not None, "a phase is open"
        return self._partials[self._phase_id.number]

    def clear(self) -> None:
        """The sums are sent: more clients of the phase begin anew."""
        self.partial.begin(*self._scale)

    def forget(self, kept: Collection[int] = ()) -> None:
        """The phase is dropped: its sums, and the states that it wrote of all clients but those `kept`."""
        if self._states is not None:
            gone = {state for client, state in self._written if client not in kept}
            self._states.free(gone)
            self._replaced = [entry for entry in self._replaced if entry[1] not in gone]
        self._written = []
        self._phase_id = None


def _clients(numbers: Collection[int]) -> str:
    few = ", ".join(map(str, sorted(numbers)[:4]))
    if len(numbers) == 1:
        return f"client {few} goes"
    return f"clients {few}{', ...' if len(numbers) > 4 else ''} go"


def _row(value: Tensor) -> Tensor:
    """Return the value as the only one of several. What is no tensor is left as it is, to be refused by name."""
    return value.unsqueeze(0) if isinstance(value, Tensor) else value  # pyright: ignore[reportUnnecessaryIsInstance]


def _check_rows(values: Values, rows: int) -> None:
    """UserError for a value that is not one of each client: added up, it would count for too little."""
    for name, value in values.items():
        got = list(value.shape) if isinstance(value, Tensor) else []  # pyright: ignore[reportUnnecessaryIsInstance]
        if got[:1] != [rows]:
            what = f"algorithm: {rows} clients trained together give {name!r}: got a tensor {got}"
            raise UserError(f"{what}, expected [{rows}, ...] (or runtime.clients_per_vmap = 1)")
