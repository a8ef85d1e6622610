"""In-place writes made out-of-place, so that a cut may fall beside them.

In eager code several tensors may look into one storage, and a write through one changes them all. Here every value
is written once: a write makes a new value, views pass it on to what they look into (a write into `x[:, 0]` becomes
a `select_scatter` into `x`), and other views of the same storage are taken again when they are used next. Torch's own
functionalisation is not used: it forgets `no_grad` regions and splits dropout and batch norm into other operators.

Only buffers stay written in place: they live in one stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import msgspec
import torch
from torch import Tensor

from isthmus.graph.operators import bind, is_callable, overload_of
from isthmus.graph.opgraph import Arg, ArgList, Named, Op, Ref, Size, add_sizes
from isthmus.graph.schema import base_name, out_of_place, shares_storage

RESHAPES = {"view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze", "view_as", "reshape_as"}
IDENTITIES = {"alias", "contiguous", "detach", "to", "type_as", "lift_fresh", "positive", "dropout"}
SCATTERS = {
    "select": "aten.select_scatter.default",
    "slice": "aten.slice_scatter.default",
    "diagonal": "aten.diagonal_scatter.default",
    "as_strided": "aten.as_strided_scatter.default",
}
LISTS = {"split", "split_with_sizes", "chunk", "tensor_split"}
FUNCTIONAL = {"aten.normal_.default": "aten.normal_functional.default", "aten.bernoulli_.float": "aten.bernoulli.p"}
PROBE_BATCH = 2


class CannotWrite(Exception):
    """The write has no out-of-place form; the text completes "<operator> ..."."""


class View(NamedTuple):
    """Output `output` of `op`, which takes `parent` as argument `position` and may look into it."""

    parent: Ref
    op: Op
    position: int
    output: int


class Writes:
    """Follows views and writes while a graph is converted.

    A `Ref` that the caller holds names an eager tensor; `latest` gives the value that the tensor has by now.
    """

    def __init__(self, ops: dict[str, Op], batch: int | None) -> None:
        self._ops = ops
        self._batch = batch or PROBE_BATCH
        self._views: dict[Ref, View] = {}
        self._latest: dict[Ref, Ref] = {}
        self._stale: set[Ref] = set()
        self._shares: dict[Ref, bool] = {}

    def record(self, op: Op, position: int | None, args: Sequence[Arg]) -> None:
        """Note that the outputs of `op` may be views of what the caller's `args[position]` names."""
        if position is None or position >= len(args):
            return
        parent = args[position]
        if isinstance(parent, Ref):
            self._views |= {Ref(op.name, i): View(parent, op, position, i) for i in range(len(op.outputs))}

    def latest(self, ref: Ref) -> Ref:
        """The value that the tensor called `ref` has now."""
        if ref in self._stale:
            self._stale.discard(ref)
            view = self._views[ref]
            args = [*view.op.args]
            args[view.position] = self.latest(view.parent)
            again = msgspec.structs.replace(view.op, name=self.new_name(view.op.name), args=tuple(args))
            self._ops[again.name] = again
            self._latest[ref] = Ref(again.name, view.output)
        return self._latest.get(ref, ref)

    def root(self, ref: Ref) -> Ref:
        """The tensor whose storage `ref` looks into."""
        return self._chain(ref)[-1]

    def passes_detach(self, ref: Ref) -> bool:
        """Return whether `ref` sees its root through a `detach`, which autograd does not follow."""
        return any(base_name(self._views[r].op.target) == "detach" for r in self._chain(ref)[:-1])

    def write(self, ref: Ref, op: Op) -> set[Ref]:
        """`op` computes in place what `ref` becomes: add it out of place, and pass the change on to the root.

        Returns the tensors that changed.
        """
        chain = self._chain(ref)
        root = self._ops[chain[-1].op]
        if root.kind == "buffer" and len(chain) == 1 and is_callable(op.target):
            self._ops[op.name] = msgspec.structs.replace(op, mutates=(root.name,))
            return {ref}
        new = self._functional(op)
        # Parents first: reading a stale one afterwards would see half of the write.
        parents = [self.latest(r) for r in chain[1:]]
        self._latest[ref] = new
        for child, parent, value in zip(chain, chain[1:], parents, strict=False):
            new = self._put_back(self._views[child], value, new, op)
            self._latest[parent] = new
        if root.kind == "buffer":
            self._add(op, "aten.copy_.default", (Ref(root.name), new), chain[-1], mutates=(root.name,))
            for written in chain:  # the storage itself has changed, so its views have too
                self._latest.pop(written, None)
            return set(chain)
        others = {v for v in self._views if v not in chain and self.root(v) == chain[-1]}
        self._stale |= others
        return others | set(chain)

    def _chain(self, ref: Ref) -> list[Ref]:
        """`ref`, what it looks into, what that looks into, and so on."""
        found = [ref]
        while (view := self._views.get(found[-1])) is not None and self._is_shared(found[-1], view):
            found.append(view.parent)
        return found

    def _is_shared(self, ref: Ref, view: View) -> bool:
        """Return whether the output really shares storage (`reshape` and `to` copy at times): tried on meta tensors."""
        if ref not in self._shares:
            made, outputs = self._run(view.op)
            parent = made[cast(Ref, view.op.args[view.position])]
            self._shares[ref] = shares_storage(outputs[view.output], parent)
        return self._shares[ref]

    def _run(self, op: Op) -> tuple[dict[Ref, Tensor], list[Tensor]]:
        meta = torch.device("meta")
        made: dict[Ref, Tensor] = {}
        for ref in op.refs():
            spec = self._ops[ref.op].outputs[ref.index]
            dtype = cast(torch.dtype, getattr(torch, spec.dtype))
            shape, stride = spec.shape_at(self._batch), spec.stride_at(self._batch)
            made[ref] = torch.empty_strided(shape, stride, dtype=dtype, device=meta)
        args, kwargs = bind(op, made.__getitem__, self._batch, meta)
        result = overload_of(op.target)(*args, **kwargs)
        outputs = result if isinstance(result, (list, tuple)) else [result]
        return made, list(cast("Sequence[Tensor]", outputs))

    def _functional(self, op: Op) -> Ref:
        """The value that the in-place `op` leaves behind."""
        spec = op.outputs[0]
        if op.target == "aten.copy_.default":  # its functional form has no derivative
            return self._cast(op, cast(Ref, op.args[1]), expand=True)
        target = FUNCTIONAL.get(op.target, out_of_place(op.target))
        if not is_callable(target):
            raise CannotWrite("has no form that returns a new tensor: use other operators")
        made = msgspec.structs.replace(op, target=target)
        self._ops[op.name] = made
        result = self._run(made)[1][0]
        if str(result.dtype) != f"torch.{spec.dtype}":  # in place, the type of what is written stays
            wide = msgspec.structs.replace(spec, dtype=str(result.dtype).removeprefix("torch."))
            self._ops[op.name] = msgspec.structs.replace(made, outputs=(wide,))
            return self._cast(op, Ref(op.name), expand=False)
        return Ref(op.name)

    def _cast(self, op: Op, value: Ref, *, expand: bool) -> Ref:
        """`value` in the type (and shape) of what `op` writes."""
        spec = op.outputs[0]
        given = self._ops[value.op].outputs[value.index]
        if given.dtype != spec.dtype:
            value = self._add(op, "aten.to.dtype", (value, Named("dtype", spec.dtype)), value, dtype=spec.dtype)
        if expand and given.shape != spec.shape:
            shape = ArgList(cast("tuple[Arg, ...]", spec.shape))
            value = self._add(op, "aten.expand.default", (value, shape), cast(Ref, op.args[0]))
        return value

    def _put_back(self, view: View, parent: Ref, child: Ref, cause: Op) -> Ref:
        """The value of `parent` in which the part seen through `view` is `child`."""
        base, rest = base_name(view.op.target), view.op.args[1:]
        shape = self._ops[parent.op].outputs[parent.index].shape
        if base in IDENTITIES:
            return child
        if base in RESHAPES and view.op.target != "aten.view.dtype":
            return self._add(cause, "aten.reshape.default", (child, ArgList(cast("tuple[Arg, ...]", shape))), parent)
        if base in SCATTERS:
            return self._add(cause, SCATTERS[base], (parent, child, *rest), parent)
        if base in ("transpose", "swapaxes", "swapdims"):
            return self._add(cause, "aten.transpose.int", (child, *rest), parent)
        if base == "t":
            return self._add(cause, "aten.t.default", (child,), parent)
        if base == "permute":
            dims = [cast(int, d) % len(shape) for d in cast(ArgList, rest[0]).items]
            back = ArgList(tuple(dims.index(i) for i in range(len(dims))))
            return self._add(cause, "aten.permute.default", (child, back), parent)
        if base == "narrow":
            dim, first, length = rest
            span = (dim, first, add_sizes(cast(Size, first), cast(Size, length)))
            return self._add(cause, SCATTERS["slice"], (parent, child, *span), parent)
        if base == "unbind":
            dim = rest[0] if rest else 0
            return self._add(cause, SCATTERS["select"], (parent, child, dim, view.output), parent)
        if base in LISTS:
            dim = cast(int, rest[1] if len(rest) > 1 else view.op.kwargs.get("dim", 0))
            start: Size = 0
            for output in view.op.outputs[: view.output]:
                start = add_sizes(start, output.shape[dim])
            end = add_sizes(start, view.op.outputs[view.output].shape[dim])
            return self._add(cause, SCATTERS["slice"], (parent, child, dim, start, end), parent)
        raise CannotWrite(f"writes in place into the result of {base}(): call .clone() on that result first")

    def _add(
        self,
        cause: Op,
        target: str,
        args: tuple[Arg, ...],
        like: Ref,
        *,
        dtype: str | None = None,
        mutates: tuple[str, ...] = (),
    ) -> Ref:
        """Add an operator that `cause` makes necessary, with one output like the value `like`."""
        spec = self._ops[like.op].outputs[like.index]
        if dtype is not None:
            spec = msgspec.structs.replace(spec, dtype=dtype)
        op = Op(
            name=self.new_name(cause.name),
            kind="operator",
            target=target,
            args=args,
            outputs=(spec,),
            requires_grad=cause.requires_grad[:1],
            module=cause.module,
            source=cause.source,
            mutates=mutates,
        )
        self._ops[op.name] = op
        return Ref(op.name)

    def new_name(self, base: str) -> str:
        """A new name; the same in every process, since conversion is deterministic."""
        number = 1
        while f"{base}_w{number}" in self._ops:
            number += 1
        return f"{base}_w{number}"
