"""Callbacks for when a layer's gradients are there, and when all are."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.autograd import Variable

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
        """Whether any gradient has come since the last reset."""
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
    """The gradients of a layer that is ready."""
    found = [parameter.grad for parameter in layer.parameters]
    assert all(grad is not None for grad in found), f"{layer.name} is not ready"
    return [grad for grad in found if grad is not None]


GONE = (0, -1)


def versions(parameters: Sequence[nn.Parameter]) -> list[tuple[int, int]]:
    """Where each gradient lies, and autograd's count of the changes to it; `GONE` where there is none."""
    return [GONE if (grad := p.grad) is None else (grad.data_ptr(), grad._version) for p in parameters]  # pyright: ignore[reportPrivateUsage]
