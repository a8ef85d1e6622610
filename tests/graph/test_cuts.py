"""Where a model may be cut, what crosses there, and what each stage then holds."""

from __future__ import annotations

import functools
import random
from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from isthmus.errors import InternalError, UserError
from isthmus.graph import Flow, Ref, assign, cuts, partition
from isthmus.graph.capture import Captured, Column, capture
from isthmus.graph.partition import align
from isthmus.models import ModelSpec, build_model

VECTOR = {"x": Column("float32", (8,)), "y": Column("int64", ())}
TEXT = {"input_ids": Column("int64", (6,)), "labels": Column("int64", (6,))}
DIGITS = {"pixel_values": Column("float32", (1, 8, 8)), "labels": Column("int64", ())}
GPT: dict[str, object] = {"vocab_size": 32, "sequence_length": 6, "width": 8, "layers": 2, "heads": 2}


class Mixed(nn.Module):
    """A mask that needs no input, a written buffer, a detached and a compared value, a parameter used thrice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.head = nn.Linear(8, 4)
        self.register_buffer("average", torch.zeros(8))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        mask = torch.arange(8) > torch.tensor([3])
        h = self.layer(x) * mask
        if self.training:
            with torch.no_grad():
                self.average.mul_(0.9).add_(h.mean(0))
        g = self.layer(h).relu() + self.average
        h = self.layer(g) * (h > 0) + g.detach() * mask
        logits = self.head(h)
        return {"loss": F.cross_entropy(logits, y, reduction="sum"), "count": (y >= 0).sum(), "logits": logits}


MODELS = {
    "gpt": (lambda: build_model(ModelSpec(name="gpt", options={**GPT, "tie_embedding": True})), TEXT),
    "unet": (lambda: build_model(ModelSpec(name="unet", options={"width": 4, "norm": "batch"})), DIGITS),
    "mixed": (Mixed, VECTOR),
}


@functools.cache
def captured(name: str) -> Captured:
    build, columns = MODELS[name]
    return capture(build, columns)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_every_legal_cut_crosses_what_its_two_stages_exchange(name: str, batch: int):
    flow = Flow(captured(name).train)
    legal = cuts(flow)
    assert legal
    for cut in legal:
        first, second = partition(flow, assign(flow, [cut.position]))
        assert cut.after == flow.operators[cut.position - 1].name
        assert first.sends == second.receives
        assert {c.value for c in first.sends} == set(cut.values)
        assert {c.value for c in first.sends if c.gradient} == set(cut.gradients)
        assert sum(c.spec.nbytes(batch) for c in first.sends) == cut.forward_bytes(flow, batch)
        assert sum(c.spec.nbytes(batch) for c in first.sends if c.gradient) == cut.backward_bytes(flow, batch)
        names = {op.name: op.target for op in flow.graph.ops}
        assert {names[n] for n in second.shared_from} == set(cut.shared)
        assert first.shared_with.keys() == second.shared_from.keys()


@pytest.mark.parametrize("name", MODELS)
def test_places_that_are_left_out_are_illegal(name: str):
    flow = Flow(captured(name).train)
    legal = {cut.position for cut in cuts(flow)}
    for position in set(range(1, len(flow.operators))) - legal:
        with pytest.raises(UserError, match=r"buffer '.*' is written in stage \d and used in stages .*: cut elsewhere"):
            partition(flow, assign(flow, [position]))


@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(name=st.sampled_from(sorted(MODELS)), seed=st.integers(0, 10_000))
def test_stages_of_any_cut_fit_together(name: str, seed: int):
    graph = captured(name).train
    flow = Flow(graph)
    generator = random.Random(seed)
    legal = [cut.position for cut in cuts(flow)]
    boundaries = sorted(generator.sample(legal, generator.randint(0, min(5, len(legal)))))
    stages = partition(flow, assign(flow, boundaries))
    assert [s.index for s in stages] == list(range(len(boundaries) + 1))
    # every operator that a cut assigns runs once, every other one wherever it is used
    assert [op.name for s in stages for op in s.ops if op.name in {o.name for o in flow.operators}] == [
        op.name for op in flow.operators
    ]
    for stage in stages:
        here = {op.name for op in stage.ops}
        received = {c.value for c in stage.receives}
        columns = {op.name for op in graph.ops if op.kind == "placeholder" and op.target in stage.columns}
        for op in stage.ops:
            assert all(r.op in here | columns or r in received for r in op.refs()), op.name
        assert all(c.source < c.target == stage.index for c in stage.receives)
        free = [op.name for op in stage.ops if op.name in flow.free]
        assert all(any(r.op == name for op in stage.ops for r in op.refs()) for name in free), "recomputed in vain"
        for name, owner in stage.shared_from.items():
            assert stage.index in stages[owner].shared_with[name]
    sent, received = ([c for s in stages for c in getattr(s, side)] for side in ("sends", "receives"))
    assert sorted(sent, key=repr) == sorted(received, key=repr)
    assert [s.loss for s in stages if s.loss] == [graph.loss]
    assert [s.count for s in stages if s.loss] == [graph.count]


def test_what_needs_no_input_is_computed_in_every_stage_that_uses_it():
    flow = Flow(captured("mixed").train)
    (greater,) = (op.name for op in flow.graph.ops if op.target.startswith("aten.gt.Tensor"))
    assert greater in flow.free
    assert not any(greater == r.op for cut in cuts(flow) for r in cut.values)
    users = [i for i, op in enumerate(flow.operators) if Ref(greater) in op.refs()]
    boundary = next(c.position for c in cuts(flow) if users[0] < c.position <= users[1])
    stages = partition(flow, assign(flow, [boundary]))
    assert all(greater in {op.name for op in s.ops} for s in stages)


def test_no_gradient_returns_for_what_is_only_compared_or_detached():
    flow = Flow(captured("mixed").train)
    (detach,) = (i for i, op in enumerate(flow.operators) if op.target == "aten.detach.default")
    (source,) = flow.operators[detach].refs()
    (cut,) = (c for c in cuts(flow) if c.position == detach)
    assert source in cut.values and source not in cut.gradients
    assert flow.returning[source]


def test_a_shared_parameter_has_one_owner():
    flow = Flow(captured("mixed").train)
    legal = [c.position for c in cuts(flow)]
    linears = [i for i, op in enumerate(flow.operators) if op.module == "layer"]
    boundaries = [next(p for p in legal if a < p <= b) for a, b in pairwise(linears)]
    stages = partition(flow, assign(flow, boundaries))
    assert stages[0].shared_with == {"p_module_layer_weight": (1, 2), "p_module_layer_bias": (1, 2)}
    assert stages[1].shared_from == stages[2].shared_from == {"p_module_layer_weight": 0, "p_module_layer_bias": 0}


def test_the_count_is_told_where_the_loss_is():
    flow = Flow(captured("mixed").train)
    order = [op.name for op in flow.operators]
    assert flow.graph.count is not None
    assert order.index(flow.graph.count.op) == order.index(flow.graph.loss.op) - 1
    *_, last = partition(flow, assign(flow, [order.index(flow.graph.loss.op)]))
    assert last.count == flow.graph.count
    assert last.count in {c.value for c in last.receives}


@pytest.mark.parametrize("boundaries", [[0], [3, 3], [5, 2], [10_000]])
def test_positions_that_are_none(boundaries: list[int]):
    flow = Flow(captured("mixed").train)
    with pytest.raises(UserError, match=r"cut positions: got .* expected strictly increasing within 1"):
        assign(flow, boundaries)


def test_data_never_flows_back():
    flow = Flow(captured("gpt").train)
    stage_of = {op.name: int(i < 3) for i, op in enumerate(flow.operators)}
    with pytest.raises(InternalError, match="feeds an earlier stage"):
        partition(flow, stage_of)


@settings(max_examples=30, suppress_health_check=list(HealthCheck))
@given(name=st.sampled_from(sorted(MODELS)), seed=st.integers(0, 10_000))
def test_a_train_cut_fits_the_eval_graph(name: str, seed: int):
    train, evaluation = Flow(captured(name).train), Flow(captured(name).eval)
    generator = random.Random(seed)
    legal = [cut.position for cut in cuts(train)]
    stage_of = assign(train, sorted(generator.sample(legal, min(4, len(legal)))))
    trained = partition(train, stage_of)
    evaluated = partition(evaluation, align(train, evaluation, stage_of))
    for stage in evaluated:
        learns = {op.target for op in stage.variables() if op.learns}
        assert learns <= {op.target for op in trained[stage.index].variables()}


class Structured(nn.Module):
    """Eval has a branch of its own, at the end of the parts that both have."""

    def __init__(self, *, late: bool) -> None:
        super().__init__()
        self.late = late
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 4)
        self.other_head = nn.Linear(8, 4)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.first(x).relu()
        if self.training:
            x = x + torch.sin(x) * 0.1
            self.scale.lerp_(x.detach().mean(0), 0.1)
        else:
            x = x * (self.scale / self.scale.sum()).clamp(max=1)
        x = self.third(self.second(x).tanh()) if self.training or self.late else self.third(x)
        if self.training:
            return F.cross_entropy(self.head(x), y)
        x = self.first(x) if self.late else x
        return F.cross_entropy(self.head(x) + self.other_head(x), y)


def test_graphs_that_differ_are_aligned_by_what_they_take():
    found = capture(lambda: Structured(late=False), VECTOR)
    train, evaluation = Flow(found.train), Flow(found.eval)
    assert len(train.operators) != len(evaluation.operators)
    for cut in cuts(train):
        stage_of = assign(train, [cut.position])
        trained = partition(train, stage_of)
        for stage in partition(evaluation, align(train, evaluation, stage_of)):
            learns = {op.target for op in stage.variables() if op.learns} - {"other_head.weight", "other_head.bias"}
            assert learns <= {op.target for op in trained[stage.index].variables()}


def test_an_eval_mode_that_no_cut_fits_is_refused():
    found = capture(lambda: Structured(late=True), VECTOR)
    train, evaluation = Flow(found.train), Flow(found.eval)
    third = next(i for i, op in enumerate(train.operators) if op.module == "third")
    stage_of = assign(train, [third])
    with pytest.raises(UserError, match=r"in eval mode module 'first' takes first\.bias, first\.weight in stage 1"):
        align(train, evaluation, stage_of)
