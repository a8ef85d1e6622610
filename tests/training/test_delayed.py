"""Steps that overlap have the bits of a plain loop that computes each step at the weights before the last update, in
whatever order messages arrive. Workers decide, engines compute, no process in between."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial

import pytest
import torch
from in_process import Pipeline, batches, capture_of, copies, module_of, optimizers_of, random_cut, weights_of
from msgspec.structs import replace
from tests.training.reference import delayed_steps
from torch import Tensor
from zoo import MODELS, model

from isthmus.data import ColumnSpec
from isthmus.graph import Ref, StageGraph
from isthmus.models import build_model
from isthmus.protocol import Item, StageView, Worker
from isthmus.protocol.events import (
    Collect,
    Collected,
    Compute,
    Computed,
    KeepSnapshot,
    Leave,
    Report,
    Send,
    SnapshotKept,
    Update,
    Updated,
    WorkerEvent,
    WorkerInstruction,
)
from isthmus.protocol.run_messages import Arrived, OpenItem
from isthmus.training.delayed import DelayedEngine
from isthmus.training.engine import EngineConfig
from isthmus.training.learning_rate import LearningRate
from isthmus.training.optim import PREVIOUS, OptimizerConfig

Batches = Sequence[Sequence[Mapping[str, Tensor]]]
"""By step and micro-batch."""
STEPS, MICRO_BATCHES = 5, 3
MUON = (
    OptimizerConfig(pattern="*norm*", lr=0.01),
    OptimizerConfig(name="muon", pattern="blocks.*.weight", lr=0.02, momentum=0.95, nesterov=True),
    OptimizerConfig(lr=0.01, weight_decay=0.1),
)


def view_of(stage: StageGraph, stages: int, in_flight: int) -> StageView:
    users = {u for users in stage.shared_with.values() for u in users}
    return StageView(
        stage=stage.index,
        stages=stages,
        in_flight=in_flight,
        forward_from=tuple(sorted({c.source for c in stage.receives})),
        forward_to=tuple(sorted({c.target for c in stage.sends})),
        backward_from=tuple(sorted({c.target for c in stage.sends if c.gradient})),
        backward_to=tuple(sorted({c.source for c in stage.receives if c.gradient})),
        parameter_users=tuple(sorted(users)),
        parameter_owners=tuple(sorted(set(stage.shared_from.values()))),
        has_loss=stage.loss is not None,
        clips=True,
        delayed=True,
    )


class Interleaved:
    """The stages of a pipeline; what happens next is drawn."""

    def __init__(self, pipeline: Pipeline, steps: Batches, draws: random.Random, first: int = 0) -> None:
        self.pipeline, self.steps, self.draws = pipeline, steps, draws
        count = len(pipeline.stages)
        self.workers = [Worker(view_of(s, count, draws.randint(1, 2 * MICRO_BATCHES))) for s in pipeline.stages]
        self.wires: dict[tuple[int, int], deque[tuple[Arrived | OpenItem, list[Tensor]]]] = {}
        self.ended: list[deque[WorkerEvent]] = [deque() for _ in self.workers]
        self.arrived: list[dict[tuple[str, int, int, int], list[Tensor]]] = [{} for _ in self.workers]
        self.outgoing: dict[tuple[str, int, int, int, int], list[Tensor]] = {}
        self.norms = [torch.empty(0)] * count
        self.losses: list[float] = []
        self.overlapped = False
        self.items: list[Item] = []
        for step in range(first, len(steps)):
            index = len(self.items)
            self.items.append(Item(index=index, kind="train", step=step, micro_batches=MICRO_BATCHES))
            self.items.append(Item(index=index + 1, kind="keep", step=step + 1))
        for stage in range(count):
            self.wires[-1, stage] = deque((OpenItem(item=item), []) for item in self.items)
        self.states: dict[int, dict[str, Tensor]] = {}

    def run(self) -> None:
        while True:
            ready = [("wire", key) for key, queue in self.wires.items() if queue]
            ready += [("end", (stage, stage)) for stage, queue in enumerate(self.ended) if queue]
            if not ready:
                return
            kind, (source, stage) = self.draws.choice(ready)
            if kind == "end":
                event: WorkerEvent = self.ended[stage].popleft()
            else:
                event, tensors = self.wires[source, stage].popleft()
                if isinstance(event, Arrived):
                    self.arrived[stage][event.parcel, source, event.item, event.micro_batch] = tensors
            for instruction in self.workers[stage].handle(event):
                self._carry_out(stage, instruction)

    def _carry_out(self, stage: int, do: WorkerInstruction) -> None:
        engine, graph, ended = self.pipeline.engines[stage], self.pipeline.stages[stage], self.ended[stage]
        assert not isinstance(do, Leave)
        step = self.items[do.item].step
        match do:
            case Compute(work="F"):
                batch = copies([self.steps[step][do.micro_batch]])[0]
                inputs = {Ref(self.pipeline.placeholders[c]): batch[c] for c in graph.columns}
                for source in sorted({c.source for c in graph.receives}):
                    given = self.arrived[stage].pop(("forward", source, do.item, do.micro_batch))
                    inputs |= dict(zip([c.value for c in graph.received_from(source)], given, strict=True))
                for owner in sorted(set(graph.shared_from.values())):
                    names = [n for n, o in graph.shared_from.items() if o == owner]
                    if (values := self.arrived[stage].pop(("shared", owner, do.item, -1), None)) is not None:
                        engine.set_shared(dict(zip(names, values, strict=True)))
                out = engine.forward(step, do.micro_batch, inputs)
                for target in {c.target for c in graph.sends}:
                    sent = [out[c.value] for c in graph.sent_to(target)]
                    self.outgoing["forward", stage, target, do.item, do.micro_batch] = sent
                ended.append(Computed(work="F", item=do.item, micro_batch=do.micro_batch))
            case Compute():
                came: list[dict[Ref, Tensor]] = []
                for target in sorted({c.target for c in graph.sends if c.gradient}, reverse=True):
                    given = self.arrived[stage].pop(("backward", target, do.item, do.micro_batch))
                    due = [c.value for c in graph.sent_to(target) if c.gradient]
                    came.append(dict(zip(due, given, strict=True)))
                back = engine.backward(do.micro_batch, came)
                for source in {c.source for c in graph.receives if c.gradient}:
                    due = [c.value for c in graph.received_from(source) if c.gradient]
                    self.outgoing["backward", stage, source, do.item, do.micro_batch] = [back[ref] for ref in due]
                ended.append(Computed(work="B", item=do.item, micro_batch=do.micro_batch))
            case Send():
                self._send(stage, do)
            case Collect():
                for user in sorted({u for us in graph.shared_with.values() for u in us}, reverse=True):
                    names = [n for n, users in graph.shared_with.items() if user in users]
                    given = self.arrived[stage].pop(("shared_gradient", user, do.item, -1))
                    engine.add_gradients(dict(zip(names, given, strict=True)))
                self.norms[stage] = engine.collect(None)
                ended.append(Collected(item=do.item))
            case Update():
                norms = [self.arrived[stage].pop(("norms", s, do.item, -1))[0] for s in self._others(stage)]
                norms.insert(stage, self.norms[stage])
                known: dict[str, Tensor] = {}
                for owner, values in zip(self.pipeline.engines, norms, strict=True):
                    known |= dict(zip(owner.owned, values, strict=True))
                engine.update(step, torch.stack([known[n] for n in self.pipeline.captured.train.trainable]))
                self.overlapped |= bool(engine.flights)
                ended.append(Updated(item=do.item))
            case KeepSnapshot():
                self.states.setdefault(step, {}).update({n: t.clone() for n, t in engine.state().items()})
                ended.append(SnapshotKept(item=do.item))
            case Report() if self.items[do.item].kind == "train" and (loss := engine.take_loss()) is not None:
                self.losses.append(loss[0] / loss[1])
            case _:
                pass

    def _send(self, stage: int, do: Send) -> None:
        engine, graph, step = self.pipeline.engines[stage], self.pipeline.stages[stage], self.items[do.item].step
        match do.parcel:
            case "forward" | "backward":
                tensors = self.outgoing.pop((do.parcel, stage, do.target, do.item, do.micro_batch))
            case "shared":
                names = [n for n, users in graph.shared_with.items() if do.target in users]
                tensors = [t.clone() for t in engine.shared_values(names, step).values()]
            case "shared_gradient":
                names = [n for n, owner in graph.shared_from.items() if owner == do.target]
                tensors = list(engine.take_shared_gradients(names).values())
            case _:
                tensors = [self.norms[stage]]
        arrived = Arrived(parcel=do.parcel, source=stage, item=do.item, micro_batch=do.micro_batch)
        self.wires.setdefault((stage, do.target), deque()).append((arrived, tensors))

    def _others(self, stage: int) -> list[int]:
        return [s for s in range(len(self.workers)) if s != stage]


def config_of(optimizers: tuple[OptimizerConfig, ...]) -> EngineConfig:
    return EngineConfig(
        optimizers=optimizers,
        learning_rate=LearningRate(schedule="cosine", warmup_steps=2),
        clip_norm=0.5,
        steps=STEPS,
        micro_batches=MICRO_BATCHES,
        micro_batch_size=2,
    )


def steps_of(columns: Mapping[str, ColumnSpec]) -> Batches:
    return [batches(columns, MICRO_BATCHES, 2, seed) for seed in range(STEPS)]


@pytest.mark.parametrize(
    ("name", "optimizers", "recompute"),
    [
        ("gpt", MUON, False),
        ("gpt", (OptimizerConfig(lr=0.01),), True),
        ("unet", (OptimizerConfig(lr=0.01),), False),
        ("hf-resnet", (OptimizerConfig(name="sgd", lr=0.1, momentum=0.9),), False),
        ("unet-batch-norm", (OptimizerConfig(lr=0.01),), True),
    ],
)
def test_any_order_has_the_bits_of_the_plain_loop(
    name: str, optimizers: tuple[OptimizerConfig, ...], recompute: bool
) -> None:
    build, columns = model(name)
    config, draws = config_of(optimizers), random.Random(name)
    captured, steps = capture_of(build, columns), steps_of(columns)
    weights = weights_of(build, captured)
    while True:  # a cut that changes the order of no sum
        cut = random_cut(captured, draws, 4)
        pipeline = Pipeline(
            captured, cut, weights, config, recompute=[recompute] * (len(cut) + 1), engine=DelayedEngine
        )
        if pipeline.sums_in_order and len(cut) > 1:
            break
    module = module_of(build)
    expected = delayed_steps(module, [copies(s) for s in steps], config, optimizers_of(module, config))

    found = Interleaved(pipeline, steps, draws)
    found.run()

    assert found.losses == expected and found.overlapped
    own = dict(module.named_parameters()) | dict(module.named_buffers())
    state = pipeline.state()
    trained = {n: v for n, v in state.items() if n in own}
    assert trained.keys() >= {n for n, p in module.named_parameters() if p.requires_grad}
    assert [n for n, value in trained.items() if not torch.equal(value, own[n])] == []

    at = STEPS // 2  # whatever of the next steps was computed when it was kept
    resumed = Pipeline(captured, cut[:1], weights | found.states[at], config, engine=DelayedEngine)
    Interleaved(resumed, steps, draws, first=at).run()
    after = resumed.state()
    assert after.keys() == state.keys() and any(n.endswith(f".{PREVIOUS}") for n in after)
    assert [n for n, value in after.items() if not torch.equal(value, state[n])] == []


# A tied gradient is summed in another order. Muon iterates in bfloat16, which makes that rounding large.
@pytest.mark.parametrize(
    ("options", "optimizers"), [({"dropout": 0.3}, MUON), ({"tie_embedding": True}, (OptimizerConfig(lr=0.01),))]
)
def test_dropout_draws_and_ties_do_not_depend_on_the_cut(
    options: dict[str, object], optimizers: tuple[OptimizerConfig, ...]
) -> None:
    _, columns = model("gpt")
    spec = MODELS["gpt"][0]
    build = partial(build_model, replace(spec, options={**spec.options, **options}))
    captured, steps, draws = capture_of(build, columns), steps_of(columns), random.Random(1)
    config = config_of(optimizers)
    states: list[dict[str, Tensor]] = []
    for cut in ([], random_cut(captured, draws, 4)):
        pipeline = Pipeline(captured, cut, weights_of(build, captured), config, engine=DelayedEngine)
        Interleaved(pipeline, steps, draws).run()
        states.append(pipeline.state())
    for name, value in states[0].items():
        if "dropout" in options:
            assert torch.equal(states[1][name], value), name
        else:
            torch.testing.assert_close(states[1][name], value, rtol=1e-3, atol=1e-5)
