"""One module that trains every client: its parameters are views of whatever vector is to be trained.

Nothing is built per client. A vector [P] holds the parameters in the module's order, without padding.

Its buffers may be of any type: every client starts from the server's, and what training changed is sent.

What a client sends of a buffer is its change, in double precision: the server adds the weighted mean of the changes.
A buffer that nobody changes (a mask with -inf, a table of float64) is never sent and keeps its bits; under secure
aggregation, where nobody may see which ones changed, zeros are sent of it. Of whole numbers (batch norm's count of
batches) the mean is rounded to the nearest, half to even.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from isthmus.accelerators import HOST, Accelerator
from isthmus.accelerators.copies import to_device
from isthmus.errors import Diverged, UserError
from isthmus.graph.label_means import LabelMeans
from isthmus.graph.outputs import Batch, loss_and_count, split_outputs

T = TypeVar("T")
PREFIX = "buffers/"  # prefix of a buffer's name among the server's values, in broadcasts and in updates


def is_buffer(name: str) -> bool:
    """Return whether a value is a buffer of the model, or its change."""
    return name.startswith(PREFIX)


def buffers_of(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the buffers by the module's own names."""
    return {name.removeprefix(PREFIX): value for name, value in values.items() if is_buffer(name)}


def as_values(buffers: Mapping[str, T]) -> dict[str, T]:
    """Return the values of which `buffers_of` gives these buffers."""
    return {PREFIX + name: value for name, value in buffers.items()}


class ModuleBuffers:
    """Those of one module, under their names as of the beginning. The forward may write to them or assign others."""

    def __init__(self, module: nn.Module, computes: torch.dtype | None = None) -> None:
        """With `computes` the module takes that type. Values are of the first types still."""
        self._first = {name: buffer.detach().clone() for name, buffer in module.named_buffers()}
        if computes is not None:
            _cast(module, computes)
        self._slots: list[tuple[nn.Module, dict[str, Tensor | None]]] = []
        """Each module with buffers, and those that it had first."""
        self._names: dict[int, str] = {}
        self.own: dict[str, Tensor] = {}
        """Memory that stays the module's; a buffer that several modules share is there once."""
        self._cached: set[str] = set()  # not in a state dict: one that changes its shape is no state
        for prefix, owner in module.named_modules():
            slots = dict(owner._buffers)  # pyright: ignore[reportPrivateUsage]
            self._slots.append((owner, slots))
            for key, buffer in slots.items():
                if buffer is not None and id(buffer) not in self._names:
                    name = f"{prefix}.{key}" if prefix else key
                    self._names[id(buffer)] = name
                    self.own[name] = buffer
        frozen = [(name, p) for name, p in module.named_parameters() if not p.requires_grad]
        self._frozen = [(name, p, p._version) for name, p in frozen]

    def now(self) -> dict[str, Tensor]:
        """Copies."""
        return {name: buffer.detach().clone() for name, buffer in self._found().items()}

    @torch.no_grad()
    def set(self, values: Mapping[str, Tensor]) -> None:
        """The module has these, and of all others its first ones. UserError for one that it has not."""
        for owner, slots in self._slots:
            held = owner._buffers  # pyright: ignore[reportPrivateUsage]
            if held.keys() != slots.keys() or any(held[key] is not slot for key, slot in slots.items()):
                held.clear()
                held.update(slots)
        for name, value in values.items():
            first = self._first.get(name)
            if first is None or (first.shape, first.dtype) != (value.shape, value.dtype):
                raise UserError(f"model: got a buffer {name!r} of {_form(value)}, which the model has not in that form")
        for name, buffer in self.own.items():
            value = values.get(name, self._first[name])
            if not _same_bits(buffer, value):  # a constant's memory may be shared with other processes, or expanded
                buffer.copy_(value)

    @torch.no_grad()
    def changes(self, since: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the changes of the buffers that are not as in `since`, or as at first: float64, of complex ones [...,
        2]. UserError for a change that has no mean."""
        for name, parameter, version in self._frozen:
            if parameter._version != version:
                what = f"model: training writes to the frozen parameter {name!r}"
                raise UserError(f"{what}, expected a buffer (register_buffer): each client's would be another")
        found: dict[str, Tensor] = {}
        for name, now in self._found().items():
            before = since.get(name, self._first[name])
            before = before.to(self.own[name].dtype).to(before.dtype)  # as training began with it
            if not _same_bits(before, now.detach()):
                found[name] = _change(name, before, now)
        return found

    def _found(self) -> dict[str, Tensor]:
        """Where they are now. UserError for one of another form than at first, unless it is a cache."""
        found: dict[str, Tensor] = {}
        for owner, slots in self._slots:
            cached: set[str] = owner._non_persistent_buffers_set  # pyright: ignore[reportPrivateUsage]
            for key, now in owner._buffers.items():  # pyright: ignore[reportPrivateUsage]
                first = slots.get(key)
                name = None if first is None else self._names[id(first)]
                if now is None or (name in found and now is first):
                    continue
                if name is not None and first is not None and now.shape == first.shape:
                    found[name] = now
                elif key not in cached:
                    got = "none" if first is None else _form(first)
                    what = f"model: buffer {key!r} of {type(owner).__name__} became {_form(now)} in training"
                    raise UserError(f"{what}, was {got}: expected one form from the beginning")
        return {name: found.get(name, own).to(self._first[name].dtype) for name, own in self.own.items()}


def _cast(module: nn.Module, dtype: torch.dtype) -> None:
    """Parameters and buffers of floats take the type; what several modules share stays one tensor."""
    made: dict[int, tuple[Tensor, Tensor]] = {}  # with the tensor, so that no other gets its identity

    def cast(tensor: Tensor) -> Tensor:
        return made.setdefault(id(tensor), (tensor, tensor.to(dtype)))[1] if tensor.is_floating_point() else tensor

    module._apply(cast)  # pyright: ignore[reportPrivateUsage]


def numbers_form(buffer: Tensor) -> tuple[int, ...]:
    """The shape of its change."""
    return (*buffer.shape, 2) if buffer.is_complex() else tuple(buffer.shape)


def moved(buffer: Tensor, change: Tensor) -> Tensor:
    """The buffer with the mean change added, in its own type; where that is 0, its own bits. Diverged where the sum is
    not finite."""
    if buffer.is_complex():
        return torch.view_as_complex(moved(torch.view_as_real(buffer), change))
    if not buffer.is_floating_point():
        whole = change.round()
        if buffer.dtype == torch.bool:
            return (buffer.double() + change).round() != 0
        return (buffer.to(torch.int64) + whole.to(torch.int64)).to(buffer.dtype)
    found = torch.where(change == 0, buffer, (buffer.double() + change).to(buffer.dtype))
    if not bool(torch.isfinite(found[change != 0]).all()):
        raise Diverged("a buffer of the model is not finite any more: try a smaller learning rate")
    return found


def _change(name: str, before: Tensor, now: Tensor) -> Tensor:
    if now.device.type == "mps":  # it has no double precision
        before, now = before.cpu(), now.cpu()
    if now.is_complex():
        before, now = torch.view_as_real(before), torch.view_as_real(now)
    if not now.is_floating_point():
        if now.dtype in (torch.bool, torch.uint64):
            return now.double() - before.double()
        return (now.to(torch.int64) - before.to(torch.int64)).double()
    change = torch.where(_alike(before, now), 0.0, now.double() - before.double())
    lost = ~torch.isfinite(change) & torch.isfinite(now)
    if bool(lost.any()):
        number = float(before[lost][0])
        what = f"model: buffer {name!r} is {number:g} at first and {float(now[lost][0]):g} after training"
        raise UserError(f"{what}: expected finite first values: clients' changes from {number:g} have no mean")
    return change


def _alike(a: Tensor, b: Tensor) -> Tensor:
    a, b = a.double(), b.double()
    return (a == b) | (a.isnan() & b.isnan())


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if a.data_ptr() == b.data_ptr():
        return True
    return torch.equal(*(t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)))


def _form(buffer: Tensor) -> str:
    return f"{str(buffer.dtype).removeprefix('torch.')} {list(buffer.shape)}"


_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class Resident:
    """A module whose parameters are all of one floating dtype. UserError for another one.

    Its buffers of every type (running means, counts of batches) are its state beside the vector: `set_buffers` gives
    a client the server's, `buffer_changes` says what training made of them.
    """

    def __init__(self, module: nn.Module, accelerator: Accelerator = HOST, computes: torch.dtype | None = None) -> None:
        """On the CPU this is the module itself; elsewhere a copy. With `computes` it is a copy of that type: vectors
        and gradients are of the module's own."""
        self.accelerator = accelerator
        self.module = module = self._moved(module) if accelerator.asynchronous or computes else module
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        if not self._parameters:
            raise UserError("model: got no trainable parameter, expected at least one")
        self.dtype = self._parameters[0].dtype
        others = {p.dtype for p in self._parameters} - {self.dtype}
        if others or not self.dtype.is_floating_point:
            raise UserError(
                f"model: got parameters of {self.dtype} and {others or 'no other'}, expected one float type"
            )
        self.computes = computes or self.dtype
        self._shapes = [p.shape for p in self._parameters]
        self._sizes = [p.numel() for p in self._parameters]
        self._buffers = ModuleBuffers(module, computes)
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
        return torch.cat([p.detach().reshape(-1).to(self.dtype) for p in self._parameters], out=out)

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
        """From now on the module's parameters are the vector's memory; where it computes in another type, a copy."""
        views = self._views(vector)
        if self.computes != self.dtype:
            torch._foreach_copy_([p.data for p in self._parameters], views)  # pyright: ignore[reportPrivateUsage]
            return
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
        return self._gradients_of(mean_loss(self.module, batch, uneven=self.uneven))

    def _gradients_of(self, loss: Tensor, seed: Tensor | None = None) -> Sequence[Tensor | None]:
        found = torch.autograd.grad(loss, self._parameters, seed, allow_unused=True)
        if self.computes == self.dtype:
            return found
        each = cast("Sequence[Tensor | None]", found)
        return [None if part is None else part.to(self.dtype) for part in each]

    def mean_loss(self, batch: Batch, call: Callable[..., object]) -> Tensor:
        """A batch's mean loss by `call` in the module's place, in as many parts as `gradients` has."""
        pieces = pieces_of(len(next(iter(batch.values()))), self.micro_batches)
        if pieces == 1:
            return mean_loss(self.module, batch, uneven=self.uneven, call=call)
        each = [loss_and_count(self.module, row, uneven=self.uneven, call=call) for row in parts_of(batch, pieces)]
        total, counts = sum(loss for loss, *_ in each), [count for _, count, _ in each if count is not None]
        return cast(Tensor, total / (_or_one(cast(Tensor, sum(counts))) if counts else pieces))

    def _summed_parts(self, batch: Batch, pieces: int) -> Sequence[Tensor | None]:
        """In the order and with the roundings of a pipeline's engine."""
        share = torch.full((), 1.0 / pieces, device=self.accelerator.device)
        sums: list[Tensor | None] = [None] * len(self._parameters)
        counted: float | None = None
        for row in parts_of(batch, pieces):
            loss, count, _ = loss_and_count(self.module, row, uneven=self.uneven)
            if count is not None:
                counted = (counted or 0.0) + float(count)
            seed = share.to(loss) if count is None else None
            for number, part in enumerate(self._gradients_of(loss, seed)):
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


def parts_of(batch: Batch, pieces: int) -> Iterator[dict[str, Tensor]]:
    """Cut the batch into so many micro-batches."""
    for row in zip(*(column.chunk(pieces) for column in batch.values()), strict=True):
        yield dict(zip(batch, row, strict=True))


def mean_loss(module: nn.Module, batch: Batch, *, uneven: bool, call: Callable[..., object] | None = None) -> Tensor:
    """A batch's mean loss. Where all labels are left out (`uneven`: some may be) it is 0, and so is its gradient."""
    call = call or module
    loss, count, _ = loss_and_count(module, batch, uneven=True, call=call) if uneven else split_outputs(call(**batch))
    return loss if count is None else loss / _or_one(count)


def _or_one(count: Tensor) -> Tensor:
    return count.masked_fill(count == 0, 1)  # weights of classes may be below 1
