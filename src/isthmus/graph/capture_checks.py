"""What a module may not have or do, since its graph would silently be another model."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from typing import cast

from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from isthmus.errors import UserError

PlainState = Mapping[str, Mapping[str, object]]
"""Per submodule, its attributes that are plain numbers and texts."""


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
            f"{' and '.join(p for p in parts if p)}"
        )


def check_parts(module: nn.Module) -> None:
    """UserError for hooks on a submodule's backward."""
    for path, part in module.named_modules():
        if part._backward_hooks or part._backward_pre_hooks:  # pyright: ignore[reportPrivateUsage]
            raise UserError(
                f"model: module {path or type(module).__name__!r} has a hook on its backward, which would be lost in "
                "the graph: leave it out"
            )


def plain_state(module: nn.Module) -> PlainState:
    return {
        path: {k: v for k, v in vars(part).items() if isinstance(v, (int, float, str)) and k != "training"}
        for path, part in module.named_modules()
    }


def check_unchanged(module: nn.Module, before: PlainState) -> None:
    """UserError where the forward changed a plain attribute: the graph holds its first value for ever."""
    for path, state in plain_state(module).items():
        for name, value in state.items():
            old = before.get(path, {}).get(name, value)
            if old != value and not (old != old and value != value):
                raise UserError(
                    f"model: in module {path or type(module).__name__!r}: forward changes self.{name} from {old!r} to "
                    f"{value!r}, which a graph cannot follow: make it a buffer (register_buffer), or leave it out"
                )


def check_gradients(loss: Tensor) -> None:
    """UserError for an autograd.Function on the way to the loss: a graph holds its forward, not the backward that its
    author wrote."""
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
