"""Averages that reach into the next forward: each layer's forward waits for its own average, and for no other.

    compute    |- back 3 -|- back 2 -|- back 1 -|     |- forward 1 -|- forward 2 -|- forward 3 -|
    wire                  |..3..|    |....2....||..1..|

The gates are forward pre-hooks on the modules that own parameters. A module may read another's parameters past that
module's own forward, as nn.MultiheadAttention does; who does is seen in the first forward pass, where every torch
function tells what it reads, and such layers are waited for before the whole model's forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from isthmus.sync.layers import Layer


class ForwardBarriers:
    """Calls `enter(number)` before a forward reads a layer, `touch(number)` before a state dict takes or sets it."""

    def __init__(
        self, model: nn.Module, layers: Sequence[Layer], enter: Callable[[int], None], touch: Callable[[int], None]
    ) -> None:
        self._enter = enter
        self._layer_of = {p: number for number, layer in enumerate(layers) for p in layer.parameters}
        self._early: frozenset[int] = frozenset()
        """Layers that are read before any module of their own is entered."""
        self._reads: _Reads | None = None
        self.proven = False
        """Whether a whole forward was seen, so that nothing is read past a gate."""
        self._handles = [model.register_forward_pre_hook(uncompiled(self._model_begins))]
        for module in model.modules():
            numbers = sorted({self._layer_of[p] for p in module.parameters(recurse=False) if p in self._layer_of})
            if numbers:
                touching = _hook_of(touch, numbers)
                self._handles += [
                    module.register_forward_pre_hook(_hook_of(self._entered, numbers)),
                    module.register_state_dict_pre_hook(touching),
                    module.register_load_state_dict_pre_hook(touching),
                ]
        self._handles.append(model.register_forward_hook(uncompiled(self._model_ended), always_call=True))

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _entered(self, number: int) -> None:
        if self._reads is not None:
            self._reads.entered.add(number)
        self._enter(number)

    def _model_begins(self, *_: object) -> None:
        for number in self._early:
            self._enter(number)
        if not self.proven and self._reads is None:
            self._reads = _Reads(self._layer_of)
            self._reads.__enter__()

    def _model_ended(self, *_: object) -> None:
        if self._reads is not None:
            self._reads.__exit__(None, None, None)
            self._early, self._reads, self.proven = frozenset(self._reads.early), None, True


def _hook_of(call: Callable[[int], None], numbers: Sequence[int]) -> Callable[..., None]:
    def hook(*_: object) -> None:
        for number in numbers:
            call(number)

    return uncompiled(hook)


def uncompiled(hook: Callable[..., None]) -> Callable[..., None]:
    """torch.compile is to leave a hook as it is: it waits, looks at the clock, and keeps account."""
    return cast("Callable[..., None]", torch.compiler.disable(hook))


class _Reads(TorchFunctionMode):
    """Which layers a forward reads before it has entered a module that owns them."""

    def __init__(self, layer_of: Mapping[nn.Parameter, int]) -> None:
        super().__init__()
        self.entered: set[int] = set()
        self.early: set[int] = set()
        self._layer_of = layer_of

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        for value in _tensors((*args, *(kwargs or {}).values())):
            number = self._layer_of.get(value)  # pyright: ignore[reportArgumentType]
            if number is not None and number not in self.entered:
                self.early.add(number)
        return func(*args, **(kwargs or {}))


def _tensors(values: Iterable[object]) -> Iterable[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
