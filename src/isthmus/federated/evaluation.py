"""How good a model is: on held-out samples, and on the clients' own data, one client at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np
import torch
from torch import Tensor

from isthmus.accelerators import HOST, Accelerator
from isthmus.accelerators.copies import all_to_device
from isthmus.federated.resident import Resident, loss_of

BATCH = 256


class ClientAccuracies(msgspec.Struct, frozen=True, kw_only=True):
    """The distribution over clients."""

    clients: int
    mean: float
    worst_decile: float
    """Mean of the worst tenth."""
    deviation: float


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    loss: float | None
    """On held-out samples; None where there are none."""
    accuracy: float | None
    """None for a model that gives no `logits`, or data without `labels` that are their classes."""
    clients: ClientAccuracies | None = None


class Evaluator:
    """Keeps a module of its own: the one that trains is elsewhere. It moves to its accelerator when it first evaluates:
    by then executors have been forked."""

    def __init__(
        self,
        resident: Resident,
        test: Mapping[str, Tensor] | None,
        load: Callable[[int], Mapping[str, Tensor]] | None = None,
        clients: Sequence[int] = (),
        *,
        accelerator: Callable[[], Accelerator] = lambda: HOST,
    ) -> None:
        """`test` are held-out samples, if there are any; `load` gives the data of `clients`, which are evaluated one by
        one."""
        self._resident = resident
        self._accelerator = accelerator
        self._test = test
        self._placed = False
        self._load = load
        self._clients = clients

    def _cast(self, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
        dtype = self._resident.dtype
        cast = {name: c.to(dtype) if c.dtype.is_floating_point else c for name, c in columns.items()}
        return all_to_device(self._resident.accelerator, cast)

    def _place(self) -> None:
        if not self._placed:
            self._resident = Resident(self._resident.module, self._accelerator())
            self._test = None if self._test is None else self._cast(self._test)
            self._placed = True

    def evaluate(
        self, model: Tensor, buffers: Tensor | None = None, own: Callable[[int], Tensor] | None = None
    ) -> Evaluation:
        """In eval mode, without gradients. With `own`, every client is evaluated with its own model; the server's is
        nobody's then, and held-out samples say nothing."""
        self._place()
        module = self._resident.module
        self._resident.bind(self._resident.up(model))
        if buffers is not None:
            self._resident.set_buffers(self._resident.up(buffers))
        module.eval()
        with torch.no_grad():
            idle = self._test is None or own is not None
            loss, accuracy = (None, None) if idle or self._test is None else self._on(self._test)
            each = [self._of_client(client, own) for client in self._clients] if self._load is not None else []
        module.train()
        known = np.sort([a for a in each if a is not None])
        found = None
        if len(known):
            worst = known[: max(1, len(known) // 10)]
            found = ClientAccuracies(
                clients=len(known),
                mean=float(known.mean()),
                worst_decile=float(worst.mean()),
                deviation=float(known.std()),
            )
        return Evaluation(loss=loss, accuracy=accuracy, clients=found)

    def _of_client(self, client: int, own: Callable[[int], Tensor] | None) -> float | None:
        assert self._load is not None, "there are clients"
        if own is not None:
            self._resident.bind(self._resident.up(own(client)))
        return self._on(self._cast(self._load(client)))[1]

    def _on(self, columns: Mapping[str, Tensor]) -> tuple[float, float | None]:
        """Mean loss and accuracy."""
        count = len(next(iter(columns.values())))
        total, right, judged = 0.0, 0, 0
        for start in range(0, count, BATCH):
            batch = {name: column[start : start + BATCH] for name, column in columns.items()}
            here = len(next(iter(batch.values())))
            output: object = self._resident.module(**batch)
            total += float(loss_of(output)) * here
            if isinstance(output, Mapping) and "logits" in output and "labels" in batch:
                found = _right(output["logits"], batch)
                right, judged = right + found[0], judged + found[1]
        return total / count, right / judged if judged else None


def _right(logits: Tensor, batch: Mapping[str, Tensor]) -> tuple[int, int]:
    """How many labels are found, of how many: none where they are no classes of the logits' last dim.

    A causal model that is given its inputs as labels shifts them itself: what it says of a token is the next one.
    """
    guesses, labels = logits.argmax(-1), batch["labels"]
    if guesses.shape != labels.shape or labels.is_floating_point():
        return 0, 0
    if "input_ids" in batch and torch.equal(labels, batch["input_ids"]):
        guesses, labels = guesses[:, :-1], labels[:, 1:]
    counted = labels >= 0  # -100 is torch's for one that is left out
    return int((guesses == labels)[counted].sum()), int(counted.sum())
