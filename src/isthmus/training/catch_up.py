"""A state that follows a stage's: the same updates, with the stage's gradients, and no stage."""

from __future__ import annotations

from collections.abc import Mapping, Set

from torch import Tensor, nn

from isthmus.training.checkpoint import OPTIMIZER
from isthmus.training.engine import EngineConfig
from isthmus.training.optim import Optimizers


class CatchUpState:
    """Parts of a model after `step` steps. Bit for bit the stage's own, on a processor of the same kind: an update is
    element by element."""

    def __init__(self, config: EngineConfig, trained: Set[str], step: int, state: Mapping[str, Tensor]) -> None:
        """`state` as a stage's `Engine.state`; of it, optimizers update what is `trained`."""
        own = {name: value for name, value in state.items() if not name.startswith(OPTIMIZER)}
        self._parameters = {n: nn.Parameter(value.clone()) for n, value in own.items() if n in trained}
        self._buffers = {n: value for n, value in own.items() if n not in trained}
        self._optimizers = Optimizers(config.optimizers, self._parameters)
        self._optimizers.load(state)
        self._config = config
        self.step = step

    def repeat(self, given: Mapping[str, Tensor]) -> None:
        """The next step. `given`: each parameter's gradient as the stage's optimizers get it, none where it has none,
        and the buffers' values."""
        for name, value in given.items():
            if name in self._parameters:
                self._parameters[name].grad = value
            else:
                self._buffers[name] = value
        self._optimizers.step(self._config.learning_rate.factor(self.step, self._config.steps))
        self.step += 1

    def state(self) -> dict[str, Tensor]:
        """As `Engine.state`: no copies."""
        found = {name: p.detach() for name, p in self._parameters.items()}
        return found | self._buffers | self._optimizers.state()
