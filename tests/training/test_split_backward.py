"""Weight gradients apart from input gradients: what is kept in between. Their bits: `test_parity`."""

from __future__ import annotations

import weakref

from in_process import Pipeline, batches, capture_of, weights_of
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from zoo import model

from isthmus.graph import Flow, Ref, cuts
from isthmus.training.engine import EngineConfig
from isthmus.training.split_backward import SplitEngine

CONFIG = EngineConfig(micro_batches=3, micro_batch_size=2)


def test_the_backward_frees_what_weight_gradients_do_not_need() -> None:
    """What autograd saves in the forward is there until B; then as much as the plan says; behind W nothing."""
    build, columns = model("gpt")
    graph = capture_of(build, columns)
    legal = [cut.position for cut in cuts(Flow(graph.train)) if len(cut.values) == 1]
    pipeline = Pipeline(graph, [legal[len(legal) // 3]], weights_of(build, graph), CONFIG, split=True)
    first, engine = pipeline.engines
    assert isinstance(engine, SplitEngine)
    (batch,) = batches(columns, 1, CONFIG.micro_batch_size)
    inputs = {Ref(pipeline.placeholders[c]): batch[c] for c in first.train.columns}
    given = first.forward(0, 0, inputs)
    taken = {c.value: given[c.value] for c in engine.train.receives}
    taken |= {Ref(pipeline.placeholders[c]): batch[c] for c in engine.train.columns}
    alive: list[weakref.ref[Tensor]] = []

    def pack(tensor: Tensor) -> Tensor:
        copy = tensor.detach().clone()
        alive.append(weakref.ref(copy))
        return copy

    def saved() -> int:
        return sum(reference() is not None for reference in alive)

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        engine.forward(0, 0, taken)
    kept = saved()
    engine.backward(0, [])
    waiting = saved()
    assert 0 < waiting < kept / 2
    engine.weight_gradients(0)
    assert saved() == 0
