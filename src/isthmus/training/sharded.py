"""A stage whose parameters are shared out over ranks, as FSDP2 does it (ZeRO, stage 3).

Each rank keeps its part of every parameter that the stage owns: master weights, gradient, optimizer state. A parameter
is gathered where an operator needs it, in the type that the operator computes in, and freed after the last use.
Autograd saves none of it: the backward pass gathers it again. Its gradient is summed over the ranks in
`gradient_dtype`, and each rank keeps its part. (torch's `fully_shard` does this to modules. This does it to operators.)

    forward    part ── all-gather ──► parameter ─► operators ─► let go
    backward   part ── all-gather ──► parameter ─► its gradient ── reduce-scatter ──► part of the sum

Optimizers work element by element, so a part's update is that of its elements. All ranks call the same methods in the
same order; what comes back whole is on rank 0 alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from isthmus.accelerators import Accelerator
from isthmus.accelerators.copies import to_device, to_host
from isthmus.graph.opgraph import Op, Ref
from isthmus.graph.partition import StageGraph
from isthmus.training.checkpoint import OPTIMIZER
from isthmus.training.collectives import Collectives
from isthmus.training.engine import EngineConfig, TorchEngine
from isthmus.training.gradients import gradient_dtype
from isthmus.training.optim import NO_GRADIENT, STEP
from isthmus.training.stored import Sent, in_memory

Whole = Literal["parameters", "gradients", "sums", "values"]
"""Tensors of owned parameters: those that optimizers update; gradients after `collect`; gradients before it, which are
forgotten; values of the type that computes."""


class _Handle(NamedTuple):
    """A view of a parameter that is kept for the backward."""

    name: str
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, engine: ShardedEngine, name: str) -> Tensor:
        ctx.engine, ctx.name = engine, name
        return engine.put_together(name)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.engine.take_apart(ctx.name, gradients[0]), None, None


class _Values(dict[Ref, Tensor]):
    """Parameters come into being when an operator takes them, and are dropped with the last that does."""

    def __init__(self, found: Mapping[Ref, Tensor], uses: Mapping[Ref, int], make: Callable[[str], Tensor]) -> None:
        super().__init__(found)
        self._left = dict(uses)
        self._make = make

    def __getitem__(self, ref: Ref) -> Tensor:
        if ref not in self._left:
            return super().__getitem__(ref)
        found = self.get(ref)
        if found is None:
            found = self[ref] = self._make(ref.op)
        self._left[ref] -= 1
        if self._left[ref] <= 0:
            del self[ref]
        return found


class ShardedEngine(TorchEngine):
    """A `TorchEngine` on each rank. Those parameters that another stage owns are whole on all of them."""

    def __init__(
        self,
        train: StageGraph,
        evaluation: StageGraph,
        config: EngineConfig,
        weights: Mapping[str, Tensor],
        *,
        accelerator: Accelerator,
        recompute: bool = False,
        frozen: bool = False,
        replaced: Mapping[str, Callable[..., object]] = {},
    ) -> None:
        """`weights` are whole, in host memory."""
        self._ranks = Collectives(accelerator)
        self._parts: dict[str, torch.dtype] = {}
        """Op names of the parameters that are shared out, with the type that they compute in."""
        self._shapes: dict[str, torch.Size] = {}  # shapes of whole parameters, by their own names
        self._alive: dict[int, tuple[str, StorageWeakRef]] = {}
        """Parameters that may be whole at this moment, by address."""
        self._again: dict[str, Tensor] = {}  # parameters that a backward has put together and still needs
        for op in train.variables():
            if op.kind == "parameter" and op.name not in train.shared_from:
                self._shapes[op.target] = weights[op.target].shape
        parts = {
            name: self._ranks.part(value) if self._is_shaped(name, value) else value for name, value in weights.items()
        }
        super().__init__(
            train,
            evaluation,
            config,
            parts,
            accelerator=accelerator,
            recompute=recompute,
            frozen=frozen,
            replaced=replaced,
        )
        self._uses = {mode: self._count(graph) for mode, graph in (("train", train), ("eval", evaluation))}

    def _is_shaped(self, name: str, value: Tensor) -> bool:
        """Return whether it is an optimizer's tensor, with the elements of a parameter that is shared out."""
        parameter, _, key = name.removeprefix(OPTIMIZER).rpartition(".")
        return name.startswith(OPTIMIZER) and value.shape == self._shapes.get(parameter) and key != STEP

    def _count(self, graph: StageGraph) -> dict[Ref, int]:
        taken = Counter(ref for op in graph.ops for ref in op.refs() if ref.op in self._parts)
        return dict(taken)

    def _hold(self, op: Op, weights: Mapping[str, Sent], *, trains: bool) -> None:
        if not trains or op.name in self.train.shared_from:
            super()._hold(op, weights, trains=trains)
            return
        dtype = cast(torch.dtype, getattr(torch, op.outputs[0].dtype))
        part = self._ranks.part(in_memory(weights[op.target]).to(gradient_dtype(dtype)))
        self._parts[op.name] = dtype
        self.trainable[op.name] = op.target
        master = nn.Parameter(to_device(self.accelerator, part))
        self._master[op.target] = self._variables[op.name] = master

    def _values(self, mode: Literal["train", "eval"]) -> dict[Ref, Tensor]:
        whole = {Ref(name): t for name, t in self._variables.items() if name not in self._parts}
        return _Values(whole, self._uses[mode], self._parameter)

    def _parameter(self, name: str) -> Tensor:
        return cast(Tensor, _Gather.apply(self._variables[name], self, name))

    def put_together(self, name: str) -> Tensor:
        """A parameter by its op name, as it computes."""
        part = self._variables[name].detach().to(self._parts[name])
        found = self._ranks.whole(part, self._shapes[self.trainable[name]])
        storage = found.untyped_storage()
        self._alive = {at: kept for at, kept in self._alive.items() if not kept[1].expired()}
        self._alive[storage.data_ptr()] = name, StorageWeakRef(storage)
        return found

    def take_apart(self, name: str, gradient: Tensor) -> Tensor:
        """This rank's part of the sum of a parameter's gradients over the ranks."""
        self._again.pop(name, None)
        return self._ranks.summed_part(gradient.to(self._variables[name].dtype))

    def _pack(self, tensor: Tensor) -> Tensor | _Handle:
        kept = self._alive.get(tensor.untyped_storage().data_ptr()) if tensor.numel() else None
        if kept is None or kept[1].expired() or tensor.is_conj():
            return tensor
        return _Handle(kept[0], tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def _unpack(self, kept: Tensor | _Handle) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        if kept.name not in self._again:
            self._again[kept.name] = self.put_together(kept.name)
        return self._again[kept.name].as_strided(kept.size, kept.stride, kept.offset)

    def forward(self, step: int, micro_batch: int, inputs: Mapping[Ref, Tensor]) -> dict[Ref, Tensor]:
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            return super().forward(step, micro_batch, inputs)

    def backward(self, micro_batch: int, gradients: Sequence[Mapping[Ref, Tensor]]) -> dict[Ref, Tensor]:
        try:  # hooks too: it may run the forward again
            with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
                return super().backward(micro_batch, gradients)
        finally:
            self._again.clear()

    def collect(self, count: float | None) -> Tensor:
        norms = super().collect(count)
        if not norms.numel():
            return norms
        squares = self._ranks.sum(torch.where(norms == NO_GRADIENT, 0.0, norms).square())
        return torch.where(norms == NO_GRADIENT, norms, squares.sqrt())

    def whole(self, what: Whole, names: Sequence[str]) -> dict[str, Tensor | None]:
        """Return owned parameters' tensors (op names), where there are any; on rank 0, in its accelerator's memory."""
        found: dict[str, Tensor | None] = {}
        for name in names:
            part = self._part(what, name)
            whole = None if part is None else self._ranks.whole(part, self._shapes[self.trainable[name]])
            if self._ranks.rank == 0:
                found[name] = whole
        return found

    def _part(self, what: Whole, name: str) -> Tensor | None:
        master = self._master[self.trainable[name]]
        match what:
            case "parameters":
                return master.detach()
            case "values":
                return master.detach().to(self._parts[name])
            case "gradients":
                return master.grad
            case "sums":
                return self._gradients.pop(name, None)

    def is_shared_out(self, name: str) -> bool:
        """Return whether a parameter (op name) is."""
        return name in self._parts

    def part_of(self, whole: Tensor, rank: int) -> Tensor:
        return self._ranks.part(whole, rank)

    def state(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name, value in super().state().items():
            parameter = name.removeprefix(OPTIMIZER).rpartition(".")[0] if name.startswith(OPTIMIZER) else name
            whole = value
            if parameter in self._master and not name.endswith(f".{STEP}"):
                # One after the other to the host: all at once may be more than this rank can hold.
                whole = to_host(self.accelerator, {name: self._ranks.whole(value, self._shapes[parameter])})[name]
            if self._ranks.rank == 0:
                found[name] = whole
        return found
