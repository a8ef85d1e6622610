"""The interface of federated algorithms: a server's values, the clients' training, and how their results are combined;
and an algorithm around another one.

A model is one vector here: its parameters, one after another. So an algorithm reads like its paper, a step of SGD is
one operation, and the same lines train many clients at once when a first dim of clients is put before the vector:
operations must be elementwise, or over the last dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

import msgspec
from torch import Tensor

from isthmus.federated.local import Term
from isthmus.federated.resident import is_buffer

Values = dict[str, Tensor]  # values by name; model-sized vectors [P], or anything smaller
Combine = Literal["weighted_mean", "mean", "sum", "collect"]
"""How the clients' values become the server's: Parrot's four operations. `collect` gives them all, [clients, ...]."""
BUFFERS = "buffers"
"""The module's buffers, `buffers/NAME` each: averaged like FedAvg's model, whatever the algorithm. No value of an
algorithm has such a name."""
Batch = Mapping[str, Tensor]


def changes_of(values: Values, rows: int = 0) -> Values:
    """An update's values but buffers, and single numbers beside a larger value. The first `rows` dims of values are of
    clients."""
    sizes = {name: math.prod(value.shape[rows:]) for name, value in values.items() if not is_buffer(name)}
    largest = max(sizes.values(), default=0)
    return {name: values[name] for name, size in sizes.items() if size > 1 or largest <= 1}


class LocalTrainer(Protocol):
    """A client at work: its data in the order of this round, and gradients on it."""

    @property
    def samples(self) -> int: ...

    @property
    def learning_rate(self) -> float:
        """The learning rate of this round's SGD. UserError where [training] names other steps."""
        ...

    @property
    def steps(self) -> int:
        """Batches of all local epochs."""
        ...

    def start(self, model: Tensor) -> Tensor:
        """A copy of the vector to train in place."""
        ...

    def batches(self) -> Iterator[Batch]:
        """Every batch of every local epoch, drawn from the client's own stream."""
        ...

    def gradient(self, weights: Tensor, batch: Batch) -> Tensor:
        """Return the gradient of the batch's mean loss. The caller may change it, and it lasts until the next call."""
        ...

    def descend(self, model: Tensor, term: Term | None = None) -> Tensor:
        """From the model over all batches, by the job's steps: SGD, or its optimizers. The weights at its end less the
        model; the caller may change it. Quicker than by `start` and `gradient`. `term(gradient, weights)` adds to
        each gradient, in place, what the client's loss has besides the model's."""
        ...

    def full_gradient(self, weights: Tensor) -> Tensor:
        """Return the gradient of the mean loss over all samples of the client; as `gradient`."""
        ...


@dataclass(frozen=True, kw_only=True)
class ClientUpdate:
    """A client's result: a value for every name that the pass declares, and the client's new state if it keeps one."""

    values: Values
    state: Values | Callable[[Values], Values] | None = None
    """A function of the values as they are counted, where the server's values add up what clients keep:
    `[federated.admission]` and `[privacy]` may have scaled them down."""
    weight: float | None = None  # the weight in weighted means; None is the number of samples

    def kept(self, counted: Values) -> Values | None:
        """The client's new state, where its values were counted as these."""
        return self.state(counted) if callable(self.state) else self.state


@dataclass(frozen=True, kw_only=True)
class Cohort:
    """The clients whose values were combined."""

    clients: int  # so many updates are in; with `[privacy]`, as many as are expected
    population: int  # clients that there are
    weights: tuple[float, ...] = field(default=(), repr=False)
    """Weights of the updates, in the order of the rows of collected values; empty when nothing is collected."""


@dataclass(frozen=True, kw_only=True)
class Pass:
    """Once to all clients of the cohort and back. Most algorithms need one a round."""

    returns: Mapping[str, Combine]
    client: Callable[[LocalTrainer, Values, Values | None], ClientUpdate]
    """(data, what was broadcast, the client's state) -> its update. Must not change its arguments."""
    server: Callable[[Values, Values, Cohort], Values]
    """(server's values, combined values, cohort) -> the server's new values. Only the combined ones may be changed."""


class Algorithm(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Subclass, give options as fields, and define `returns`, `client` and `server`; or `passes`, if there are several.

    The first line of the docstring describes it, with its source.

    >>> class SlowFedAvg(Algorithm, frozen=True):
    ...     rate: float = 0.5
    ...     @property
    ...     def returns(self):
    ...         return {"change": "weighted_mean"}
    ...     def client(self, local, broadcast, state):
    ...         return ClientUpdate(values={"change": local.descend(broadcast["model"])})
    ...     def server(self, server, combined, cohort):
    ...         return {"model": server["model"] + self.rate * combined["change"]}
    >>> result = isthmus.federate(
    ...     algorithm=SlowFedAvg(rate=0.3), model=model, loss=loss, clients=clients, rounds=1,
    ...     run=algorithm_folder, overrides={"runtime.executors": 1})
    >>> result.outcome
    'done'
    """

    def init_server(self, model: Tensor) -> Values:
        """The server's values before round 0. `model` is one of them, always."""
        return {"model": model}

    def init_client(self, model: Tensor) -> Values | None:
        """Return a client's first state, which it keeps until it trains again. None: it keeps nothing."""
        return None

    @property
    def state_can_be_lost(self) -> bool:
        """Return whether a client whose state was lost or damaged may go on with that of `init_client`. Not where the
        server's values add up what clients keep, as in SCAFFOLD and FedDyn: they would agree no more."""
        return False

    @property
    def needs_sgd(self) -> str:
        """Return why its clients can take steps of SGD with a learning rate alone. Empty: whatever `local.descend`
        takes."""
        return ""

    def own_model(self, model: Tensor, state: Values) -> Tensor | None:
        """The model [P] that a client uses itself, of the server's and what it keeps: what is evaluated on its data.
        None: the server's. A state's value `model` is taken for one."""
        return state.get("model")

    def change(self, values: Values) -> Values:
        """The part of a client's values that norms are of, and that clipping scales: the model's change. By default all
        but single numbers beside a larger value, which say how the change is to be taken (FedNova's steps), or are
        figures (a loss)."""
        return changes_of(values)

    def largest(self, steps: int) -> Mapping[str, float]:
        """Return by name the largest number that a client of so many steps returns: an update with a larger one is
        refused. For numbers that scale the change, which no norm bounds."""
        return {}

    def broadcast(self, server: Values) -> Values:
        """Return the values that clients receive; sent once per executor and pass."""
        return {"model": server["model"]}

    @property
    def returns(self) -> Mapping[str, Combine]:
        """Return how each value of an update is combined."""
        raise NotImplementedError

    def client(self, local: LocalTrainer, broadcast: Values, state: Values | None) -> ClientUpdate:
        raise NotImplementedError

    def server(self, server: Values, combined: Values, cohort: Cohort) -> Values:
        raise NotImplementedError

    @property
    def passes(self) -> tuple[Pass, ...]:
        return (Pass(returns=self.returns, client=self.client, server=self.server),)


class Wrapping(Algorithm, frozen=True):
    """Subclass, and define `operations` and `changed`. What passes are asked for is the inner algorithm's."""

    inner: Algorithm

    def operations(self, returns: Mapping[str, Combine]) -> Mapping[str, Combine]:
        """Return how the values of a pass are combined, in place of what the inner algorithm declares."""
        raise NotImplementedError

    def changed(self, returns: Mapping[str, Combine], combined: Values, cohort: Cohort) -> Values:
        """Return the values for the inner algorithm's server, from the results of `operations`."""
        raise NotImplementedError

    def counted(self, cohort: Cohort) -> Cohort:
        """The cohort that the inner algorithm's server is given."""
        return cohort

    @property
    def adds_noise(self) -> bool:
        """Return whether sums have noise that does not depend on whose updates are in them: those of nobody have it
        too."""
        return False

    def init_server(self, model: Tensor) -> Values:
        return self.inner.init_server(model)

    def init_client(self, model: Tensor) -> Values | None:
        return self.inner.init_client(model)

    @property
    def state_can_be_lost(self) -> bool:
        return self.inner.state_can_be_lost

    @property
    def needs_sgd(self) -> str:
        return self.inner.needs_sgd

    def own_model(self, model: Tensor, state: Values) -> Tensor | None:
        return self.inner.own_model(model, state)

    def change(self, values: Values) -> Values:
        return self.inner.change(values)

    def largest(self, steps: int) -> Mapping[str, float]:
        return self.inner.largest(steps)

    def broadcast(self, server: Values) -> Values:
        return self.inner.broadcast(server)

    @property
    def passes(self) -> tuple[Pass, ...]:
        return tuple(self._around(one) for one in self.inner.passes)

    def _around(self, one: Pass) -> Pass:
        def server(values: Values, combined: Values, cohort: Cohort) -> Values:
            return one.server(values, self.changed(one.returns, combined, cohort), self.counted(cohort))

        return Pass(returns=self.operations(one.returns), client=one.client, server=server)
