"""Capture: a torch module becomes two `OpGraph`s (train and eval) without allocating a weight. What a module may not
have or do is refused, since its graph would silently be another model.

The module is built and exported under fake tensors with `torch.export(strict=False)`. The batch dimension is
symbolic where the module allows it; where it does not, the graph is valid at the micro-batch size only.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node
from torch.export import Dim, ExportedProgram, export

from isthmus.errors import IsthmusError, UserError
from isthmus.graph.building import HeldTensors, build_fake, held_by
from isthmus.graph.capture_errors import ModulePath, explain, quiet, refuse_hooks
from isthmus.graph.captured import Captured, Column
from isthmus.graph.convert import MADE, convert
from isthmus.graph.forward_state import ForwardState, StateChange, check_changes
from isthmus.graph.label_means import LabelMeans
from isthmus.graph.measure import measure
from isthmus.graph.metrics import MetricSums
from isthmus.graph.opgraph import Op, OpGraph
from isthmus.graph.outputs import split_outputs
from isthmus.graph.repeats import MANY, Repeats, Unlike, find_repeats
from isthmus.graph.sizes import NotAffine
from isthmus.graph.tidy import mark_training

LOSS = ": with a column 'target' give `loss=` too, or a forward that takes it and returns the loss"
EXAMPLE_BATCH = 4  # any size above 1 will do: torch specialises the sizes 0 and 1


class LossModule(nn.Module):
    """A user's module behind one calling convention: a dict of columns in; (loss, count or None, outputs, tensors that
    it keeps, by the names of buffers, or `MADE` and a number) out. `changed` gets all that it changed but buffers.

    In eval mode, with `metrics`, the loss is a vector: the loss, and then sums and counts of metrics.
    """

    def __init__(
        self,
        module: nn.Module,
        changed: Callable[[Sequence[StateChange]], None],
        *,
        uneven: bool,
        metrics: MetricSums | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        self._changed = changed
        self._uneven = uneven
        self._metrics = metrics

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor | None, dict[str, Tensor], dict[str, Tensor]]:
        before = ForwardState(self.module)
        # A rest is evaluated by what copies take off again: roundings of bf16 would be many times as large.
        wide = not self.module.training
        with LabelMeans(self.module, batch.values(), uneven=self._uneven, in_float32=wide) as means:
            outputs = self.module(**batch)
        loss, count, others = means.summed(*split_outputs(outputs))
        before.check_random()
        kept, changes = before.assigned(), before.changes()
        for number, change in enumerate(changes):
            change.put_back()
            if isinstance(change.value, Tensor):
                kept[f"{MADE}{number}"] = change.value
        self._changed(changes)
        if self.module.training:
            check_gradients(loss)
        elif self._metrics is not None:
            with means:
                sums = self._metrics(outputs, batch, means.compared())
            dtype = torch.float64 if torch.float64 in (loss.dtype, sums.dtype) else torch.float32
            loss = torch.cat([loss.reshape(1).to(dtype), sums.to(dtype)])
        return loss, count, others, kept


def capture(
    build: Callable[[], nn.Module],
    columns: Mapping[str, Column],
    *,
    name: str = "model",
    batch: int = EXAMPLE_BATCH,
    dtype: torch.dtype = torch.float32,
    metrics: MetricSums | None = None,
) -> Captured:
    """Build the module and export its train and eval graphs; no weight is allocated.

    `columns` are the keyword arguments of the forward; every tensor's first dimension is the batch. `batch` is the
    size to capture at when the module does not allow a symbolic one. `dtype` is the compute type: parameters
    and floating-point columns are cast to it. `metrics` computes sums and counts, [n], of the model's outputs and the
    batch: the eval graph's loss is then a vector that they follow.

    Raises UserError, naming the module path and what to change, for whatever torch.export cannot take and for a
    forward that does not return a scalar loss.
    """
    constants: dict[str, Tensor] = {}
    graphs: dict[str, OpGraph] = {}
    with FakeTensorMode(allow_non_fake_inputs=True), refuse_hooks():
        module, built = build_fake(build, dtype)
        check_columns(module, columns)
        check_parts(module)
        for mode in ("train", "eval"):
            held = held_by(module, built)
            try:
                example = _Example(columns, batch, dtype, metrics)
                graph, found = _capture_mode(module.train(mode == "train"), example, name, held)
            except UserError as e:
                if mode == "eval":
                    raise UserError(f"{e} (in eval mode)") from e
                raise
            graphs[mode] = graph
            constants |= found
    train, evaluation = mark_training(graphs["train"], graphs["eval"])
    _check_memory(built.overlapping, (*train.ops, *evaluation.ops))
    return Captured(train=train, eval=evaluation, constants=constants)


def _check_memory(overlapping: Sequence[tuple[str, str]], ops: Sequence[Op]) -> None:
    """UserError where one of two variables changes in training, and eager code would change the other with it."""
    variables = {op.target: op for op in ops if op.kind in ("parameter", "buffer", "constant")}
    for pair in overlapping:
        known = [variables[name] for name in pair if name in variables]
        if len(known) < 2 or not any(op.learns for op in known):
            continue
        first, second = (f"{'tensor' if op.kind == 'constant' else op.kind} {op.target!r}" for op in known)
        if pair[0] == pair[1]:
            raise UserError(f"model: {first} was expanded, so that elements share memory: expected memory of its own")
        raise UserError(
            f"model: {first} and {second} share their memory, and training would change one of them alone: tie them as "
            "one parameter (a.weight = b.weight), or .clone() one"
        )


class _Example(NamedTuple):
    columns: Mapping[str, Column]
    batch: int
    dtype: torch.dtype
    metrics: MetricSums | None


def _capture_mode(module: nn.Module, on: _Example, name: str, held: HeldTensors) -> tuple[OpGraph, dict[str, Tensor]]:
    columns, batch, dtype, metrics = on
    mode: Literal["train", "eval"] = "train" if module.training else "eval"
    if dtype is torch.float32 and {p.dtype for p in module.parameters() if p.is_floating_point()} == {torch.float64}:
        dtype = torch.float64  # as the builder chose, columns too
    example = _example(columns, max(batch, 2), dtype)
    wrap = partial(LossModule, uneven=any(column.uneven for column in columns.values()), metrics=metrics)

    def of(
        program: ExportedProgram, made: Mapping[str, UserError], batch: int | None, repeats: Repeats | None = None
    ) -> _Found:
        return convert(program, name=name, mode=mode, batch=batch, held=held, made=made, repeats=repeats)

    try:
        repeats = find_repeats(module, many := _example(columns, MANY, dtype), partial(_forward, module, many, wrap))
        found = None
        if repeats is not None:
            with contextlib.suppress(ValueError, UserError, NotAffine, _Specialised), repeats.shortened():
                found = _graph(module, example, partial(of, batch=None, repeats=repeats), symbolic=True, wrap=wrap)
        graph, constants = found or _graph(module, example, partial(of, batch=None), symbolic=True, wrap=wrap)
    except (NotAffine, _Specialised):
        example = _example(columns, batch, dtype)
        graph, constants = _graph(module, example, partial(of, batch=batch), symbolic=False, wrap=wrap)
    with quiet():
        graph = measure(graph)
    if mode == "train" and not any(graph.op(graph.loss.op).requires_grad):
        raise UserError("model: the loss depends on no trainable parameter, so there is nothing to train")
    return graph, constants


def _forward(module: nn.Module, columns: Mapping[str, Tensor], wrap: _Wrap) -> object:
    """The results of a forward that changes nothing; Unlike of another."""
    changed: list[StateChange] = []
    results = wrap(module, changed.extend)(columns)
    if changed or results[-1]:
        raise Unlike
    return results


class _Specialised(Exception):
    """The module fixes its batch size."""


_Found = tuple[OpGraph, dict[str, Tensor]]
_Wrap = Callable[[nn.Module, Callable[[Sequence[StateChange]], None]], LossModule]
_Convert = Callable[[ExportedProgram, Mapping[str, UserError]], _Found]


def _graph(module: nn.Module, example: dict[str, Tensor], convert: _Convert, *, symbolic: bool, wrap: _Wrap) -> _Found:
    """UserError where a forward reads what the one before has changed: unless all after the first change nothing any
    more and have the same graph, as where it warns once, or a library installs its hooks."""
    program, made = _export(module, example, symbolic=symbolic, wrap=wrap)
    if isinstance(made, dict):
        return convert(program, made)
    before = ForwardState(module)
    try:
        with quiet():
            module(**example)
        before.assigned()
        try:
            settled, still = _export(module, example, symbolic=symbolic, wrap=wrap)
        except UserError:  # of what the first forward has left
            raise made from None
        if not isinstance(still, dict):
            raise made
        found = convert(settled, still)
        same = _is_same(convert(program, {}), found)
    finally:
        for change in before.changes():
            change.put_back()
        before.assigned()
    if not same:
        raise made
    return found


def _is_same(first: _Found, second: _Found) -> bool:
    with unset_fake_temporarily():
        return (
            first[0] == second[0]
            and first[1].keys() == second[1].keys()
            and all(torch.equal(tensor, second[1][name]) for name, tensor in first[1].items())
        )


def _export(
    module: nn.Module, example: dict[str, Tensor], *, symbolic: bool, wrap: _Wrap
) -> tuple[ExportedProgram, dict[str, UserError] | UserError]:
    """The program; and of the tensors that its forward keeps and reads again what to raise for one that changes. In
    place of these the error for another value that it keeps and reads."""
    changes: list[StateChange] = []

    def changed(found: Sequence[StateChange]) -> None:
        changes[:] = found

    shapes = {"batch": {k: {0: Dim("batch", min=2, max=1 << 20)} for k in example}} if symbolic else None
    path = ModulePath(module)
    try:
        with path, quiet():
            program = export(wrap(module, changed), (example,), strict=False, dynamic_shapes=shapes)
            try:
                read = check_changes(changes, lambda: module(**example))
            except UserError as e:
                return program, e
            return program, {f"{MADE}{changes.index(change)}": change.refusal() for change in read}
    except IsthmusError:
        raise
    except Exception as e:  # torch.export raises many types, some of them private
        if symbolic and _is_specialisation(e):
            raise _Specialised from e
        raise explain(e, path, example) from e


def _is_specialisation(error: Exception) -> bool:
    text = f"{type(error).__name__}: {error}"
    return "ConstraintViolation" in text or "Constraints violated" in text or "specialized" in text


def _example(columns: Mapping[str, Column], batch: int, dtype: torch.dtype) -> dict[str, Tensor]:
    example: dict[str, Tensor] = {}
    for name, column in columns.items():
        kind: object = getattr(torch, column.dtype, None)
        if not isinstance(kind, torch.dtype):
            raise UserError(f"column {name!r}: got dtype {column.dtype!r}, expected a torch dtype such as float32")
        example[name] = torch.zeros((batch, *column.shape), dtype=dtype if kind.is_floating_point else kind)
    return example


def check_columns(module: nn.Module, columns: Collection[str]) -> None:
    """UserError unless the module's forward takes exactly these keyword arguments."""
    parameters = inspect.signature(module.forward).parameters
    keyword = {n: p for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    missing = [n for n, p in keyword.items() if p.default is p.empty and n not in columns]
    unexpected = [] if takes_any else [c for c in columns if c not in keyword]
    if missing or unexpected:
        parts = [f"it needs {missing}" if missing else "", f"it does not take {unexpected}" if unexpected else ""]
        raise UserError(
            f"model: forward({', '.join(keyword)}) does not fit the data's columns {list(columns)}: "
            f"{' and '.join(p for p in parts if p)}{LOSS if 'target' in unexpected else ''}"
        )


def check_parts(module: nn.Module) -> None:
    """UserError for hooks on a submodule's backward."""
    for path, part in module.named_modules():
        if part._backward_hooks or part._backward_pre_hooks:  # pyright: ignore[reportPrivateUsage]
            raise UserError(
                f"model: module {path or type(module).__name__!r} has a hook on its backward, which would be lost in "
                "the graph: leave it out"
            )


def check_gradients(loss: Tensor) -> None:
    """UserError for an autograd.Function on the way to the loss: a graph holds its forward, not its own backward."""
    todo: list[Node | None] = [loss.grad_fn]
    seen: set[Node] = set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, BackwardCFunction) and not _author(node).__module__.startswith("torch."):
            raise UserError(
                f"model: autograd.Function {_author(node).__name__!r} brings its own backward, which a graph cannot "
                f"hold: write it with torch operators (it is in {_author(node).__module__})"
            )
        todo += [following for following, _ in node.next_functions]


def _author(node: BackwardCFunction) -> type:
    return cast(type, node._forward_cls)  # pyright: ignore[reportAttributeAccessIssue]  # set by torch's metaclass
