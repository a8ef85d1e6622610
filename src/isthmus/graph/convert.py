"""From an exported program to an `OpGraph`: sub-graphs inlined, sizes affine, in-place ops made out-of-place."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Literal, cast

import sympy
import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from isthmus.errors import UserError
from isthmus.graph.allowlist import is_allowed
from isthmus.graph.opgraph import Affine, Arg, ArgList, Named, Op, OpGraph, OpKind, Ref, Size, TensorSpec

DROPPED = ("_assert", "sym_constrain", "sym_size", "sym_numel")
WRAPPER = "L__self___module"


class NotAffine(Exception):
    """A size depends on the batch in a way that is not affine."""


class ViewMutation(Exception):
    """A view is written in place, so its base changes too."""


def convert(
    program: ExportedProgram, *, name: str, mode: Literal["train", "eval"], batch: int | None
) -> tuple[OpGraph, dict[str, Tensor]]:
    """The graph, and the real values of the constants that the forward makes itself.

    Raises NotAffine or ViewMutation when the program must be exported in another way first.
    """
    converter = _Converter(program, mode)
    graph = _reachable(converter.run(name, batch))
    held = {op.target for op in graph.ops}
    return graph, {k: v for k, v in converter.constants.items() if k in held}


class _Converter:
    def __init__(self, program: ExportedProgram, mode: Literal["train", "eval"]) -> None:
        self.program = program
        self.mode: Literal["train", "eval"] = mode
        self.ops: dict[str, Op] = {}
        self.values: dict[fx.Node, Arg] = {}
        self.base: dict[Ref, Ref] = {}  # view -> what it looks into
        self.superseded: set[Ref] = set()  # values that an in-place op has replaced
        self.constants: dict[str, Tensor] = {}

    def run(self, name: str, batch: int | None) -> OpGraph:
        self._inputs()
        results = self._body(self.program.graph_module)
        mutations, found = self._outputs(results)
        for target, value in mutations:
            self._add(Op(
                name=f"copy_{target}", kind="operator", target="aten.copy_.default",
                args=(Ref(target), value), outputs=self.ops[target].outputs, mutates=(target,),
            ))  # fmt: skip
        loss, count, outputs = found
        return OpGraph(
            name=name, mode=self.mode, ops=tuple(self.ops.values()), loss=loss, count=count,
            outputs=outputs if self.mode == "eval" else {}, batch=batch,
        )  # fmt: skip

    def _inputs(self) -> None:
        kinds: dict[InputKind, OpKind] = {
            InputKind.PARAMETER: "parameter", InputKind.BUFFER: "buffer",
            InputKind.CONSTANT_TENSOR: "constant", InputKind.USER_INPUT: "placeholder",
        }  # fmt: skip
        parameters = dict(self.program.named_parameters())
        nodes = {node.name: node for node in self.program.graph.find_nodes(op="placeholder")}
        (columns,) = self.program.call_spec.in_spec.children()[0].children()
        names = iter(cast("list[str]", columns.context))
        for spec in self.program.graph_signature.input_specs:
            node = nodes[cast(str, spec.arg.name)]  # type: ignore[union-attr]
            kind = kinds[spec.kind]
            target = next(names) if kind == "placeholder" else cast(str, spec.target).removeprefix("module.")
            if kind == "constant":
                value = self.program.constants[cast(str, spec.target)]
                if isinstance(value, Tensor) and type(value) is Tensor:  # a fake one lives on the module
                    target = f"{self.mode}.{target}"
                    self.constants[target] = value
            trainable = kind == "parameter" and parameters[cast(str, spec.target)].requires_grad
            tensor = cast(Tensor, node.meta["val"])
            self._add(Op(name=node.name, kind=kind, target=target, outputs=(self._spec(tensor),), requires_grad=(trainable,)))
            self.values[node] = Ref(node.name)

    def _outputs(self, results: tuple[Arg, ...]) -> tuple[list[tuple[str, Arg]], tuple[Ref, Ref | None, dict[str, Ref]]]:
        mutations: list[tuple[str, Arg]] = []
        user: list[Arg] = []
        for spec, value in zip(self.program.graph_signature.output_specs, results, strict=True):
            if spec.kind is OutputKind.BUFFER_MUTATION:
                buffer = next(o.name for o in self.ops.values() if o.target == cast(str, spec.target).removeprefix("module."))
                mutations.append((buffer, value))
            else:
                user.append(value)
        loss_spec, count_spec, others_spec = self.program.call_spec.out_spec.children()
        del loss_spec
        loss = user.pop(0)
        has_count = count_spec.num_leaves == 1 and user and not _is_none(user[0], count_spec)
        count = user.pop(0) if count_spec.num_leaves == 1 else None
        names = cast("list[str]", others_spec.context or [])
        outputs = {k: v for k, v in zip(names, user, strict=True) if isinstance(v, Ref)}
        if not isinstance(loss, Ref):
            raise UserError("model: the loss does not depend on the inputs")
        return mutations, (loss, count if has_count and isinstance(count, Ref) else None, outputs)

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
        target = node.target
        label = str(target)
        value = node.meta.get("val")
        if isinstance(value, (torch.SymInt, int)) and not isinstance(value, bool):
            self.values[node] = _affine(value)
        elif isinstance(value, (torch.SymFloat, torch.SymBool)):
            raise NotAffine(label)
        elif target is operator.getitem:
            source, index = cast("tuple[fx.Node, int]", node.args)
            held = self.values[source]
            if isinstance(held, ArgList):
                self.values[node] = held.items[index]
            else:
                self.values[node] = Ref(cast(Ref, held).op, index)
        elif label.startswith("wrap_with"):
            self._inline(node, module)
        elif any(part in label for part in DROPPED):
            return
        else:
            self._operator(node, label)

    def _inline(self, node: fx.Node, module: torch.nn.Module) -> None:
        """A region under no_grad (or set_grad) is a sub-graph; its ops join ours."""
        position = next(i for i, a in enumerate(node.args) if isinstance(a, fx.Node) and a.op == "get_attr")
        body = cast(torch.nn.Module, getattr(module, cast(str, cast(fx.Node, node.args[position]).target)))
        inner = [n for n in cast(fx.GraphModule, body).graph.nodes if n.op == "placeholder"]
        for parameter, given in zip(inner, node.args[position + 1 :], strict=True):
            self.values[parameter] = self._arg(given)
        self.values[node] = ArgList(self._body(body))

    def _operator(self, node: fx.Node, label: str) -> None:
        overload = node.target
        path = _module_path(node)
        if not isinstance(overload, OpOverload) or not is_allowed(label):
            raise UserError(
                f"model: module {path or '(top)'!r} calls operator {label}, which is not on the allow-list: "
                "use operators of torch itself (see isthmus/graph/allowlist.txt)"
            )
        args = tuple(self._arg(a) for a in node.args)
        kwargs = {k: self._arg(v) for k, v in node.kwargs.items() if not _is_default(overload, k, v)}
        written, label = self._out_of_place(overload, label, args)
        written += _hidden_writes(label, args)
        self._check_superseded(args, kwargs, path)
        values = node.meta["val"]
        tensors = tuple(values) if isinstance(values, (tuple, list)) else (values,)
        op = Op(
            name=node.name, kind="operator", target=label, args=args, kwargs=kwargs,
            outputs=tuple(self._spec(t) for t in tensors), module=path,
            random=_is_random(overload, args, kwargs), mutates=written,
        )  # fmt: skip
        self._add(op)
        self._follow_views(overload, op)
        result = Ref(op.name)
        self.values[node] = result
        if overload._schema.is_mutable and not written and label != str(overload):
            self._replace(cast(Ref, args[0]), result)

    def _out_of_place(self, overload: OpOverload, label: str, args: tuple[Arg, ...]) -> tuple[tuple[str, ...], str]:
        """(buffers that stay written in place, operator to call)."""
        written = [
            a for a, s in zip(args, overload._schema.arguments, strict=False)
            if s.alias_info is not None and s.alias_info.is_write and isinstance(a, Ref)
        ]  # fmt: skip
        if not written:
            return (), label
        (ref,) = written
        root = self._root(ref)
        if self.ops[root.op].kind == "buffer" and root == ref:
            return (ref.op,), label
        aliases = [v for v in self.base if self._root(v) == root and v != ref]
        if root != ref or aliases or self.ops[root.op].kind != "operator":
            raise ViewMutation(label)
        functional = label.replace("_.", ".", 1)
        if not is_allowed(functional):
            raise ViewMutation(label)
        return (), functional

    def _replace(self, old: Ref, new: Ref) -> None:
        """Every later use of the value `old` means `new`."""
        self.superseded.add(old)
        for node, value in self.values.items():
            if value == old:
                self.values[node] = new

    def _check_superseded(self, args: tuple[Arg, ...], kwargs: Mapping[str, Arg], path: str) -> None:
        used = set(Op(name="", kind="operator", target="", args=args, kwargs=dict(kwargs)).refs())
        if used & self.superseded:
            raise ViewMutation(path)

    def _follow_views(self, overload: OpOverload, op: Op) -> None:
        aliased = {
            frozenset(s.alias_info.before_set): a
            for a, s in zip(op.args, overload._schema.arguments, strict=False)
            if s.alias_info is not None and not s.alias_info.is_write and isinstance(a, Ref)
        }
        if not aliased or not any(r.alias_info is not None for r in overload._schema.returns):
            return
        source = next(iter(aliased.values()))
        for index in range(len(op.outputs)):
            self.base[Ref(op.name, index)] = source

    def _root(self, ref: Ref) -> Ref:
        while ref in self.base:
            ref = self.base[ref]
        return ref

    def _add(self, op: Op) -> None:
        self.ops[op.name] = op

    def _spec(self, tensor: Tensor) -> TensorSpec:
        return TensorSpec(
            str(tensor.dtype).removeprefix("torch."),
            tuple(_affine(s) for s in tensor.shape),
            tuple(_affine(s) for s in tensor.stride()),
        )

    def _arg(self, value: object) -> Arg:
        if isinstance(value, fx.Node):
            return self.values[value]
        if isinstance(value, (list, tuple)):
            return ArgList(tuple(self._arg(v) for v in cast("list[object]", value)))
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return _affine(cast(torch.SymInt, value))
        if isinstance(value, torch.dtype):
            return Named("dtype", str(value).removeprefix("torch."))
        if isinstance(value, torch.device):
            return Named("device", "stage")  # wherever the stage runs
        if isinstance(value, torch.layout):
            return Named("layout", str(value).removeprefix("torch."))
        if isinstance(value, torch.memory_format):
            return Named("memory_format", str(value).removeprefix("torch."))
        if isinstance(value, float) and not math.isfinite(value):
            return Named("float", str(value))
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        raise UserError(f"model: an operator takes an argument of type {type(value).__name__}, expected tensors and numbers")


def _is_none(value: Arg, spec: object) -> bool:
    return value is None and spec is not None


def _affine(value: int | torch.SymInt) -> Size:
    """An int, or the affine function of the batch that a symbolic size is."""
    if isinstance(value, int):
        return value
    expr = sympy.expand(cast(sympy.Expr, value.node.expr))
    symbols = tuple(expr.free_symbols)
    if not symbols:
        return int(expr)
    if len(symbols) > 1:
        raise NotAffine(str(expr))
    slope = expr.coeff(symbols[0], 1)
    fixed = expr - slope * symbols[0]
    if not (slope.is_Integer and sympy.expand(fixed).is_Integer):
        raise NotAffine(str(expr))
    return Affine(int(slope), int(sympy.expand(fixed)))


def _module_path(node: fx.Node) -> str:
    stack = cast("dict[str, tuple[str, object]]", node.meta.get("nn_module_stack") or {})
    path = list(stack.values())[-1][0] if stack else ""
    return path.removeprefix("module").removeprefix(".")


def _is_default(overload: OpOverload, name: str, value: object) -> bool:
    """`pin_memory=False` and the like say nothing, and CUDA refuses some of them."""
    return name == "pin_memory" or (name == "layout" and value is torch.strided and "to" not in overload.name())


def _is_random(overload: OpOverload, args: tuple[Arg, ...], kwargs: Mapping[str, Arg]) -> bool:
    """Whether the operator draws random numbers under these arguments."""
    base = overload.name().split("::")[1].split(".")[0]
    if base in ("dropout", "feature_dropout", "alpha_dropout", "native_dropout"):
        return bool(args[1]) and bool(args[2])
    if base == "scaled_dot_product_attention":
        return bool(args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0))
    return torch.Tag.nondeterministic_seeded in overload.tags


def _hidden_writes(label: str, args: tuple[Arg, ...]) -> tuple[str, ...]:
    """Batch and instance norm update their running statistics, which their schema does not say."""
    if label in ("aten.batch_norm.default", "aten.instance_norm.default") and args[5] is True:
        return tuple(a.op for a in args[3:5] if isinstance(a, Ref))
    return ()


def _reachable(graph: OpGraph) -> OpGraph:
    """Only the ops that the loss, the count, the outputs or a written buffer need."""
    wanted = {r.op for r in (graph.loss, graph.count, *graph.outputs.values()) if r is not None}
    kept: list[Op] = []
    for op in reversed(graph.ops):
        if op.name in wanted or op.mutates:
            kept.append(op)
            wanted.update(ref.op for ref in op.refs())
    return OpGraph(
        name=graph.name, mode=graph.mode, ops=tuple(reversed(kept)), loss=graph.loss, count=graph.count,
        outputs=graph.outputs, batch=graph.batch,
    )  # fmt: skip
