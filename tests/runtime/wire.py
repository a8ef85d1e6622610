"""Assignments for tests of what happens on connections: stages without operators."""

from __future__ import annotations

from isthmus.data import DataSpec
from isthmus.graph import StageGraph
from isthmus.protocol import StageView
from isthmus.protocol.run_messages import Share
from isthmus.runtime.messages.assignment import Assignment, Neighbour
from isthmus.training.engine import EngineConfig


def assignment(
    device: str, *, run: str = "secret", stage: int = 0, neighbours: tuple[Neighbour, ...] = (), timeout_s: float = 5.0
) -> Assignment:
    nothing = StageGraph(index=stage, ops=(), columns=(), receives=(), sends=(), shared_from={}, shared_with={})
    others = sorted(neighbour.stage for neighbour in neighbours)
    below = tuple(other for other in others if other < stage)
    above = tuple(other for other in others if other > stage)
    view = StageView(
        stage=stage,
        stages=len(neighbours) + 1,
        in_flight=1,
        forward_from=below,
        forward_to=above,
        backward_from=above,
        backward_to=below,
    )
    return Assignment(
        run=run,
        device=device,
        view=view,
        train=nothing,
        evaluation=nothing,
        placeholders={},
        column_dtypes={},
        engine=EngineConfig(),
        data=DataSpec(kind="digits"),
        train_samples=1,
        neighbours=neighbours,
        timeout_s=timeout_s,
        share=Share(first=0, count=8, of=8, micro_batch_size=1),
    )
