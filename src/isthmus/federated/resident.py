"""One module that trains every client: its parameters are views of whatever vector is to be trained.

Nothing is built per client. A vector [P] holds the parameters in the module's order, without padding.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from isthmus.accelerators import HOST, Accelerator
from isthmus.accelerators.copies import to_device
from isthmus.errors import UserError
from isthmus.federated.buffers import ModuleBuffers, numbers_form
from isthmus.graph.label_means import LabelMeans
from isthmus.graph.outputs import Batch, loss_and_count, split_outputs

_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class Resident:
    """A module whose parameters are all of one floating dtype. UserError for another one.

    Its buffers of every type (running means, counts of batches) are its state beside the vector: `set_buffers` gives
    a client the server's, `buffer_changes` says what training made of them.
    """

    def __init__(self, module: nn.Module, accelerator: Accelerator = HOST) -> None:
        """On the CPU this is the module itself; elsewhere a copy."""
        self.accelerator = accelerator
        self.module = module = self._moved(module) if accelerator.asynchronous else module
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        if not self._parameters:
            raise UserError("model: got no trainable parameter, expected at least one")
        self.dtype = self._parameters[0].dtype
        others = {p.dtype for p in self._parameters} - {self.dtype}
        if others or not self.dtype.is_floating_point:
            raise UserError(
                f"model: got parameters of {self.dtype} and {others or 'no other'}, expected one float type"
            )
        self._shapes = [p.shape for p in self._parameters]
        self._sizes = [p.numel() for p in self._parameters]
        self._buffers = ModuleBuffers(module)
        self.size = sum(self._sizes)
        self._gradient: Tensor | None = None  # not before somebody asks for one: most algorithms only descend
        self._known: dict[int, tuple[Tensor, list[Tensor]]] = {}
        """Vectors that were bound last and their views, by address: held, so that nobody else gets the address."""
        self._bound = 0
        self.micro_batches = 1  # into how many parts a batch is cut, at most
        self.uneven = False  # whether a loss may leave labels out (-100), or counts them itself
        module.train()

    def _moved(self, module: nn.Module) -> nn.Module:
        # As `to` does it, but by way of a host buffer that the accelerator reads without waiting.
        return copy.deepcopy(module)._apply(self.up)  # pyright: ignore[reportPrivateUsage]

    def vector(self, out: Tensor | None = None) -> Tensor:
        """The parameters as they are, [P]; in `out`, where that is given."""
        return torch.cat([p.detach().reshape(-1) for p in self._parameters], out=out)

    def up(self, tensor: Tensor) -> Tensor:
        """Where the module is."""
        return to_device(self.accelerator, tensor)

    def empty(self, size: int) -> Tensor:
        """A vector of the parameters' type, where they are."""
        return torch.empty(size, dtype=self.dtype, device=self.accelerator.device)

    def views(self, vector: Tensor) -> list[Tensor]:
        """Each parameter's part of a vector [..., P], in its shape."""
        parts = vector.split(self._sizes, dim=-1)
        before = vector.shape[:-1]
        return [part.view((*before, *shape)) for part, shape in zip(parts, self._shapes, strict=True)]

    def given(self, whose: str, columns: Batch) -> str:
        """In words, for what goes wrong then: whose data the module is given, and what it takes."""
        takes = [p.name for p in inspect.signature(self.module.forward).parameters.values() if p.kind in _BY_NAME]
        return f"model (it takes {', '.join(takes)}), given {whose} columns {', '.join(columns)}"

    @property
    def names(self) -> Sequence[str]:
        return [name for name, p in self.module.named_parameters() if p.requires_grad]

    def named(self, vector: Tensor) -> dict[str, Tensor]:
        """The vector's parts under the module's own names."""
        return dict(zip(self.names, self.views(vector), strict=True))

    def buffers(self) -> dict[str, Tensor]:
        return self._buffers.now()

    @property
    def buffer_forms(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of changes, by name."""
        return {name: numbers_form(buffer) for name, buffer in self._buffers.own.items()}

    def set_buffers(self, values: Mapping[str, Tensor]) -> None:
        """These, and the first values of all others. UserError for one that the model has not in that form."""
        self._buffers.set(values)

    def buffer_changes(self, since: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the training's changes of buffers, since they had these values and others their first; as
        `ModuleBuffers.changes`."""
        return self._buffers.changes(since)

    def bind(self, vector: Tensor) -> None:
        """From now on the module's parameters are the vector's memory."""
        views = self._views(vector)
        if vector.data_ptr() == self._bound:
            return
        for p, view in zip(self._parameters, views, strict=True):
            p.data = view
        self._bound = vector.data_ptr()

    def _views(self, vector: Tensor) -> list[Tensor]:
        """Return the same as `views`, made once for the two that a client goes back and forth between."""
        address = vector.data_ptr()
        if address not in self._known:
            for other in [a for a in self._known if a != self._bound][: len(self._known) - 1]:
                del self._known[other]
            self._known[address] = (vector, self.views(vector))
        return self._known[address][1]

    def let_go(self) -> None:
        """Hold no parameters until `bind`."""
        for p in self._parameters:
            p.data = self.empty(0)
        self._known, self._bound = {}, 0

    def gradient(self, weights: Tensor, batch: Batch) -> Tensor:
        """Return the gradient of the batch's mean loss, [P]. It lasts until the next call."""
        if self._gradient is None:
            self._gradient = self.empty(self.size)
        for view, part in zip(self.views(self._gradient), self.gradients(weights, batch), strict=True):
            if part is None:
                view.zero_()
            else:
                view.copy_(part.to_dense())  # of an embedding it may be sparse
        return self._gradient

    def descend(self, weights: Tensor, batch: Batch, rate: float, *, out: Tensor) -> None:
        """out <- weights - rate x gradient, without a vector of the gradient in between. `out` may be the weights."""
        parts = self.gradients(weights, batch)
        for view, to, part in zip(self._views(weights), self._views(out), parts, strict=True):
            if part is not None:
                torch.sub(view, part, alpha=rate, out=to)
            elif to is not view:
                to.copy_(view)

    def arrive(self, weights: Tensor, batch: Batch, rate: float, model: Tensor, *, out: Tensor) -> None:
        """out <- weights - model - rate x gradient: the change that a descent from the model ends with. The weights may
        be the model, and `out` the weights."""
        parts = self.gradients(weights, batch)
        each = zip(self._views(weights), self._views(model), self._views(out), parts, strict=True)
        for view, start, to, part in each:
            if part is None:
                torch.sub(view, start, out=to)
            elif view is start:
                torch.mul(part.to_dense(), -rate, out=to)  # of an embedding it may be sparse
            else:
                torch.sub(view, start, out=to).sub_(part, alpha=rate)

    def gradients(self, weights: Tensor, batch: Batch) -> Sequence[Tensor | None]:
        """Return the gradients of the batch's mean loss by parameter; None where the loss does not depend on one."""
        self.bind(weights)
        if self.micro_batches > 1:
            return self._summed_parts(batch, pieces_of(len(next(iter(batch.values()))), self.micro_batches))
        loss = mean_loss(self.module, batch, uneven=self.uneven)
        return torch.autograd.grad(loss, self._parameters, allow_unused=True)

    def _summed_parts(self, batch: Batch, pieces: int) -> Sequence[Tensor | None]:
        """In the order and with the roundings of a pipeline's engine."""
        rows = zip(*(column.chunk(pieces) for column in batch.values()), strict=True)
        share = torch.full((), 1.0 / pieces, device=self.accelerator.device)
        sums: list[Tensor | None] = [None] * len(self._parameters)
        counted: float | None = None
        for row in rows:
            loss, count, _ = loss_and_count(self.module, dict(zip(batch, row, strict=True)), uneven=self.uneven)
            if count is not None:
                counted = (counted or 0.0) + float(count)
            seed = share.to(loss) if count is None else None
            found = cast(
                "Sequence[Tensor | None]", torch.autograd.grad(loss, self._parameters, seed, allow_unused=True)
            )
            for number, part in enumerate(found):
                before = sums[number]
                if part is not None:
                    sums[number] = part.clone() if before is None else before.add_(part)
        return sums if counted is None else [part if part is None else part.div_(counted or 1.0) for part in sums]

    def counts(self, batch: Batch) -> bool:
        """Return whether the module's loss counts labels though none of them is negative. Its buffers are the first
        ones then."""
        with torch.no_grad(), LabelMeans(self.module, batch.values(), uneven=False) as means:
            loss, *_ = split_outputs(self.module(**batch))
        self.set_buffers({})
        return not means.is_plain(loss)

    def draws(self, batch: Batch) -> bool:
        """Return whether the module draws random numbers while it trains. Its buffers are the first ones then."""
        before = self.accelerator.random_state()
        with torch.no_grad():
            self.module(**batch)
        self.set_buffers({})
        drew = not torch.equal(before, self.accelerator.random_state())
        self.accelerator.set_random_state(before)
        return drew


def pieces_of(samples: int, most: int) -> int:
    """Into how many equal micro-batches a batch is cut, at most."""
    return next(pieces for pieces in range(min(most, samples), 0, -1) if samples % pieces == 0)


def mean_loss(module: nn.Module, batch: Batch, *, uneven: bool, call: Callable[..., object] | None = None) -> Tensor:
    """A batch's mean loss. Where all labels are left out (`uneven`: some may be) it is 0, and so is its gradient."""
    call = call or module
    loss, count, _ = loss_and_count(module, batch, uneven=True, call=call) if uneven else split_outputs(call(**batch))
    return loss if count is None else loss / count.masked_fill(count == 0, 1)  # weights of classes may be below 1
