"""A client at work on one resident module: the `Local` that algorithms are given.

A client's steps: by round a learning rate, or optimizers and a bound on gradients.

The learning rate follows the rounds and stays for all local steps of one: the papers' proofs let it fall so (Li et al.
2020; Reddi et al. 2021), clients of one round have different numbers of steps, and the sums that algorithms keep
(SCAFFOLD's control variates, FedNova's steps) count with one rate a round. Optimizers begin anew in every round: a
client that is drawn once in a while would go on with what its gradients were like at another model.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, cast

import msgspec
import torch
from msgspec import Meta
from torch import Tensor, nn

from isthmus.combinations import refused
from isthmus.errors import UserError
from isthmus.federated.resident import Resident
from isthmus.rng import orders
from isthmus.training.learning_rate import CONSTANT, LearningRate
from isthmus.training.optim import AnyOptimizerConfig, Optimizers, choose, clip, gradient_norms, settings_of
from isthmus.wire_types import Above, NotNegative, Positive, Seed

if TYPE_CHECKING:
    from isthmus.federated.local import LocalConfig

Term = Callable[[Tensor, Tensor], object]
"""(gradient, weights) -> what a client's loss has besides its model's is added to the gradient, in place."""
RATE = 0.05  # Parrot's
MOST_ROUNDS = 100_000
"""Rounds of a run with a schedule. A scheduler of torch is stepped once a round, which takes up to 0.5 ms."""


@dataclass(frozen=True, kw_only=True)
class RoundSteps:
    rate: float | None  # the learning rate of plain SGD; None where the optimizers are others, or gradients are clipped
    optimizers: tuple[AnyOptimizerConfig, ...]
    clip_norm: float

    @property
    def learning_rate(self) -> float:
        """UserError where there is no plain SGD."""
        if self.rate is None:
            field, got = what_is_set(self.optimizers, self.clip_norm)
            raise refused("optimizers", "an algorithm of SGD", got, field, "its clients make the steps themselves")
        return self.rate

    def descent(self, parameters: Mapping[str, Tensor]) -> Callable[[Sequence[Tensor | None]], None]:
        """Return the function of a step: given gradients, it changes these parameters in place. UserError for
        parameters that an optimizer cannot have."""
        held = {name: nn.Parameter(value, requires_grad=False) for name, value in parameters.items()}
        optimizers = Optimizers(self.optimizers, held)

        def step(gradients: Sequence[Tensor | None]) -> None:
            if self.clip_norm:
                # Of two parameters that are added up, autograd may give one tensor.
                gradients = [None if gradient is None else gradient.clone() for gradient in gradients]
                there = [gradient for gradient in gradients if gradient is not None]
                clip(there, gradient_norms(gradients, next(iter(held.values())).device), self.clip_norm)
            for parameter, gradient in zip(held.values(), gradients, strict=True):
                parameter.grad = gradient
            optimizers.step()

        return step


class StepsByRound:
    """The steps of clients in every round of a run."""

    def __init__(self, config: LocalConfig, rounds: int) -> None:
        """Prepare a run of `rounds`; functions of the learning rate schedule are tables (`LocalConfig.tabled`).
        UserError for what torch refuses, and for more rounds than a schedule is stepped through."""
        given = config.learning_rate
        schedule = given if isinstance(given, LearningRate) else CONSTANT
        if schedule != CONSTANT and rounds > MOST_ROUNDS:
            raise UserError(
                f"learning_rate: got a schedule over {rounds:,} rounds, expected at most {MOST_ROUNDS:,}: a "
                "schedule is stepped once a round"
            )
        rate = given if isinstance(given, float | int) else RATE
        self._optimizers = config.optimizer or (AnyOptimizerConfig(name="sgd", lr=rate),)
        self._clip_norm = config.clip_norm
        self._rounds = 1 if schedule == CONSTANT else rounds  # with a rate of their own
        with _named():
            self._settings = [settings_of(one, schedule, rounds) for one in self._optimizers]
        self._found: tuple[int, RoundSteps] | None = None

    def at(self, round_: int) -> RoundSteps:
        """In round number `round_`, from 0."""
        if self._found is None or self._found[0] != round_:
            pairs = zip(self._optimizers, self._settings, strict=True)
            optimizers = tuple(one.set_to(settings(round_)) for one, settings in pairs)
            rate = optimizers[0].lr if is_plain(self._optimizers, self._clip_norm) else None
            self._found = round_, RoundSteps(rate=rate, optimizers=optimizers, clip_norm=self._clip_norm)
        return self._found[1]

    def check(self) -> None:
        """UserError for what torch refuses, and for a rate that is not above 0: SCAFFOLD divides by it, and without one
        nothing is learnt."""
        matrix = nn.Parameter(torch.zeros(1, 1))
        for one in self._optimizers:
            with _named():
                made = Optimizers([msgspec.structs.replace(one, pattern="*")], {"": matrix})
                matrix.grad = torch.zeros(1, 1)
                try:  # some arguments are looked at in a step alone
                    made.step()
                except Exception as e:
                    raise UserError(f"optimizer: {one.called}: {' '.join(str(e).split())}") from e
        for round_ in range(self._rounds):
            for settings in self._settings:
                rate = cast(float, settings(round_)["lr"])
                if not 0 < rate < math.inf:
                    raise UserError(
                        f"learning_rate: got a rate of {rate:g} in round {round_ + 1}, expected one above 0"
                    )

    def check_parameters(self, parameters: Mapping[str, Tensor]) -> None:
        """UserError for optimizers that parameters of these shapes cannot have, and for one that gets none."""
        with _named():
            self.at(0).descent(parameters)
            used = {choose(self._optimizers, name) for name in parameters}
            for number, one in enumerate(self._optimizers):
                if number not in used:
                    raise UserError(
                        f"optimizer: pattern {one.pattern!r} of entry {number + 1} updates no parameter: the first "
                        "match wins"
                    )


@contextlib.contextmanager
def _named() -> Generator[None]:
    """Around what says of its own tables what a pipeline's job calls them."""
    try:
        yield
    except UserError as e:
        raise UserError(str(e).replace("training.steps", "federated.rounds")) from e


def is_plain(optimizers: Sequence[AnyOptimizerConfig], clip_norm: float) -> bool:
    """Return whether steps are those of SGD with a learning rate alone, of all parameters alike."""
    if not optimizers:
        return clip_norm == 0
    one = optimizers[0]
    sgd = AnyOptimizerConfig(name="sgd", lr=one.lr)
    return clip_norm == 0 and len(optimizers) == 1 and one == sgd


def what_is_set(optimizers: Sequence[AnyOptimizerConfig], clip_norm: float) -> tuple[str, str]:
    """Return the key that asks for other steps than plain SGD's, and its value."""
    if not is_plain(optimizers, 0.0):
        one = next((one for one in optimizers if not is_plain([one], 0.0)), optimizers[0])
        given = (name for name in ("momentum", "weight_decay", "pattern") if getattr(one, name) not in (0.0, "*"))
        with_ = next((f" with {name} {getattr(one, name)}" for name in given), "")
        return "optimizer", f"{one.called}{with_}"
    return "training.clip_norm", f"{clip_norm:g}"


Batch = Mapping[str, Tensor]


Rate = Above | LearningRate | None
OptimizerTables = Annotated[tuple[AnyOptimizerConfig, ...], Meta(max_length=64)]
MicroBatches = Annotated[int, Meta(ge=1, le=1 << 16)]


Precision = Literal["fp32", "bf16"]


class FederatedTraining(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How clients train in a round, when to evaluate and to save. The defaults are those of Parrot. Zero turns an
    `every` off."""

    epochs: Positive = 1  # Passes over a client's data in a round.
    batch_size: Positive = 20  # Samples per step of a client.
    micro_batches: MicroBatches = 1
    """Equal parts of a batch whose gradients are added up: a client that is a pipeline has so many under way at once. A
    batch that cannot be cut into as many has fewer. A loss that is a mean of the model's own may be another with each
    number: a line says so before the first round."""
    precision: Literal[Precision, "fp16"] = "fp32"
    """bf16: clients compute in bfloat16. Their weights, sums and evaluation stay in the model's own type. fp16 is
    refused."""
    seed: Seed = 0  # The seed of weights, partition, participation and the order of samples.
    clip_norm: NotNegative = 0.0  # Largest norm of all gradients of a step together; 0: they are not clipped.
    drop_last: bool = False
    """An epoch leaves out a last batch that is smaller than the others: batch norm cannot train on one sample. A client
    with less than one batch has that one: `federated.participation.min_samples` leaves clients out."""
    eval_every: Annotated[int, Meta(ge=0)] = 1  # Rounds between evaluations on held-out samples; 0: none.
    eval_samples: Positive = 2000
    """Held-out samples of an evaluation, at most: of more, so many drawn at random, the same in every evaluation."""
    eval_clients: Annotated[int, Meta(ge=0)] = 0
    """Clients whose own data the model is evaluated on too, evenly over the population."""
    save_every: Positive = 1  # Rounds between commits to disk.

    def local(self, learning_rate: Rate, optimizer: tuple[AnyOptimizerConfig, ...]) -> LocalConfig:
        """Return the settings of a client. ValueError for a rate beside optimizers."""
        shared = {name: getattr(self, name) for name in LocalConfig.__struct_fields__ if hasattr(self, name)}
        return LocalConfig(learning_rate=learning_rate, optimizer=optimizer, **shared)


class LocalConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A client's local training, as `FederatedTraining` and the job's optimizers say it."""

    epochs: Positive = 1
    batch_size: Positive = 20
    learning_rate: Rate = None
    optimizer: OptimizerTables = ()
    clip_norm: NotNegative = 0.0
    drop_last: bool = False
    micro_batches: MicroBatches = 1
    precision: Precision = "fp32"

    def __post_init__(self) -> None:
        for one in self.optimizer:
            if one.nesterov and not one.momentum:
                raise ValueError("optimizer.nesterov: got true without momentum, expected momentum above 0")
        if self.optimizer and isinstance(self.learning_rate, float | int):
            raise ValueError(f"learning_rate: got {self.learning_rate:g} beside optimizer, expected its lr")

    @property
    def computes(self) -> torch.dtype | None:
        """Return the type in which clients compute; None for the model's own."""
        return torch.bfloat16 if self.precision == "bf16" else None

    @property
    def is_plain(self) -> bool:
        """Return whether steps are those of SGD with a learning rate alone."""
        return is_plain(self.optimizer, self.clip_norm)

    def tabled(self, rounds: int) -> LocalConfig:
        """With tables in place of functions, as `LearningRate.tabled`."""
        if not isinstance(self.learning_rate, LearningRate):
            return self
        return msgspec.structs.replace(self, learning_rate=self.learning_rate.tabled(rounds))

    def used(self, samples: int) -> int:
        """Samples that an epoch goes through, of a client that has so many."""
        return samples - samples % self.batch_size if self.drop_last and samples > self.batch_size else samples

    def steps(self, samples: int) -> int:
        """Batches that a client of so many samples has in all epochs."""
        return self.epochs * -(-self.used(samples) // self.batch_size)

    def parts(self, samples: int) -> list[slice]:
        """Batches that hold every sample once, for a gradient of all. Where an epoch leaves a smaller last batch out,
        they are made as even as possible instead: none has one sample, which batch norm cannot take."""
        if self.used(samples) == samples:
            return [slice(start, min(start + self.batch_size, samples)) for start in range(0, samples, self.batch_size)]
        count = min(-(-samples // self.batch_size), samples // 2)
        ends = [samples * number // count for number in range(count + 1)]
        return [slice(*pair) for pair in itertools.pairwise(ends)]

    def why_alone(self, samples: int) -> str:
        """Return why a client of so many samples has a batch of one, on which batch norm cannot train, and what to do;
        empty where it has none."""
        if self.batch_size == 1:
            return "a batch is one sample: expected a training.batch_size of 2 or more"
        if samples == 1:
            return "it has one sample: federated.participation.min_samples = 2 leaves such clients out"
        if self.used(samples) % self.batch_size == 1:
            return "its last batch is one sample: training.drop_last = true leaves it out"
        return ""


class Workspace:
    """Vectors to train in, kept from client to client: fresh memory of a large model costs as much as a step."""

    def __init__(self, resident: Resident) -> None:
        self._resident = resident
        self._vectors: list[Tensor] = []
        self._used = 0

    def rewind(self) -> None:
        """All vectors are free again."""
        self._used = 0

    def take(self) -> Tensor:
        if self._used == len(self._vectors):
            self._vectors.append(self._resident.empty(self._resident.size))
        self._used += 1
        return self._vectors[self._used - 1]


class ConfiguredLocal:
    """Settings and number of samples of a client at work."""

    def __init__(self, config: LocalConfig, steps: RoundSteps, samples: int) -> None:
        self._config = config
        self._steps = steps
        self.samples = samples

    @property
    def learning_rate(self) -> float:
        return self._steps.learning_rate

    @property
    def steps(self) -> int:
        return self._config.steps(self.samples)


class PlainLocal(ConfiguredLocal):
    """One client in one round: its whole data, its order of batches."""

    def __init__(
        self,
        resident: Resident,
        workspace: Workspace,
        config: LocalConfig,
        data: Batch,
        *,
        steps: RoundSteps,
        seed: int,
        round_: int,
        client: int,
    ) -> None:
        super().__init__(config, steps, len(next(iter(data.values()))))
        self._resident = resident
        self._workspace = workspace
        self._data = data
        self._key = (seed, round_, client)
        self._used = config.used(self.samples)
        workspace.rewind()

    def start(self, model: Tensor) -> Tensor:
        return self._workspace.take().copy_(model)

    def batches(self) -> Iterator[Batch]:
        """The client's own permutation per epoch, in batches of which the last may be smaller."""
        seed, round_, client = self._key
        drawn = torch.from_numpy(orders(seed, round_, [client], self.samples, self._config.epochs)[0])
        for order in self._resident.up(drawn):
            shuffled = {name: column[order] for name, column in self._data.items()}
            yield from _slices(shuffled, self._used, self._config.batch_size)

    def gradient(self, weights: Tensor, batch: Batch) -> Tensor:
        return self._resident.gradient(weights, batch)

    def descend(self, model: Tensor, term: Term | None = None) -> Tensor:
        """In plain SGD the first step reads the model where it lies and the last one leaves the change: to copy a large
        model and to subtract it takes as long as a step."""
        rate, steps = self._steps.rate, self.steps
        if rate is None or term is not None:
            return self._descend_in_place(model, term)
        change, weights = self._workspace.take(), model
        for number, batch in enumerate(self.batches(), 1):
            if number < steps:
                self._resident.descend(weights, batch, rate, out=change)
                weights = change
            else:
                self._resident.arrive(weights, batch, rate, model, out=change)
        return change

    def _descend_in_place(self, model: Tensor, term: Term | None) -> Tensor:
        weights, rate = self.start(model), self._steps.rate
        step = self._steps.descent(self._resident.named(weights)) if rate is None else None
        for batch in self.batches():
            if term is None:
                gradients = [None if g is None else g.to_dense() for g in self._resident.gradients(weights, batch)]
            else:
                gradient = self._resident.gradient(weights, batch)
                term(gradient, weights)
                gradients = self._resident.views(gradient)
                if rate is not None:
                    weights.sub_(gradient, alpha=rate)
            if step is not None:
                step(gradients)
        return weights.sub_(model)

    def full_gradient(self, weights: Tensor) -> Tensor:
        total = self._workspace.take().zero_()
        for part in self._config.parts(self.samples):
            batch = {name: column[part] for name, column in self._data.items()}
            total.add_(self._resident.gradient(weights, batch), alpha=(part.stop - part.start) / self.samples)
        return total


def _slices(data: Batch, samples: int, size: int) -> Iterator[Batch]:
    for start in range(0, samples, size):
        yield {name: column[start : min(start + size, samples)] for name, column in data.items()}
