"""A strategy that puts `isthmus.sync` under the Trainer of Lightning, in a script that torchrun starts.

trainer = lightning.Trainer(..., strategy=SyncStrategy(mode="dream", period=5))
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import Any

from torch import nn
from torch.optim import Optimizer

from isthmus.combinations import refused
from isthmus.extensions import what_is_missing
from isthmus.sync.attach import DEFAULT_OPTIONS, attach
from isthmus.sync.options import Options
from isthmus.sync.sync import Sync
from isthmus.training.compression import DeltaCodec

try:
    from lightning.pytorch.strategies import DDPStrategy
    from lightning.pytorch.trainer.states import TrainerFn
except ModuleNotFoundError as e:
    missing = what_is_missing("isthmus.sync.lightning", e)
    if missing is None:
        raise
    raise ModuleNotFoundError(missing, name=e.name) from e

__all__ = ["SyncStrategy"]


class SyncStrategy(DDPStrategy):
    """Lightning's `ddp`, but `isthmus.sync` keeps the replicas together: nothing is wrapped in DistributedDataParallel.

    The arguments are those of `isthmus.sync.attach`; `strategy` are those of `DDPStrategy`. Gradients that are clipped
    are refused by the modes that update inside backward, and 16-bit floats that need a scaler by all. Raises UserError
    for a module with other than one optimizer, and for what `attach` refuses.
    """

    def __init__(
        self,
        *,
        mode: str = "dream",
        period: int = 5,
        options: Options = DEFAULT_OPTIONS,
        codec: DeltaCodec | None = None,
        **strategy: Any,
    ) -> None:
        super().__init__(**strategy)
        self.sync: Sync | None = None  # since training began: `sync.statistics()`
        self._mode, self._period, self._options, self._codec = mode, period, options, codec

    def configure_ddp(self) -> None:
        """Nothing is wrapped."""

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        if len(self.optimizers) != 1:
            raise refused("several optimizers", "Lightning", len(self.optimizers))
        if getattr(self.precision_plugin, "scaler", None) is not None:
            raise refused("GradScaler", "Lightning", "one")
        assert self.model is not None, "Lightning has connected it"
        self.sync = attach(
            self.model,
            self.optimizers[0],
            mode=self._mode,
            period=self._period,
            options=self._options,
            codec=self._codec,
        )

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: nn.Module | None = None, **kwargs: Any
    ) -> Any:
        """The closure of Lightning makes the backward pass and clips; what follows is the step of `sync`."""
        sync, inner = self.sync, optimizer.step
        assert sync is not None, "it was attached before the first step"

        def step(closure: Callable[[], Any]) -> Any:
            optimizer.step = inner  # for `sync` itself, inside backward too
            result = closure()
            sync.step()
            return result

        optimizer.step = step  # pyright: ignore[reportAttributeAccessIssue]
        try:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        finally:
            optimizer.step = inner

    @contextlib.contextmanager
    def block_backward_sync(self) -> Generator[None]:
        """Block the exchange in all backward passes of a step but the last."""
        with contextlib.nullcontext() if self.sync is None else self.sync.no_sync():
            yield

    def teardown(self) -> None:
        if self.sync is not None:
            self.sync.close()
        super().teardown()
