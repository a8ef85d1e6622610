"""Callbacks of layers: when a layer's gradients are there, when all are, and a forward that waits for its own average.

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
from torch.autograd import Variable
from torch.overrides import TorchFunctionMode

from isthmus.errors import UserError
from isthmus.sync.layers import Layer


class GradientHooks:
    """Post-accumulate-grad hooks on every parameter.

    `ready(number)` is called inside backward, as soon as the last gradient of a layer is complete, and `ended()` at
    the end of each backward pass. While `accumulating`, neither is called.
    """

    def __init__(self, layers: Sequence[Layer], ready: Callable[[int], None], ended: Callable[[], None]) -> None:
        self.accumulating = False
        self._layers = layers
        self._ready, self._ended = ready, ended
        self._missing: list[dict[torch.Tensor, str]] = []
        self._begun = False
        self.reset()
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._hook_of(number))
            for number, layer in enumerate(layers)
            for parameter in layer.parameters
        ]

    def reset(self) -> None:
        """From here on every layer is expected once more."""
        self._missing = [dict(zip(layer.parameters, layer.parameter_names, strict=True)) for layer in self._layers]
        self._begun = False

    @property
    def begun(self) -> bool:
        """Return whether any gradient has come since the last reset."""
        return self._begun

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _hook_of(self, number: int) -> Callable[[torch.Tensor], None]:
        def hook(parameter: torch.Tensor) -> None:
            if not self.accumulating:
                self._arrived(number, parameter)

        return hook

    def _arrived(self, number: int, parameter: torch.Tensor) -> None:
        if not self._begun:
            self._begun = True
            # DDP and FSDP end their backward in the same way: there is no public name for it.
            Variable._execution_engine.queue_callback(self._backward_ended)  # pyright: ignore[reportPrivateUsage]
        missing = self._missing[number]
        if missing.pop(parameter, None) is None:
            raise UserError(
                "a second backward pass before sync.step(): to accumulate gradients, put all passes but the last into "
                "`with sync.no_sync():`"
            )
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            raise UserError(f"layer {self._layers[number].name!r} has sparse gradients: expected dense ones")
        if not missing:
            self._ready(number)

    def _backward_ended(self) -> None:
        unused = [name for missing in self._missing for name in missing.values()]
        if unused:
            others = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
            raise UserError(
                f"parameter {unused[0]!r}{others} got no gradient in this backward pass: expected every trainable "
                "parameter to be used in each step. Freeze what is not (requires_grad_(False)), or use mode 'local' "
                "or 'outer', which average it all the same"
            )
        self._ended()


def gradients(layer: Layer) -> list[torch.Tensor]:
    found = [parameter.grad for parameter in layer.parameters]
    assert all(grad is not None for grad in found), f"{layer.name} is not ready"
    return [grad for grad in found if grad is not None]


GONE = (0, -1)


def versions(parameters: Sequence[nn.Parameter]) -> list[tuple[int, int]]:
    """Where each gradient lies, and autograd's count of the changes to it; `GONE` where there is none."""
    return [GONE if (grad := p.grad) is None else (grad.data_ptr(), grad._version) for p in parameters]  # pyright: ignore[reportPrivateUsage]


class ForwardBarriers:
    """Calls `enter(number)` before a forward reads a layer, `touch(number)` before a state dict takes or sets it."""

    def __init__(
        self, model: nn.Module, layers: Sequence[Layer], enter: Callable[[int], None], touch: Callable[[int], None]
    ) -> None:
        self._enter = enter
        self._layer_of = {p: number for number, layer in enumerate(layers) for p in layer.parameters}
        self._early: frozenset[int] = frozenset()  # layers that are read before any module of their own is entered
        self._reads: _Reads | None = None
        self.proven = False  # whether a whole forward was seen, so that nothing is read past a gate
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
