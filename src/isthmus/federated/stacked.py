"""Several clients of equal numbers of samples at work as one: their vectors stacked, one vmap over all of them.

For small models, where calling torch takes longer than what it computes. The algorithm is the same code: vectors have a
first dim of clients. Sums inside a batched kernel may be taken in another order, so bits differ from one by one (the
numbers agree to 1e-5), and a run keeps to what it began with.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap

from isthmus.federated.local import LocalConfig
from isthmus.federated.resident import Batch, Resident, loss_of
from isthmus.streams import stream

MOST_TOGETHER = 32
PAYS = 1.2
"""So many times faster it must be to give up one by one."""


class Stacked:
    """Gradients of many models of one shape at once."""

    def __init__(self, resident: Resident) -> None:
        names = list(resident.names)

        def loss(vector: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
            parameters = dict(zip(names, resident.views(vector), strict=True))
            return loss_of(functional_call(resident.module, parameters, (), dict(batch)))

        self._gradient: Callable[[Tensor, Batch], Tensor] = vmap(grad(loss))

    def gradient(self, weights: Tensor, batch: Batch) -> Tensor:
        """`weights` [clients, P], columns [clients, batch, ...] -> [clients, P]."""
        return self._gradient(weights, batch)


class StackedLocal:
    """The `Local` of several clients in one round."""

    def __init__(
        self,
        stacked: Stacked,
        config: LocalConfig,
        data: Sequence[Batch],
        *,
        seed: int,
        round_: int,
        clients: Sequence[int],
    ) -> None:
        self._stacked = stacked
        self._config = config
        self._data = data
        self._keys = [(seed, round_, client) for client in clients]
        self.samples = len(next(iter(data[0].values())))

    @property
    def learning_rate(self) -> float:
        return self._config.learning_rate

    def start(self, model: Tensor) -> Tensor:
        return model.expand(len(self._data), -1).clone()

    def batches(self) -> Iterator[Batch]:
        """Of all clients in step: each one's own permutation."""
        draws = [stream(seed, "order", round_, client) for seed, round_, client in self._keys]
        for _ in range(self._config.epochs):
            orders = [torch.from_numpy(d.permutation(self.samples)) for d in draws]
            shuffled = {
                name: torch.stack([one[name][order] for one, order in zip(self._data, orders, strict=True)])
                for name in self._data[0]
            }
            yield from self._slices(shuffled)

    def _slices(self, columns: Batch) -> Iterator[Batch]:
        size = self._config.batch_size
        for start in range(0, self.samples, size):
            yield {name: column[:, start : start + size] for name, column in columns.items()}

    def gradient(self, weights: Tensor, batch: Batch) -> Tensor:
        return self._stacked.gradient(weights, batch)

    def full_gradient(self, weights: Tensor) -> Tensor:
        whole = {name: torch.stack([one[name] for one in self._data]) for name in self._data[0]}
        total = torch.zeros_like(weights)
        for batch in self._slices(whole):
            share = next(iter(batch.values())).shape[1] / self.samples
            total.add_(self._stacked.gradient(weights, batch), alpha=share)
        return total


def best_together(resident: Resident, columns: Batch, *, repeats: int = 5) -> int:
    """How many clients are trained together fastest, by measurement on one batch; 1 where the model does not allow it.

    Models that draw random numbers or keep running means are trained one by one: each client must have its own.
    """
    if len(resident.buffers()) or resident.draws(columns):
        return 1
    model, stacked = resident.vector(), Stacked(resident)
    plain_s = _quickest_s(lambda: resident.gradient(model, columns), repeats)
    found, found_s = 1, plain_s / PAYS
    count = 4
    while count <= MOST_TOGETHER:
        weights = model.expand(count, -1).clone()
        batch = {name: column.expand(count, *column.shape).clone() for name, column in columns.items()}
        try:
            each_s = _quickest_s(lambda w=weights, b=batch: stacked.gradient(w, b), repeats) / count
        except RuntimeError:  # an operation without a batching rule, or control flow on values
            return 1
        if each_s < found_s:
            found, found_s = count, each_s
        count *= 2
    return found


def _quickest_s(act: Callable[[], object], repeats: int) -> float:
    act()
    found: list[float] = []
    for _ in range(repeats):
        start_s = time.perf_counter()
        act()
        found.append(time.perf_counter() - start_s)
    return min(found)
