"""Facts of an operator's schema: which arguments it writes, which its results may look into, whether it draws."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from isthmus.graph.opgraph import Arg, Ref

SILENT_ALIASES = {  # operators that may return their input itself, which their schema does not say
    "dropout",
    "feature_dropout",
    "alpha_dropout",
    "feature_alpha_dropout",
    "type_as",
    "sum_to_size",
    "atleast_1d",
    "atleast_2d",
    "atleast_3d",
}

IN_PLACE_VIEWS = {"squeeze_", "unsqueeze_", "transpose_", "swapaxes_", "swapdims_", "t_", "detach_"}
"""They change how a tensor looks into its storage, and no element of it."""

DROPOUTS = {"dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout", "native_dropout"}

RECURRENT = {"aten.lstm.input", "aten.gru.input", "aten.rnn_tanh.input", "aten.rnn_relu.input"}


def base_name(target: str) -> str:
    """`linear` of `aten.linear.default`."""
    return target.split(".")[1]


def out_of_place(target: str) -> str:
    """`aten.relu.default` of `aten.relu_.default`."""
    return target.replace("_.", ".", 1)


def label_argument(target: str) -> int | None:
    """Position of the class ids among the arguments of a loss."""
    return 1 if base_name(target) in ("cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d") else None


def aliased_position(overload: OpOverload) -> int | None:
    """Position of the argument that the results may look into."""
    if base_name(str(overload)) in SILENT_ALIASES:
        return 0
    schema = overload._schema  # pyright: ignore[reportPrivateUsage]  # torch has no public way to it
    if not any(r.alias_info is not None for r in schema.returns):
        return None
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and not argument.alias_info.is_write:
            return position
    return None


def returns_its_input(node: fx.Node, overload: OpOverload) -> bool:
    """Return whether a call hands back its first argument itself, as dropout of 0 does.

    Such a call is no operator of the graph: eager autograd has one tensor there, with one sum of gradients. Two values
    would cross a cut, and their gradients be summed apart.
    """
    if base_name(str(overload)) == "contiguous" or aliased_position(overload) != 0 or not _is_composite(overload):
        return False  # whether a tensor is contiguous is known for sure only where it is computed
    first = node.args[0]
    return isinstance(first, fx.Node) and fake_result(overload, node.args, node.kwargs) is first.meta["val"]


def fake_result(overload: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
    """Return the operator's result for the fake tensors of these nodes."""
    given, named = tree_map_only(fx.Node, lambda node: node.meta["val"], (tuple(args), dict(kwargs)))
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        fakes = [t for t in tree_leaves((given, named)) if isinstance(t, FakeTensor)]
        for fake in fakes:
            fake.constant = None  # a known value that is fake itself: torch would compute with it, and crash
        if fakes:
            stack.enter_context(fakes[0].fake_mode)
        return overload(*given, **named)


def _is_composite(overload: OpOverload) -> bool:
    """Return whether a call is made of calls of other operators; all others return tensors of their own."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(  # pyright: ignore[reportPrivateUsage]  # no public way
        overload.name(), "CompositeImplicitAutograd"
    )


def written(overload: OpOverload, args: Sequence[Arg]) -> list[Ref]:
    """Tensors given by position that a call writes."""
    arguments = overload._schema.arguments  # pyright: ignore[reportPrivateUsage]
    writes = [a.alias_info is not None and a.alias_info.is_write for a in arguments]
    return [a for a, w in zip(args, writes, strict=False) if w and isinstance(a, Ref)]


def without_out(overload: OpOverload) -> OpOverload | None:
    """The overload that returns what this one writes to `out=`; None where it writes anything else."""

    def taken(of: OpOverload) -> list[tuple[str, str]]:
        arguments = of._schema.arguments  # pyright: ignore[reportPrivateUsage]
        return [(a.name, str(a.type)) for a in arguments if a.name != "out"]

    packet = overload.overloadpacket
    others = [cast(OpOverload, getattr(packet, name)) for name in packet.overloads()]
    return next((other for other in others if other is not overload and taken(other) == taken(overload)), None)


def hidden_writes(target: str, args: Sequence[Arg]) -> tuple[str, ...]:
    """Batch and instance norm update their running statistics, which their schema does not say."""
    if target in ("aten.batch_norm.default", "aten.instance_norm.default") and args[5] is True:
        return tuple(a.op for a in args[3:5] if isinstance(a, Ref))
    return ()


def is_random(overload: OpOverload, args: Sequence[Arg], kwargs: Mapping[str, Arg]) -> bool:
    """Return whether the operator draws random numbers under these arguments."""
    base = base_name(str(overload)).removesuffix("_")
    if base in DROPOUTS:
        return bool(args[1]) and bool(args[2])
    if base == "scaled_dot_product_attention":
        return bool(args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0))
    if str(overload) in RECURRENT:
        return bool(args[5]) and bool(args[6])
    return torch.Tag.nondeterministic_seeded in overload.tags


def is_default(overload: OpOverload, name: str, value: object) -> bool:
    """`pin_memory=False` and the like say nothing, and CUDA refuses some of them."""
    return name == "pin_memory" or (name == "layout" and value is torch.strided and "to" not in overload.name())


def shares_storage(a: Tensor, b: Tensor) -> bool:
    return storage_of(a) == storage_of(b)


def storage_of(tensor: Tensor) -> int:
    """Identity of the tensor's storage; works for fake and meta tensors, whose data pointers are all 0."""
    return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]
