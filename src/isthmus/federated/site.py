"""A site: one client whose data stay here. It trains as in a simulation, and hands out its update unsummed."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from isthmus.accelerators import HOST, Accelerator
from isthmus.accelerators.copies import all_to_device, to_host
from isthmus.atomic_write import atomic_write
from isthmus.data.clients import ClientData, refuse_stream
from isthmus.data.dataset import ColumnSpec, Dataset, SamplesOf, batch_of_round, joined
from isthmus.errors import IsthmusError, PeerError, UserError
from isthmus.federated.admission import Form, Private, check_finite
from isthmus.federated.algorithms import ClientUpdate, LocalTrainer
from isthmus.federated.client_trainer import ClientTrainer, TrainingTask
from isthmus.federated.emulated_speed import Pacer
from isthmus.federated.evaluation import Evaluator
from isthmus.federated.pipeline import Descend, PipelineLocal
from isthmus.federated.resident import as_values, buffers_of, is_buffer
from isthmus.federated.states import Rows, StateForm, StateLost
from isthmus.protocol.federated_messages import ClientTask, ClientTime, PhaseSetup, RefusedUpdate
from isthmus.units import format_metric


class OwnData(SamplesOf):
    """A whole data set as the one client that there is, whatever its number."""

    def __init__(self, dataset: Dataset) -> None:
        """UserError for one without samples, and for a stream."""
        refuse_stream(dataset)
        self.samples = len(dataset)
        if not self.samples:
            raise UserError("data: holds no samples: a client without data cannot train")
        super().__init__(dataset)
        self._without = ""
        self._drawn = (0, 0)

    def without(self, column: str) -> OwnData:
        """Less the column that says whose a sample is, where there is one: the simulation takes it off too."""
        less = copy.copy(self)
        less._without = column
        return less

    @property
    def columns(self) -> Mapping[str, ColumnSpec]:
        return {name: spec for name, spec in self._dataset.columns.items() if name != self._without}

    def of_round(self, seed: int, round_: int) -> OwnData:
        """Return the samples as `Redrawn` does."""
        drawn = copy.copy(self)
        drawn._drawn = (seed, round_)
        return drawn

    @property
    def sizes(self) -> NDArray[np.int64]:
        return np.array([self.samples])

    def load(self, client: int) -> dict[str, Tensor]:
        return batch_of_round(self._dataset, np.arange(self.samples), list(self.columns), *self._drawn)

    def load_many(self, clients: Sequence[int]) -> dict[str, Tensor]:
        return joined([self.load(client) for client in clients])


class _NoState(StateLost):
    """A round has no state here: it is the coordinator that named the round."""

    def refusal(self) -> IsthmusError:
        return PeerError(f"coordinator: asked this site to go on from what is not here: {super().refusal()}")


class SiteStates:
    """The states of a site's one client, under the numbers of the rounds that they were made in: a file each.

    Which of them counts is the coordinator's word: whether an update got in cannot be known on this side of a
    connection that broke.
    """

    def __init__(self, folder: Path, form: StateForm) -> None:
        self._folder = folder
        self._form = form

    def _path(self, round_: int) -> Path:
        return self._folder / f"round-{round_:06d}.safetensors"

    def expect(self, places: Iterable[int]) -> None:
        """They are read when they are needed."""

    def flush(self) -> None:
        """Nothing waits."""

    def read(self, clients: Sequence[int], places: Sequence[int]) -> dict[str, Tensor]:
        """Return the same as `States.read`, of the one client."""
        (round_,) = places
        path, memory = self._path(round_), self._memory()
        try:
            found = np.fromfile(path, dtype=np.uint8, count=self._form.size_bytes + 1)
        except FileNotFoundError:
            raise _NoState(clients, f"state {path}: missing: the folder is of another run") from None
        except OSError as e:
            raise StateLost(clients, f"state {path}: cannot be read: {e.strerror or e}") from None
        if len(found) != self._form.size_bytes or not self._form.is_of(clients[0], found, round_):
            raise StateLost(clients, f"state {path}: is not client {clients[0]}'s of round {round_ + 1}, or damaged")
        if not self._form.is_whole(found):
            raise StateLost(clients, f"state {path}: is not as it was written: damaged since")
        memory[0, : len(found)] = found
        return self._form.views(torch.from_numpy(memory))

    def _memory(self) -> NDArray[np.uint8]:
        """Return memory of one state; it begins where numbers may."""
        return np.empty((1, -(-self._form.size_bytes // 8) * 8), dtype=np.uint8)

    def write(self, clients: Sequence[int], round_: int, states: Rows) -> list[int]:
        """Return the same as `States.write`, of the one client."""
        memory = self._memory()
        self._form.fill(self._form.views(torch.from_numpy(memory)), slice(None), clients, states)
        self._form.sign(memory, clients, round_)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            # Every round waits for this file, so it is not forced to disk; `read` recognises a damaged one.
            atomic_write(self._path(round_), memory[0, : self._form.size_bytes].data, durable=False)
        except OSError as e:
            raise UserError(f"state {self._path(round_)}: cannot be written: {e.strerror or e}") from None
        return [round_]

    def free(self, places: Iterable[int]) -> None:
        """`keep_only` knows what is of no use."""

    def keep_only(self, round_: int) -> None:
        """All others can go."""
        for path in self._folder.glob("round-*.safetensors"):
            if path != self._path(round_):
                path.unlink()


class UpdateRules(msgspec.Struct, frozen=True, kw_only=True):
    """A site changes an update by these before it is sent."""

    stated_samples: int | None = None  # the number that the coordinator gets in place of the true one
    clip: Callable[[ClientUpdate], ClientUpdate] = lambda update: update
    """It scales an update down as the coordinator does: the client's state follows what is counted."""
    masked: bool = False  # an update is made a sum of its own, and not checked by the coordinator


AS_TRAINED = UpdateRules()


class Site(ClientTrainer):
    """Nothing is folded here."""

    update: ClientUpdate | None = None  # the update of the client that was trained last
    trained: Mapping[str, Tensor] = {}  # its values before they were clipped
    _durable_round = -1
    _same_model = False  # as the coordinator's: from then on another one is the coordinator's fault
    evaluator: Evaluator | None = None  # on this site's own data
    pipeline: Descend | None = None  # with it nothing is computed here but what the algorithm makes of its descents
    figures: Mapping[str, float] = {}
    """The loss and metrics of the model that the round began with, on this site's own data; before its first pass
    alone."""

    def __init__(
        self,
        work: TrainingTask,
        module: nn.Module,
        data: ClientData,
        states: SiteStates | None,
        *,
        pacer: Pacer | None = None,
        log: Callable[[str], None] = lambda _: None,
        accelerator: Accelerator = HOST,
        rules: UpdateRules = AS_TRAINED,
    ) -> None:
        """The other arguments are a client trainer's."""
        super().__init__(work, module, data, states, pacer=pacer, log=log, accelerator=accelerator)
        own = {"model": self.resident.vector(), **as_values(self.resident.buffers())}
        self._forms = {name: Form.of(value) for name, value in own.items()}
        self._own_states = states
        self._samples = int(data.sizes[0])
        self._rules = rules

    def check_broadcast(self, broadcast: Mapping[str, Tensor]) -> None:
        """UserError for a first model of another form than here: no connection mends it. PeerError for a later one."""
        for name, value in broadcast.items():
            if (name == "model" or is_buffer(name)) and Form.of(value) != (expected := self._forms.get(name)):
                what = f"coordinator: sent {name!r} as {Form.of(value)}, expected {expected or 'none'}"
                raise (
                    PeerError(what) if self._same_model else UserError(f"{what}: this site's code makes another model")
                )
        self._same_model = True

    @property
    def passes(self) -> int:
        return len(self._passes)

    def _local(self, task: ClientTask, round_: int) -> LocalTrainer:
        if self.pipeline is None:
            return super()._local(task, round_)
        if task.samples != self._samples:
            raise UserError(f"client {task.client}: the data has {self._samples} samples, expected {task.samples}")
        key = (self._work.seed, round_, task.client)
        return PipelineLocal(self.pipeline, self._work.local, self._steps.at(round_), task.samples, key)

    def open(self, opening: PhaseSetup, broadcast: Mapping[str, Tensor]) -> None:
        super().open(opening, broadcast)
        self._durable_round = opening.durable_round
        self.figures = {}
        if self.evaluator is not None and opening.phase.number == 0:
            found = self.evaluator.evaluate(broadcast["model"], buffers_of(broadcast))
            figures = {"loss": found.loss, **found.metrics}
            self.figures = {n: v for n, v in figures.items() if v is not None and math.isfinite(v)}
            said = ", ".join(f"{name} {format_metric(name, value)}" for name, value in self.figures.items())
            self._log(f"round {opening.phase.round + 1} begins with a model of {said} on this site's data")

    def train(self, tasks: Sequence[ClientTask]) -> tuple[tuple[ClientTime, ...], tuple[RefusedUpdate, ...]]:
        if self._rules.stated_samples is not None:
            tasks = [msgspec.structs.replace(task, samples=self._samples) for task in tasks]
        for task in tasks:
            # A state that is on the coordinator's disk makes those before it useless, and those after it never came.
            if self._own_states is not None and task.state <= self._durable_round:
                self._own_states.keep_only(task.state)
        timed, refused = super().train(tasks)
        if self._rules.stated_samples is None:
            return timed, refused
        return tuple(msgspec.structs.replace(t, samples=self._rules.stated_samples) for t in timed), refused

    def _take_in(self, task: ClientTask, update: ClientUpdate) -> int:
        self.trained = values = to_host(self.resident.accelerator, update.values)
        weight = self._samples if update.weight is None and self._rules.stated_samples is not None else update.weight
        if isinstance(self._work.algorithm, Private):
            weight = 1.0  # of sums no weights are needed, and noise does not cover them
        sent = ClientUpdate(values=values, state=update.state, weight=weight)
        if self._rules.masked:
            check_finite(sent)
            self.update = self._rules.clip(sent)
            self.partial.fold(task.client, self.update, self._samples)
        else:
            with contextlib.suppress(PeerError):  # the coordinator refuses it, by name
                sent = self._rules.clip(sent)
            self.update = sent
        counted = (
            update.values
            if self.update.values is values
            else all_to_device(self.resident.accelerator, self.update.values)
        )
        return self._keep_one(task, self._state_after(update, counted))
