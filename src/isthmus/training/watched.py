"""An engine that shows values inside its stage, as another cut of the model would send them (`graph.boundaries`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor

from isthmus.graph.boundaries import WATCHED, watched_node
from isthmus.graph.opgraph import Ref
from isthmus.training.engine import Again, Flight, TorchEngine
from isthmus.training.program import RunsOperators

Observe = Callable[[int, str, str, Tensor], None]  # gets step, node, leaf and value


class WatchedEngine(TorchEngine):
    """A `TorchEngine`. `observe` gets the watched outputs of the train graph and their gradients."""

    observe: Observe  # set before the first forward

    def _prepare(self, state: Mapping[str, Tensor]) -> None:
        self._watched = {name: ref for name, ref in self.train.outputs.items() if name.startswith(WATCHED)}

    def _run(self, program: RunsOperators, micro_batch: int, start: Again) -> tuple[Flight, dict[Ref, Tensor]]:
        flight, values = super()._run(program, micro_batch, start)
        for name, ref in self._watched.items():
            value, (forward, backward) = values[ref], (watched_node(name, p) for p in ("forward", "backward"))
            self.observe(start.step, forward, f"{micro_batch}", value.detach())
            if value.requires_grad:
                value.register_hook(partial(self._returned, start.step, backward, f"{micro_batch}"))
        return flight, values

    def _returned(self, step: int, node: str, name: str, gradient: Tensor) -> None:
        self.observe(step, node, name, gradient.detach())
