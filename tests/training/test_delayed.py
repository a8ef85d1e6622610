"""Steps that overlap have the bits of a plain loop that computes each step at the weights before the last update, in
whatever order messages arrive. Workers decide, engines compute, no process in between."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
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
from isthmus.protocol.run_messages import Arrived, Parcel, Work
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
        self.ports = [Port(self, stage) for stage in range(count)]
        self.workers = [
            Worker(view_of(s, count, draws.randint(1, 2 * MICRO_BATCHES)), port)
            for s, port in zip(pipeline.stages, self.ports, strict=True)
        ]
        self.wires: dict[tuple[int, int], deque[tuple[Arrived | Item, list[Tensor]]]] = {}
        self.ended: list[deque[Callable[[], None]]] = [deque() for _ in self.workers]
        self.norms = [torch.empty(0)] * count
        self.losses: list[float] = []
        self.overlapped = False
        self.items: list[Item] = []
        for step in range(first, len(steps)):
            index = len(self.items)
            self.items.append(Item(index=index, kind="train", step=step, micro_batches=MICRO_BATCHES))
            self.items.append(Item(index=index + 1, kind="keep", step=step + 1))
        for stage in range(count):
            self.wires[-1, stage] = deque((item, []) for item in self.items)
        self.states: dict[int, dict[str, Tensor]] = {}

    def run(self) -> None:
        while True:
            ready = [("wire", key) for key, queue in self.wires.items() if queue]
            ready += [("end", (stage, stage)) for stage, queue in enumerate(self.ended) if queue]
            if not ready:
                return
            kind, (source, stage) = self.draws.choice(ready)
            if kind == "end":
                self.ended[stage].popleft()()
                continue
            body, tensors = self.wires[source, stage].popleft()
            if isinstance(body, Item):
                self.workers[stage].opened(body, 0)
            else:
                self.ports[stage].arrived[body.parcel, source, body.item, body.micro_batch] = tensors
                self.workers[stage].arrived(body)


class Port:
    """The port of one stage's worker."""

    def __init__(self, run: Interleaved, stage: int) -> None:
        self.run, self.stage = run, stage
        self.engine, self.graph = run.pipeline.engines[stage], run.pipeline.stages[stage]
        self.arrived: dict[tuple[str, int, int, int], list[Tensor]] = {}
        self.outgoing: dict[tuple[str, int, int, int], list[Tensor]] = {}

    def _ended(self, end: Callable[..., None], *figures: object) -> None:
        self.run.ended[self.stage].append(partial(end, self.run.workers[self.stage], *figures))

    def compute(self, work: Work, item: int, micro_batch: int) -> None:
        (self._forward if work == "F" else self._backward)(item, micro_batch)
        self._ended(Worker.computed, work, item, micro_batch)

    def _forward(self, item: int, micro_batch: int) -> None:
        engine, graph, step = self.engine, self.graph, self.run.items[item].step
        batch = copies([self.run.steps[step][micro_batch]])[0]
        inputs = {Ref(self.run.pipeline.placeholders[c]): batch[c] for c in graph.columns}
        for source in sorted({c.source for c in graph.receives}):
            given = self.arrived.pop(("forward", source, item, micro_batch))
            inputs |= dict(zip([c.value for c in graph.received_from(source)], given, strict=True))
        for owner in sorted(set(graph.shared_from.values())):
            names = [n for n, o in graph.shared_from.items() if o == owner]
            if (values := self.arrived.pop(("shared", owner, item, -1), None)) is not None:
                engine.set_shared(dict(zip(names, values, strict=True)))
        out = engine.forward(step, micro_batch, inputs)
        for target in {c.target for c in graph.sends}:
            self.outgoing["forward", target, item, micro_batch] = [out[c.value] for c in graph.sent_to(target)]

    def _backward(self, item: int, micro_batch: int) -> None:
        came: list[dict[Ref, Tensor]] = []
        for target in sorted({c.target for c in self.graph.sends if c.gradient}, reverse=True):
            given = self.arrived.pop(("backward", target, item, micro_batch))
            due = [c.value for c in self.graph.sent_to(target) if c.gradient]
            came.append(dict(zip(due, given, strict=True)))
        back = self.engine.backward(micro_batch, came)
        for source in {c.source for c in self.graph.receives if c.gradient}:
            due = [c.value for c in self.graph.received_from(source) if c.gradient]
            self.outgoing["backward", source, item, micro_batch] = [back[ref] for ref in due]

    def send(self, parcel: Parcel, target: int, item: int, micro_batch: int = -1) -> None:
        match parcel:
            case "forward" | "backward":
                tensors = self.outgoing.pop((parcel, target, item, micro_batch))
            case "shared":
                names = [n for n, users in self.graph.shared_with.items() if target in users]
                tensors = [t.clone() for t in self.engine.shared_values(names, self.run.items[item].step).values()]
            case "shared_gradient":
                names = [n for n, owner in self.graph.shared_from.items() if owner == target]
                tensors = list(self.engine.take_shared_gradients(names).values())
            case _:
                tensors = [self.run.norms[self.stage]]
        body = Arrived(parcel=parcel, source=self.stage, item=item, micro_batch=micro_batch)
        self.run.wires.setdefault((self.stage, target), deque()).append((body, tensors))

    def collect(self, item: int) -> None:
        for user in sorted({u for us in self.graph.shared_with.values() for u in us}, reverse=True):
            names = [n for n, users in self.graph.shared_with.items() if user in users]
            given = self.arrived.pop(("shared_gradient", user, item, -1))
            self.engine.add_gradients(dict(zip(names, given, strict=True)))
        self.run.norms[self.stage] = self.engine.collect(None)
        self._ended(Worker.collected, item)

    def update(self, item: int, *, skip: bool) -> None:
        pipeline = self.run.pipeline
        others = [s for s in range(len(pipeline.engines)) if s != self.stage]
        norms = [self.arrived.pop(("norms", s, item, -1))[0] for s in others]
        norms.insert(self.stage, self.run.norms[self.stage])
        known: dict[str, Tensor] = {}
        for owner, values in zip(pipeline.engines, norms, strict=True):
            known |= dict(zip(owner.owned, values, strict=True))
        self.engine.update(
            self.run.items[item].step, torch.stack([known[n] for n in pipeline.captured.train.trainable])
        )
        self.run.overlapped |= bool(self.engine.flights)
        self._ended(Worker.updated, item)

    def keep(self, item: int) -> None:
        kept = self.run.states.setdefault(self.run.items[item].step, {})
        kept.update({n: t.clone() for n, t in self.engine.state().items()})
        self._ended(Worker.kept, item)

    def report(self, item: int) -> None:
        if self.run.items[item].kind == "train" and (loss := self.engine.take_loss()) is not None:
            self.run.losses.append(loss[0] / loss[1])

    def _never(self, *_: object) -> None:
        raise AssertionError("no sums, no checkpoint")

    fill = take = send_parts = merge = save = _never


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
        pytest.param("gpt", (OptimizerConfig(lr=0.01),), True, marks=pytest.mark.long),
        pytest.param("unet", (OptimizerConfig(lr=0.01),), False, marks=pytest.mark.long),
        pytest.param("hf-resnet", (OptimizerConfig(name="sgd", lr=0.1, momentum=0.9),), False, marks=pytest.mark.long),
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
