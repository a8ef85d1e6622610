"""A callback that puts `isthmus.sync` under the Trainer of transformers, in a script that torchrun starts.

trainer = Trainer(..., callbacks=[SyncCallback(mode="dream", period=5)])
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from isthmus.combinations import refused
from isthmus.errors import UserError
from isthmus.extensions import what_is_missing
from isthmus.sync.attach import DEFAULT_OPTIONS, attach
from isthmus.sync.options import Options
from isthmus.sync.sync import Sync
from isthmus.training.compression import DeltaCodec

try:
    from accelerate.state import GradientState
    from transformers import TrainerCallback
except ModuleNotFoundError as e:
    missing = what_is_missing("isthmus.sync.hugging_face", e)
    if missing is None:
        raise
    raise ModuleNotFoundError(missing, name=e.name) from e

__all__ = ["SyncCallback"]


class SyncCallback(TrainerCallback):
    """Keeps the replicas of a Trainer's model together, in place of the DistributedDataParallel that it wraps them in.

    The arguments are those of `isthmus.sync.attach`. The Trainer itself decides about batches, learning rates, logs,
    evaluations and checkpoints, as ever; a checkpoint has the model and the optimizer of worker 0.

    Raises UserError where training begins: without torchrun, with FSDP or DeepSpeed, with gradient clipping in a mode
    that updates inside backward (`max_grad_norm=0` turns it off), and for what `attach` refuses.
    """

    def __init__(
        self,
        *,
        mode: str = "dream",
        period: int = 5,
        options: Options = DEFAULT_OPTIONS,
        codec: DeltaCodec | None = None,
    ) -> None:
        self.sync: Sync | None = None  # while the Trainer trains, and afterwards: `sync.statistics()`
        self._mode, self._period, self._options, self._codec = mode, period, options, codec
        self._wrapper: DistributedDataParallel | None = None
        self._watching: RemovableHandle | None = None
        self._training = ExitStack()
        self._accumulation = ExitStack()

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._watch_for_wrapper(kwargs["model"])

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model, optimizer = kwargs["model"], kwargs["optimizer"]
        if not dist.is_initialized():
            raise UserError("SyncCallback: got a script of one process, expected one that torchrun started")
        if self._wrapper is None:
            raise UserError(
                "SyncCallback: the model is not in a DistributedDataParallel that it has seen: give the callback to "
                "Trainer(callbacks=[...]), with neither FSDP nor DeepSpeed"
            )
        self.sync = sync = attach(
            model, optimizer.optimizer, mode=self._mode, period=self._period, options=self._options, codec=self._codec
        )
        self._training.callback(sync.close)
        if sync.updates_in_backward and args.max_grad_norm > 0:
            self._training.close()
            got = f"max_grad_norm={args.max_grad_norm}"
            raise refused("changed gradients", "updates in backward", got, "SyncCallback")
        self._wrapper.require_backward_grad_sync = False  # as in its no_sync, for all of the training
        self._training.callback(setattr, self._wrapper, "require_backward_grad_sync", True)
        optimizer.step = lambda closure=None: _step(sync, optimizer, closure)  # pyright: ignore[reportUnknownLambdaType]
        self._training.callback(delattr, optimizer, "step")
        self._training.callback(model.register_forward_pre_hook(self._begin_forward).remove)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.sync is not None and args.max_grad_norm <= 0:
            self.sync.accept_gradients()  # the Trainer has asked for their norm

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._accumulation.close()
        self._training.close()
        self._watch_for_wrapper(kwargs["model"])

    def _watch_for_wrapper(self, model: nn.Module) -> None:
        """The Trainer tells callbacks of the model, and of nothing around it."""

        def look(parent: nn.Module, _: str, child: nn.Module | None) -> None:
            if child is model and isinstance(parent, DistributedDataParallel):
                self._wrapper = parent
                handle.remove()

        if self._watching is not None:
            self._watching.remove()
        self._watching = handle = register_module_module_registration_hook(look)

    def _begin_forward(self, module: nn.Module, _: object) -> None:
        """The last backward pass of a step is the one whose gradients count."""
        self._accumulation.close()
        if self.sync is not None and module.training and not GradientState().sync_gradients:
            self._accumulation.enter_context(self.sync.no_sync())


def _step(sync: Sync, optimizer: Any, closure: Any) -> None:
    """In place of the step of accelerate's wrapper."""
    scaler = optimizer.scaler
    if scaler is None:
        sync.step(closure)
        return
    scale = scaler.get_scale()
    sync.step(closure, scaler=scaler)
    scaler.update()
    optimizer._is_overflow = scaler.get_scale() < scale  # pyright: ignore[reportPrivateUsage]
