"""The cost of each operator: FLOPs, kept bytes, and whether a gradient is due, measured on fake tensors.

Every distinct operator call runs once, forward and backward, under torch's FLOP counter with autograd on,
at two batch sizes; costs are affine in the batch. Matrix products, convolutions, attention and recurrent layers count
exactly; every other operator that is not a view counts one FLOP per output element forward, and one per gradient
element backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import msgspec
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from isthmus.errors import InternalError
from isthmus.graph.flop_counter import flop_counter
from isthmus.graph.operators import bind, no_gradient, overload_of
from isthmus.graph.opgraph import DTYPE_BYTES, Affine, Arg, Op, OpGraph, Ref, TensorSpec
from isthmus.graph.schema import base_name, storage_of

PROBE_BATCHES = (2, 3)
MOST_KNOWN = 50_000  # calls whose costs this process remembers, of all graphs: both modes of a model share most of them


class _Cost(NamedTuple):
    forward: int
    backward: int
    fresh_bytes: int  # saved for backward and made by the operator itself
    saved_inputs: tuple[int, ...]  # saved for backward and taken as inputs: positions among the op's distinct refs
    saved_outputs: tuple[int, ...]
    """Saved for backward and given as outputs: a consumer that saves one too keeps no second copy."""
    requires_grad: tuple[bool, ...]
    view: bool
    outputs: tuple[TensorSpec, ...]  # at the ledger's batch size
    working_bytes: int


def measure(graph: OpGraph) -> OpGraph:
    """The same graph with `requires_grad`, FLOPs and `saved_bytes` filled in."""
    batches = PROBE_BATCHES if graph.batch is None else (graph.batch,)
    with torch.random.fork_rng(devices=[]), FakeTensorMode(allow_non_fake_inputs=True):
        ledgers = [_Ledger(graph, batch) for batch in batches]
        return msgspec.structs.replace(graph, ops=tuple(_annotate(op, ledgers, batches) for op in graph.ops))


def _annotate(op: Op, ledgers: list[_Ledger], batches: tuple[int, ...]) -> Op:
    if op.kind != "operator":
        for ledger in ledgers:
            ledger.hold(op)
        return op
    rows = [ledger.charge(op) for ledger in ledgers]
    forward, backward, saved, working = (_fit([row[i] for row in rows], batches) for i in range(4))
    made = [[ledger.specs[Ref(op.name, i)] for ledger in ledgers] for i in range(len(op.outputs))]
    return msgspec.structs.replace(
        op,
        flops_forward=forward,
        flops_backward=backward,
        saved_bytes=saved,
        working_bytes=working,
        requires_grad=ledgers[0].flags[op.name],
        outputs=tuple(_with_layout(op, s, m, batches) for s, m in zip(op.outputs, made, strict=True)),
    )


def _with_layout(op: Op, spec: TensorSpec, made: list[TensorSpec], batches: tuple[int, ...]) -> TensorSpec:
    """`spec` with the strides that the operator really gives: out of place they may differ from in place."""
    for at_batch, batch in zip(made, batches, strict=True):
        if (at_batch.dtype, at_batch.shape) != (spec.dtype, spec.shape_at(batch)):
            raise InternalError(
                f"op {op.name} ({op.target}) in module {op.module!r} gives {at_batch.dtype} {at_batch.shape} at batch "
                f"{batch}, its graph says {spec.dtype} {spec.shape_at(batch)}"
            )
    strides = zip(*(s.stride_at(b) for s, b in zip(made, batches, strict=True)), strict=True)
    fits = [_fit(list(values), batches) for values in strides]
    return TensorSpec(spec.dtype, spec.shape, tuple(f if f.per_sample else f.fixed for f in fits))


def _fit(values: list[int], batches: tuple[int, ...]) -> Affine:
    if len(batches) == 1:
        return Affine(0, values[0])
    slope, rest = divmod(values[1] - values[0], batches[1] - batches[0])
    if rest or slope < 0:  # rounding inside a formula: charge it to the larger batch
        slope = -(-values[1] // batches[1])
        return Affine(slope)
    return Affine(slope, values[0] - slope * batches[0])


_known: dict[object, _Cost] = {}


class LiveBytes(TorchDispatchMode):
    """`most` bytes of the tensors that were made since it began were alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.begin()

    def begin(self) -> None:
        self._made: list[tuple[StorageWeakRef, int]] = []
        self.most = 0

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,  # pyright: ignore
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        found = func(*args, **(kwargs or {}))
        given = {storage_of(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        new = {storage_of(t): t.untyped_storage() for t in tree_leaves(found) if isinstance(t, Tensor)}
        self._made = [one for one in self._made if not one[0].expired()]
        self._made += [(StorageWeakRef(s), s.nbytes()) for key, s in new.items() if key not in given]
        self.most = max(self.most, sum(nbytes for _, nbytes in self._made))
        return found


class _Ledger:
    """Costs at one batch size."""

    def __init__(self, graph: OpGraph, batch: int) -> None:
        self.graph = graph
        self.batch = batch
        self.specs: dict[Ref, TensorSpec] = {}
        self.flags: dict[str, tuple[bool, ...]] = {}
        self.roots: dict[Ref, Ref] = {}
        self.variables: set[str] = set()
        self.saved: set[Ref] = set()

    def hold(self, op: Op) -> None:
        self.flags[op.name] = op.requires_grad
        spec = op.outputs[0]
        self.specs[Ref(op.name)] = TensorSpec(spec.dtype, spec.shape_at(self.batch), spec.stride_at(self.batch))
        if op.kind != "placeholder":
            self.variables.add(op.name)

    def charge(self, op: Op) -> tuple[int, int, int, int]:
        """(forward FLOPs, backward FLOPs, saved bytes, working bytes) of an operator."""
        refs = list(dict.fromkeys(op.refs()))
        quiet = no_gradient(op, [self.flags[ref.op][ref.index] for ref in refs], self.graph.mode)
        signature = self._signature(op, refs, quiet=quiet)
        cost = _known.get(signature)
        if cost is None:
            cost = self._run(op, refs, quiet=quiet)
            if len(_known) >= MOST_KNOWN:
                _known.clear()
            _known[signature] = cost
        self.flags[op.name] = cost.requires_grad
        self.specs |= {Ref(op.name, i): spec for i, spec in enumerate(cost.outputs)}
        saved = cost.fresh_bytes
        self.saved |= {Ref(op.name, index) for index in cost.saved_outputs}
        for position in cost.saved_inputs:
            root = self._root(refs[position])
            if root not in self.saved and root.op not in self.variables:
                self.saved.add(root)
                saved += self.specs[root].nbytes(self.batch)
        if cost.view:
            for index in range(len(op.outputs)):
                self.roots[Ref(op.name, index)] = refs[0]
        return cost.forward, cost.backward, saved, cost.working_bytes

    def _root(self, ref: Ref) -> Ref:
        while ref in self.roots:
            ref = self.roots[ref]
        return ref

    def _signature(self, op: Op, refs: list[Ref], *, quiet: bool) -> object:
        number = {ref: i for i, ref in enumerate(refs)}
        kinds = tuple((self.specs[r], self.flags[r.op][r.index]) for r in refs)

        def plain(arg: Arg) -> object:
            return number[arg] if isinstance(arg, Ref) else (type(arg).__name__, repr(arg))

        return self.batch, quiet, op.target, kinds, repr([plain(a) for a in op.args]), repr(op.kwargs)

    def _run(self, op: Op, refs: list[Ref], *, quiet: bool) -> _Cost:
        inputs = {ref: self._leaf(ref) for ref in refs}
        saved: list[Tensor] = []

        def keep(tensor: Tensor) -> Tensor:
            saved.append(tensor)
            return tensor

        call = cast("Callable[..., Any]", overload_of(op.target))
        args, kwargs = bind(op, inputs.__getitem__, self.batch, torch.device("cpu"))
        with flop_counter() as counter, LiveBytes() as memory, torch.set_grad_enabled(not quiet):
            with saved_tensors_hooks(keep, lambda t: t):
                result = call(*args, **kwargs)
            at_work = memory.most
            outputs = [t for t in (result if isinstance(result, (list, tuple)) else (result,)) if isinstance(t, Tensor)]
            forward = counter.get_total_flops()
            leaves = [t for t in inputs.values() if t.requires_grad]
            roots = [t for t in outputs if t.grad_fn is not None]
            memory.begin()
            if roots and leaves:
                given = torch.autograd.grad(roots, leaves, [torch.empty_like(t) for t in roots], allow_unused=True)
                del given
            backward = counter.get_total_flops() - forward
        taken_in = {storage_of(t) for t in inputs.values()}
        view = any(storage_of(t) in taken_in for t in outputs)
        if not view and not forward:
            forward = sum(t.numel() for t in outputs)
            backward = sum(t.numel() for t in leaves) if roots else 0
        forward, backward = _corrected(op, list(inputs.values()), forward, backward if roots else 0)
        fresh, taken = _split_saved(saved, list(inputs.values()))
        dropped = (r for i, r in enumerate(refs) if i not in taken and r.op not in self.variables)
        forward_bytes = at_work - fresh + sum(self.specs[r].nbytes(self.batch) for r in dropped)
        kept = {storage_of(t) for t in saved} - taken_in
        given = tuple(i for i, t in enumerate(outputs) if storage_of(t) in kept)
        flags = tuple(t.requires_grad for t in outputs)
        specs = tuple(TensorSpec(_name(t.dtype), tuple(t.shape), tuple(t.stride())) for t in outputs)
        working = max(0 if view else forward_bytes, memory.most)
        return _Cost(int(forward), int(backward), fresh, taken, given, flags, view, specs, working)

    def _leaf(self, ref: Ref) -> Tensor:
        spec = self.specs[ref]
        dtype = cast(torch.dtype, getattr(torch, spec.dtype))
        tensor = torch.empty_strided(spec.shape_at(self.batch), spec.stride_at(self.batch), dtype=dtype)
        return tensor.requires_grad_(self.flags[ref.op][ref.index])


def _corrected(op: Op, inputs: list[Tensor], forward: int, backward: int) -> tuple[int, int]:
    """Fused attention: two products forward (4 B H T S D); five backward, one of them recomputed (10 B H T S D)."""
    if base_name(op.target) == "scaled_dot_product_attention":
        query, key = inputs[0], inputs[min(1, len(inputs) - 1)]
        product = 2 * query.numel() * key.shape[-2]
        return 2 * product, 5 * product if backward else 0
    return forward, backward


def _split_saved(saved: list[Tensor], inputs: list[Tensor]) -> tuple[int, tuple[int, ...]]:
    """Bytes that the operator made and keeps, and positions of the inputs that it keeps."""
    owners = {storage_of(t): i for i, t in enumerate(inputs)}
    taken: set[int] = set()
    fresh: dict[int, int] = {}
    for tensor in saved:
        storage = storage_of(tensor)
        if storage in owners:
            taken.add(owners[storage])
        else:
            fresh[storage] = tensor.numel() * DTYPE_BYTES[_name(tensor.dtype)]
    return sum(fresh.values()), tuple(sorted(taken))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
