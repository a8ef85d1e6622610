"""A client's steps: by round a learning rate, or optimizers and a bound on gradients.

The learning rate follows the rounds and stays for all local steps of one: the papers' proofs let it fall so (Li et al.
2020; Reddi et al. 2021), clients of one round have different numbers of steps, and the sums that algorithms keep
(SCAFFOLD's control variates, FedNova's steps) count with one rate a round. Optimizers begin anew in every round: a
client that is drawn once in a while would go on with what its gradients were like at another model.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import msgspec
import torch
from torch import Tensor, nn

from isthmus.combinations import refused
from isthmus.errors import UserError
from isthmus.training.learning_rate import CONSTANT, LearningRate
from isthmus.training.optim import AnyOptimizerConfig, Optimizers, choose, clip, gradient_norms, settings_of

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
