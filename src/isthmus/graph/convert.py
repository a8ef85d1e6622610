"""From an exported program to an `OpGraph`: sub-graphs inlined, sizes affine, in-place ops made out-of-place."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Literal, cast

import msgspec
import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.export.graph_signature import CustomObjArgument, InputKind, InputSpec, OutputKind
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._pytree import TreeSpec, tree_leaves

from isthmus.errors import UserError
from isthmus.graph.building import HeldTensors
from isthmus.graph.capture_errors import WITHOUT_DATA, module_path, source_of, where_in
from isthmus.graph.operators import is_callable, schemas_of
from isthmus.graph.opgraph import DTYPE_BYTES, Arg, ArgList, Named, Op, OpGraph, OpKind, Ref, TensorSpec
from isthmus.graph.repeats import Repeats, Unrolled
from isthmus.graph.schema import (
    IN_PLACE_VIEWS,
    aliased_position,
    base_name,
    fake_result,
    hidden_writes,
    is_default,
    is_random,
    label_argument,
    out_of_place,
    returns_its_input,
    storage_of,
    without_out,
    written,
)
from isthmus.graph.sizes import NotAffine, UnknownSize, affine, affine_or_unknown, spec_of
from isthmus.graph.tidy import count_beside_loss, reachable
from isthmus.graph.writes import CannotWrite, Writes

DROPPED = ("_assert", "sym_constrain", "sym_size", "sym_numel")
MADE = "."  # begins the names of tensors that a forward keeps elsewhere than in registered buffers
KINDS: dict[InputKind, OpKind] = {
    InputKind.PARAMETER: "parameter",
    InputKind.BUFFER: "buffer",
    InputKind.CONSTANT_TENSOR: "constant",
    InputKind.USER_INPUT: "placeholder",
}


def convert(
    program: ExportedProgram,
    *,
    name: str,
    mode: Literal["train", "eval"],
    batch: int | None,
    held: HeldTensors,
    made: Mapping[str, UserError] = {},
    repeats: Repeats | None = None,
) -> tuple[OpGraph, dict[str, Tensor]]:
    """The graph, and the real values of the constants that the forward makes itself. `made`: tensors that the forward
    makes once, with the errors for those that depend on what changes. `repeats`: blocks that the program lacks.

    Raises NotAffine when the program must be exported at a fixed batch size.
    """
    converter = _Converter(program, mode, batch, held, made)
    graph = converter.run(name)
    if repeats is not None:
        graph = Unrolled(graph, (node.name for node in program.graph.nodes), repeats).graph()
    graph = count_beside_loss(reachable(graph))
    graph = msgspec.structs.replace(graph, schemas=schemas_of(graph.ops))
    used = {op.target for op in graph.ops}
    return graph, {k: v for k, v in converter.constants.items() if k in used}


class _Converter:
    def __init__(
        self,
        program: ExportedProgram,
        mode: Literal["train", "eval"],
        batch: int | None,
        held: HeldTensors,
        made: Mapping[str, UserError],
    ) -> None:
        self.made = made
        self.program = program
        self.mode: Literal["train", "eval"] = mode
        self.batch = batch
        self.held = held
        self.ops: dict[str, Op] = {}
        self.values: dict[fx.Node, Arg | UnknownSize] = {}
        self.writes = Writes(self.ops, batch)
        self.constants: dict[str, Tensor] = {}
        self.gradients_on = True
        self.assigned: dict[str, tuple[Ref, Ref]] = {}
        """Buffers that the forward assigns: the variable, and the copy of it that is read."""
        self.caches: set[str] = set()  # buffers that no state_dict has
        self.trainable: set[Ref] = set()  # values that depend on a trainable parameter, as far as autograd sees

    def run(self, name: str) -> OpGraph:
        self._inputs()
        results = tuple(self._latest(a) for a in self._body(self.program.graph_module))
        loss, count, outputs, kept = self._outputs(results)
        for key, value in kept.items():
            if key in self.made:
                self._check_constant(value, self.made[key])
            elif not key.startswith(MADE):
                self._assign(key, value)
        return OpGraph(
            name=name,
            mode=self.mode,
            ops=self._with_constants(),
            loss=loss,
            count=count,
            outputs=outputs if self.mode == "eval" else {},
            batch=self.batch,
        )

    def _inputs(self) -> None:
        nodes = {node.name: node for node in self.program.graph.find_nodes(op="placeholder")}
        columns = iter(_column_names(self.program))
        first: dict[str, Ref] = {}
        kept = cast(TreeSpec, self.program.call_spec.out_spec).children()[-1]
        assigned = {name for name in cast("list[str]", kept.context or []) if not name.startswith(MADE)}
        for name in assigned:
            if list(self.held.names.values()).count(self.held.names[name]) > 1:
                raise UserError(f"model: forward assigns buffer {name!r}, which has several names: give it one")
        for spec in self.program.graph_signature.input_specs:
            node = nodes[spec.arg.name]
            kind = KINDS.get(spec.kind)
            if isinstance(spec.arg, CustomObjArgument) and "Generator" in spec.arg.class_fqn:
                raise UserError(
                    "model: forward draws from a torch.Generator of its own: draw from torch's default one, which is "
                    "seeded for every micro-batch"
                )
            if kind is None:
                raise UserError(f"model: forward uses {spec.target!r}: expected tensors and numbers only")
            target = next(columns) if kind == "placeholder" else self._own_name(spec)
            if kind != "placeholder" and target in first:  # tied: one variable, whatever the name it is used by
                self.values[node] = first[target]
                continue
            op_name = f"{self.mode}_{node.name}" if target.startswith(f"{self.mode}.") else node.name
            tensor = cast(Tensor, node.meta["val"])
            if (dtype := str(tensor.dtype).removeprefix("torch.")) not in DTYPE_BYTES:
                what = "column" if kind == "placeholder" else f"model: {kind}"
                raise UserError(f"{what} {target!r}: got dtype {dtype}, expected one of: {', '.join(DTYPE_BYTES)}")
            trainable = kind == "parameter" and tensor.requires_grad
            self.ops[op_name] = Op(
                name=op_name, kind=kind, target=target, outputs=(spec_of(tensor),), requires_grad=(trainable,)
            )
            self.values[node] = first[target] = Ref(op_name)
            if kind == "buffer" and spec.persistent is False:
                self.caches.add(op_name)
            if spec.target is not None and spec.target.removeprefix("module.") in assigned:
                self._read_copy(spec.target.removeprefix("module."), node, Ref(op_name))
            if trainable:
                self.trainable.add(Ref(op_name))

    def _with_constants(self) -> tuple[Op, ...]:
        """A buffer that no state_dict has is a constant, as the module has its value, unless the forward writes it."""
        constants, replace = self.caches - self._written(), msgspec.structs.replace
        return tuple(replace(op, kind="constant") if op.name in constants else op for op in self.ops.values())

    def _written(self) -> set[str]:
        """Names of the variables that the forward writes."""
        return {name for op in self.ops.values() for name in op.mutates}

    def _read_copy(self, name: str, node: fx.Node, variable: Ref) -> None:
        """Reads of a buffer that the forward assigns are of a copy: see `_assign`."""
        spec = self.ops[variable.op].outputs[0]
        copy = Op(
            name=f"{variable.op}_before",
            kind="operator",
            target="aten.clone.default",
            args=(variable,),
            outputs=(spec,),
            requires_grad=(False,),
        )
        self.ops[copy.name] = copy
        self.values[node] = Ref(copy.name)
        self.assigned[name] = variable, Ref(copy.name)

    def _own_name(self, spec: InputSpec) -> str:
        """The module's name of a variable; constants that the forward makes are called after the mode."""
        target = cast(str, spec.target).removeprefix("module.")
        if target in self.held.names:
            return self.held.names[target]
        if spec.kind is not InputKind.CONSTANT_TENSOR:
            return target
        value = cast(Tensor, self.program.constants[cast(str, spec.target)])
        if isinstance(value, FakeTensor) or storage_of(value) in self.held.storages:  # it has no value before the run
            if place := self.held.place_of(value):
                raise UserError(f"model: forward uses tensor {place}: make it a buffer (register_buffer)")
            raise UserError(
                "model: forward uses a tensor through .data, or one kept in a list or dict: use .detach(), "
                "or make it a buffer (register_buffer)"
            )
        self.constants[f"{self.mode}.{target}"] = value
        return f"{self.mode}.{target}"

    def _outputs(self, results: tuple[Arg, ...]) -> tuple[Ref, Ref | None, dict[str, Ref], dict[str, Arg]]:
        kinds = [spec.kind for spec in self.program.graph_signature.output_specs]
        user = [value for value, kind in zip(results, kinds, strict=True) if kind is OutputKind.USER_OUTPUT]
        _, count_spec, others_spec, kept_spec = cast(TreeSpec, self.program.call_spec.out_spec).children()
        loss, *user = user
        count: Arg = None
        if count_spec.num_leaves == 1:
            count, *user = user
        names, kept_names = (cast("list[str]", spec.context or []) for spec in (others_spec, kept_spec))
        outputs = {k: v for k, v in zip(names, user, strict=False) if isinstance(v, Ref)}
        kept = dict(zip(kept_names, user[len(names) :], strict=True))
        if not isinstance(loss, Ref) or self.ops[loss.op].kind != "operator":
            raise UserError("model: the loss is not computed from the inputs")
        return loss, count if isinstance(count, Ref) else None, outputs, kept

    def _assign(self, name: str, value: Arg) -> None:
        """The forward assigned a buffer: it is written as soon as the value is there. Before that all reads are of a
        copy, as eager code keeps the tensor that was there before."""
        variable, copy = self.assigned[name]
        buffer = self.ops[variable.op]
        where = f"model: forward assigns buffer {buffer.target!r}"
        if not isinstance(value, Ref) or self.ops[self.writes.root(value).op].kind != "operator":
            raise UserError(f"{where} a parameter, a buffer or a column itself: assign its .clone()")
        if value in self.trainable:
            raise UserError(f"{where} a tensor that carries gradients, which end with the step: .detach() it")
        value = self.writes.latest(value)
        spec, got = buffer.outputs[0], self.ops[value.op].outputs[value.index]
        if (spec.dtype, spec.shape) != (got.dtype, got.shape):
            raise UserError(f"{where} {_described(got)}, expected {_described(spec)}, as it has in __init__")
        write = Op(
            name=self.writes.new_name(variable.op),
            kind="operator",
            target="aten.copy_.default",
            args=(variable, value),
            outputs=(spec,),
            requires_grad=(False,),
            module=self.ops[value.op].module,
            source=self.ops[value.op].source,
            mutates=(variable.op,),
        )
        order = list(self.ops.values())
        names = [op.name for op in order]
        order.insert(1 + max(names.index(value.op), names.index(copy.op)), write)
        self.ops.clear()
        self.ops.update({op.name: op for op in order})

    def _check_constant(self, value: Arg, error: UserError) -> None:
        """Raise the error if the value depends on columns, parameters, written buffers or random numbers."""
        written = self._written()
        todo, seen = [value] if isinstance(value, Ref) else list[Ref](), set[str]()
        while todo:
            op = self.ops[todo.pop().op]
            if op.kind in ("placeholder", "parameter") or op.name in written or op.random:
                raise error
            if op.name not in seen:
                seen.add(op.name)
                todo += op.refs()

    def _body(self, module: torch.nn.Module) -> tuple[Arg, ...]:
        """Convert every node of a graph module; returns the arguments of its output."""
        graph = cast(fx.GraphModule, module).graph
        for node in graph.nodes:
            if node.op == "output":
                flat = node.args[0]
                return tuple(self._arg(a) for a in (flat if isinstance(flat, (tuple, list)) else (flat,)))
            if node.op == "get_attr":
                self.values[node] = str(node.target)
            elif node.op == "call_function":
                self._call(node, module)
        raise AssertionError("a graph has an output")

    def _call(self, node: fx.Node, module: torch.nn.Module) -> None:
        label = str(node.target)
        value = node.meta.get("val")
        if isinstance(value, (torch.SymInt, int)) and not isinstance(value, bool):
            self.values[node] = affine_or_unknown(value)
        elif isinstance(value, (torch.SymFloat, torch.SymBool)):
            self.values[node] = UnknownSize(label)
        elif node.target is operator.getitem:
            source, index = cast("tuple[fx.Node, int]", node.args)
            held = self.values[source]
            self.values[node] = held.items[index] if isinstance(held, ArgList) else Ref(cast(Ref, held).op, index)
        elif label.startswith("wrap_with"):
            self._inline(node, module, label)
        elif not any(part in label for part in DROPPED):
            self._operator(node, label)

    def _inline(self, node: fx.Node, module: torch.nn.Module, label: str) -> None:
        """A region under no_grad (or set_grad) is a sub-graph; its ops join ours."""
        if "autocast" in label and node.args[2]:
            raise UserError(
                f"{where_in(node)}: forward turns autocast on: leave it out and set the precision in the job"
            )
        position = next(i for i, a in enumerate(node.args) if isinstance(a, fx.Node) and a.op == "get_attr")
        body = cast(torch.nn.Module, getattr(module, cast(str, cast(fx.Node, node.args[position]).target)))
        inner = [n for n in cast(fx.GraphModule, body).graph.nodes if n.op == "placeholder"]
        for parameter, given in zip(inner, node.args[position + 1 :], strict=True):
            self.values[parameter] = self._arg(given)
        before = self.gradients_on
        if "grad" in label:
            self.gradients_on = bool(node.args[0])
        self.values[node] = ArgList(self._body(body))
        self.gradients_on = before

    def _operator(self, node: fx.Node, label: str) -> None:
        overload = _allowed(node, label)
        if (out := node.kwargs.get("out")) is not None:
            self._into(node, overload, out)
            return
        names = tuple(self._arg(a) for a in node.args)
        if returns_its_input(node, overload):
            self.values[node] = names[0]
            return
        args = tuple(self._latest(a) for a in names)
        kwargs = {k: self._latest(self._arg(v)) for k, v in node.kwargs.items() if not is_default(overload, k, v)}
        values: Tensor | Sequence[Tensor] = node.meta["val"]
        tensors = (values,) if isinstance(values, Tensor) else tuple(values)
        # An empty tuple: whether a gradient is due is measured later.
        quiet = () if self.gradients_on else (False,) * len(tensors)
        self._check_labels(node, label, args)
        retaken = base_name(label) in IN_PLACE_VIEWS
        op = Op(
            name=node.name,
            kind="operator",
            target=out_of_place(label) if retaken else label,
            args=args,
            kwargs=kwargs,
            outputs=tuple(spec_of(t) for t in tensors),
            requires_grad=quiet,
            module=module_path(node),
            source=source_of(node),
            random=is_random(overload, args, kwargs),
            mutates=hidden_writes(label, args),
        )
        by_position = written(overload, names)
        if by_position and not retaken:
            self.values[node] = self._write(node, op, names, by_position)
            return
        self.ops[op.name] = op
        self.writes.record(op, 0 if retaken else aliased_position(overload), names)
        self.values[node] = Ref(op.name)
        if self._passes_gradients(op, names):
            self.trainable |= {Ref(op.name, i) for i, t in enumerate(tensors) if t.dtype.is_floating_point}

    def _into(self, node: fx.Node, overload: OpOverload, out: object) -> None:
        """A call with `out=`: the operator that returns its result, and a copy of that into what is written."""
        where = f"{where_in(node)}: {base_name(str(overload))}"
        returning, target = without_out(overload), self._arg(out)
        if returning is None or not is_callable(str(returning)) or not isinstance(target, Ref):
            raise UserError(f"{where} writes to an out= argument: use its result instead")
        names, given = node.args, {k: v for k, v in node.kwargs.items() if k != "out"}
        fake = cast(Tensor, fake_result(returning, names, given))
        refs = tuple(self._arg(a) for a in names)
        result = Op(
            name=node.name,
            kind="operator",
            target=str(returning),
            args=tuple(self._latest(a) for a in refs),
            kwargs={k: self._latest(self._arg(v)) for k, v in given.items()},
            outputs=(spec_of(fake),),
            requires_grad=() if self.gradients_on else (False,),
            module=module_path(node),
            source=source_of(node),
            random=is_random(returning, refs, {}),
        )
        shape = self.ops[target.op].outputs[target.index].shape
        if self._passes_gradients(result, refs) or shape != result.outputs[0].shape:
            raise UserError(f"{where} writes to an out= argument: use its result instead")
        self.ops[result.name] = result
        copy = Op(
            name=self.writes.new_name(node.name),
            kind="operator",
            target="aten.copy_.default",
            args=(self._latest(target), Ref(result.name)),
            outputs=(spec_of(node.meta["val"]),),
            requires_grad=result.requires_grad,
            module=result.module,
            source=result.source,
        )
        self.values[node] = self._write(node, copy, copy.args, [target])

    def _check_labels(self, node: fx.Node, label: str, args: Sequence[Arg]) -> None:
        position = label_argument(label)
        if position is not None and isinstance(ref := args[position], Ref):
            dtype = self.ops[ref.op].outputs[ref.index].dtype
            if dtype in ("int8", "int16", "int32", "bool"):  # fake kernels take them, real ones do not
                raise UserError(f"{where_in(node)}: class ids must be int64, got {dtype}")

    def _write(self, node: fx.Node, op: Op, names: Sequence[Arg], written_to: Sequence[Ref]) -> Ref:
        """An in-place operator; returns the tensor that it wrote."""
        where = f"{where_in(node)}: {base_name(op.target)}"
        (ref,) = written_to
        root = self.ops[self.writes.root(ref).op]
        if root.kind == "parameter":
            raise UserError(f"{where} writes parameter {root.target!r} in forward: only the optimizer may")
        if root.kind == "constant":
            made = self.constants.get(root.target)
            named = repr(root.target) if made is None else self.held.place_of(made) or "that it made of constants"
            raise UserError(f"{where} writes tensor {named} in forward: make it a buffer (register_buffer)")
        unseen = not self.gradients_on or self.writes.passes_detach(ref)
        if unseen and {ref, self.writes.root(ref)} & self.trainable:
            raise UserError(
                f"{where} writes, hidden from autograd by no_grad or detach, a tensor that carries gradients: "
                "compute a new tensor instead"
            )
        try:
            touched = self.writes.write(ref, op)
        except CannotWrite as e:
            raise UserError(f"{where} {e}") from None
        if self._passes_gradients(op, names):
            self.trainable |= touched
        return ref

    def _passes_gradients(self, op: Op, names: Sequence[Arg]) -> bool:
        given = Op(name="", kind="operator", target="", args=tuple(names), kwargs=op.kwargs).refs()
        return self.gradients_on and base_name(op.target) != "detach" and not self.trainable.isdisjoint(given)

    def _latest(self, arg: Arg) -> Arg:
        """The argument with every tensor replaced by the value that it has now."""
        if isinstance(arg, Ref):
            return self.writes.latest(arg)
        if isinstance(arg, ArgList):
            return ArgList(tuple(self._latest(a) for a in arg.items))
        return arg

    def _arg(self, value: object) -> Arg:
        if isinstance(value, fx.Node):
            known = self.values[value]
            if isinstance(known, UnknownSize):
                if self.batch is None:
                    raise NotAffine(known.what)
                raise UserError(f"{where_in(value)}: a Python number is read from the data of a tensor: {WITHOUT_DATA}")
            return known
        if isinstance(value, (list, tuple)):
            return ArgList(tuple(self._arg(v) for v in cast("list[object]", value)))
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return affine(cast(torch.SymInt, value))
        if isinstance(value, torch.device):
            return Named("device", "stage")  # wherever the stage runs
        if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
            kind = cast("Literal['dtype', 'layout', 'memory_format']", type(value).__name__)
            return Named(kind, str(value).removeprefix("torch."))
        if isinstance(value, float) and not math.isfinite(value):
            return Named("float", str(value))
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        raise UserError(f"model: an operator takes a {type(value).__name__}, expected tensors and numbers")


def _described(spec: TensorSpec) -> str:
    sizes = ", ".join(str(s) if isinstance(s, int) else "batch" for s in spec.shape)
    return f"a tensor of shape [{sizes}] and dtype {spec.dtype}"


def _column_names(program: ExportedProgram) -> list[str]:
    (columns,) = cast(TreeSpec, program.call_spec.in_spec).children()[0].children()
    return cast("list[str]", columns.context)


def _allowed(node: fx.Node, label: str) -> OpOverload:
    """The operator of a node that a graph may hold."""
    if any(free_unbacked_symbols(t) for t in tree_leaves(node.meta.get("val")) if isinstance(t, Tensor)):
        raise UserError(f"{where_in(node)}: the size of its result depends on the data of a tensor: {WITHOUT_DATA}")
    if isinstance(node.target, OpOverload) and node.kwargs.get("out") is not None:
        return node.target
    if isinstance(node.target, OpOverload) and (is_callable(label) or is_callable(out_of_place(label))):
        return node.target
    raise UserError(
        f"{where_in(node)}: operator {label.removesuffix('.default')} is not on the allow-list: {_instead_of(node)}"
    )


def _instead_of(node: fx.Node) -> str:
    if "transformers/integrations/moe.py" in (node.meta.get("stack_trace") or ""):
        return 'build the model with experts_implementation="batched_mm", whose sizes do not depend on the data'
    return "use operators of torch itself (see isthmus/graph/allowlist.txt)"
