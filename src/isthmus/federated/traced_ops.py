"""A list of operators that torch wrote down, less what it does for nothing.

What is left are the same operators on the same numbers, so results keep their bits. For small models the list's length
is what counts: of a perceptron's step under vmap a third goes.
"""
# What an operator writes to is known to nobody but its schema.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.dialect.common.cse_pass import CSEPass, get_CSE_banned_ops

Operation = Callable[..., Sequence[Tensor]]
_aten = torch.ops.aten
_SHAPING = (_aten.view.default, _aten.expand.default, _aten._unsafe_view.default)
_ALIKE: dict[object, float] = {_aten.zeros_like.default: 0, _aten.ones_like.default: 1}
_CONSTANT = (_aten.scalar_tensor.default, *_ALIKE)  # operators whose result follows from shapes
_DIRECT, _METHODS = torch._VF, torch._C.TensorBase
"""Where operators have functions of their own, which take half as long to call as through their schemas."""


def written_down(act: Operation, given: Sequence[Tensor]) -> Operation:
    """Trace `act` on tensors of these shapes; no result shares memory with what is given. RuntimeError where it cannot
    be written down."""
    written = make_fx(act)(*given)
    if any(_changes(node) for node in written.graph.nodes):
        return written.forward  # to leave something out might change what another operator finds
    for node in written.graph.nodes:
        if node.op == "call_function" and _is_idle(node):
            node.replace_all_uses_with(node.args[0])
            written.graph.erase_node(node)
    shared = CSEPass(banned_ops=get_CSE_banned_ops())(written)
    assert shared is not None, "the pass gives a copy"
    short = shared.graph_module
    constants = _kept_constants(short, given[0].device)
    _turned_once(short.graph)
    short.graph.eliminate_dead_code()
    short.recompile()
    shared_bounds = {tensor.untyped_storage().data_ptr() for tensor in (*given, *constants)}
    if any(tensor.untyped_storage().data_ptr() in shared_bounds for tensor in short(*given)):
        return make_fx(act)(*given).forward
    return _direct(short, given)


def _direct(module: fx.GraphModule, given: Sequence[Tensor]) -> Operation:
    """The operators called by functions of their own, where that gives the same."""
    graph = copy.deepcopy(module.graph)
    for node in graph.nodes:
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        name = node.target._schema.name.removeprefix("aten::")
        if hasattr(_DIRECT, name):
            node.target = getattr(_DIRECT, name)
        elif hasattr(_METHODS, name):
            node.op, node.target = "call_method", name
    quick = fx.GraphModule(module, graph)
    try:
        alike = all(torch.equal(a, b) for a, b in zip(module(*given), quick(*given), strict=True))
    except (TypeError, RuntimeError):  # its arguments go by other names there
        alike = False
    return (quick if alike else module).forward


def _changes(node: fx.Node) -> bool:
    """Return whether it writes to one of its inputs."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _is_idle(node: fx.Node) -> bool:
    """A shape that is what it was, or a product with 1 (the beta of `addmm`)."""
    given = node.args[0] if node.args else None
    if not isinstance(given, fx.Node):
        return False
    before, after = given.meta.get("tensor_meta"), node.meta.get("tensor_meta")  # none where several tensors come out
    if before is None or after is None or (before.shape, before.dtype) != (after.shape, after.dtype):
        return False
    return node.target in _SHAPING or (node.target is _aten.mul.Scalar and node.args[1:] == (1,))


def _kept_constants(module: fx.GraphModule, device: torch.device) -> list[Tensor]:
    """Make constants once. For gradients only the loss's shape is needed, so that most of it is left out with them."""
    found: list[Tensor] = []
    for node in module.graph.nodes:
        meta = node.meta.get("tensor_meta")
        if node.op != "call_function" or node.target not in _CONSTANT or meta is None:
            continue
        like = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=device)
        value = _ALIKE.get(node.target, node.args[0])
        assert isinstance(value, bool | int | float), "a scalar is given as a number"
        found.append(like.fill_(value))
        name = f"constant_{len(found)}"
        setattr(module, name, found[-1])
        with module.graph.inserting_before(node):
            node.replace_all_uses_with(module.graph.create_node("get_attr", name))
        module.graph.erase_node(node)
    return found


def _turned_once(graph: fx.Graph) -> None:
    """Remove transpositions that are turned back."""
    for node in graph.nodes:
        before = node.args[0] if node.args else None
        if node.target is not _aten.transpose.int or not isinstance(before, fx.Node):
            continue
        if before.target is _aten.transpose.int and before.args[1:] in (node.args[1:], node.args[:0:-1]):
            node.replace_all_uses_with(before.args[0])


def get_ready() -> None:
    """Load what writing down needs: 800 modules, which copies of this process then have in common."""
    make_fx(torch.neg)(torch.zeros(1))
