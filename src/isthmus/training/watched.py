"""An engine that shows values inside its stage, as another cut of the model would send them (`graph.boundaries`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor

from isthmus.accelerators import HOST, Accelerator
from isthmus.graph.boundaries import WATCHED, watched_node
from isthmus.graph.opgraph import Ref
from isthmus.graph.partition import StageGraph
from isthmus.training.engine import Again, EngineConfig, Flight, TorchEngine
from isthmus.training.program import RunsOperators

Observe = Callable[[int, str, str, Tensor], None]  # gets step, node, leaf and value


class WatchedEngine(TorchEngine):
    """As `TorchEngine`. `observe` gets the values of the train graph's watched outputs, and their gradients, once a
    micro-batch."""

    def __init__(
        self,
        train: StageGraph,
        evaluation: StageGraph,
        config: EngineConfig,
        weights: Mapping[str, Tensor],
        *,
        accelerator: Accelerator = HOST,
        recompute: bool = False,
        observe: Observe,
    ) -> None:
        super().__init__(train, evaluation, config, weights, accelerator=accelerator, recompute=recompute)
        self._observe = observe
        self._watched = {name: ref for name, ref in train.outputs.items() if name.startswith(WATCHED)}

    def _run(self, program: RunsOperators, micro_batch: int, start: Again) -> tuple[Flight, dict[Ref, Tensor]]:
        flight, values = super()._run(program, micro_batch, start)
        for name, ref in self._watched.items():
            value, (forward, backward) = values[ref], (watched_node(name, p) for p in ("forward", "backward"))
            self._observe(start.step, forward, f"{micro_batch}", value.detach())
            if value.requires_grad:
                value.register_hook(partial(self._returned, start.step, backward, f"{micro_batch}"))
        return flight, values

    def _returned(self, step: int, node: str, name: str, gradient: Tensor) -> None:
        self._observe(step, node, name, gradient.detach())
