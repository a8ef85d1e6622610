"""What a forward changes: registered buffers are followed, and the rest is refused by name."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from tests.training.in_process import Pipeline, batches, capture_of, copies, module_of, weights_of
from tests.training.reference import reference_loss, reference_step
from torch import Tensor, nn
from torch.nn import functional as F

from isthmus.data import ColumnSpec
from isthmus.errors import UserError
from isthmus.graph import Flow, cuts
from isthmus.training.engine import EngineConfig

COLUMNS = {"x": ColumnSpec(dtype="float32", shape=(8,)), "y": ColumnSpec(dtype="int64", shape=(), limit=4)}
CONFIG = EngineConfig(micro_batches=2, micro_batch_size=3)
CALLS, SCALE, SEEN = 0, torch.ones(8), [0]


class Body(nn.Module):
    calls = 0
    of_class: ClassVar[list[int]] = []

    def __init__(self, compute: Callable[[Body, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.compute = compute
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("empty", None)
        self.register_buffer("one", torch.ones(8))
        self.register_buffer("same", self.one)
        self.plain = torch.zeros(8)
        self.tensors = [torch.ones(8)]
        self.numbers = {"n": 0}
        self.state = SimpleNamespace(n=0, t=torch.zeros(8))
        self.window: deque[Tensor] = deque(maxlen=2)
        self.names: set[str] = set()
        self.made: Tensor | None = None
        self.generator, self.draws = torch.Generator(), random.Random(0)
        self.numpy = np.random.default_rng(0)

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self, self.layer(x))


class Model(nn.Module):
    def __init__(self, compute: Callable[[Body, Tensor], Tensor]) -> None:
        super().__init__()
        self.body = Body(compute)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.body(x)), y)


def average(body: Body, x: Tensor) -> Tensor:
    body.mean = 0.9 * body.mean + 0.1 * x.detach().mean(0)
    return x - body.mean


def reads_before(body: Body, x: Tensor) -> Tensor:
    """Backward needs the tensor that was there before, and it is read after another took its place."""
    before, x = body.mean, x * (body.mean + 1)
    body.mean = before + x.detach().mean(0)
    body.mean.mul_(0.5)
    body.mean = body.mean + before
    return x * before - body.mean


def counts(body: Body, x: Tensor) -> Tensor:
    body.mean += 1
    return x * body.mean


def in_training(body: Body, x: Tensor) -> Tensor:
    """The first value serves the layer, and the next call gets what is computed last."""
    y = torch.tanh(x + body.mean)
    if body.training:
        with torch.no_grad():
            body.mean = y.mean(0)
    return y


def views(body: Body, x: Tensor) -> Tensor:
    body.mean = torch.stack([x.detach().amax(0), body.mean])[1:].squeeze(0) + x.detach()[0]
    return x + body.mean.view(2, 4).reshape(8)


@pytest.mark.parametrize("compute", [average, reads_before, counts, in_training, views])
def test_a_buffer_that_is_assigned_is_followed(compute: Callable[[Body, Tensor], Tensor]) -> None:
    """Losses, gradients and the buffer are those of the plain loop over every cut; evaluation changes nothing."""

    def build() -> nn.Module:
        return Model(compute)

    captured = capture_of(build, COLUMNS)
    positions = [cut.position for cut in cuts(Flow(captured.train))]
    assert positions
    data = [batches(COLUMNS, 2, 3, seed) for seed in range(2)]
    for position in positions:
        module, pipeline = module_of(build), Pipeline(captured, [position], weights_of(build, captured), CONFIG)
        for step in range(2):
            loss, gradients = pipeline.step(step, copies(data[step]))
            expected_loss, expected = reference_step(module, copies(data[step]), CONFIG)
            assert loss == expected_loss
            for name, value in expected.items():
                assert torch.equal(gradients[name], value), name
            assert torch.equal(pipeline.state()["body.mean"], module.body.mean)
        if compute is in_training:
            assert pipeline.evaluate(copies(data[0])) == reference_loss(module, copies(data[0]))
            assert torch.equal(pipeline.state()["body.mean"], module.body.mean)


def keeps_gradients(body: Body, x: Tensor) -> Tensor:
    body.mean = 0.9 * body.mean + x.mean(0)
    return x - body.mean


def another_shape(body: Body, x: Tensor) -> Tensor:
    body.mean = x.detach().mean()
    return x - body.mean


def another_type(body: Body, x: Tensor) -> Tensor:
    body.mean = body.mean.double()
    return x


def itself(body: Body, x: Tensor) -> Tensor:
    body.mean = body.layer.weight[0]
    return x


def two_names(body: Body, x: Tensor) -> Tensor:
    body.one = body.one + 1
    return x * body.same


def no_value(body: Body, x: Tensor) -> Tensor:
    body.empty = x.detach().mean(0) if body.empty is None else body.empty * 0.5
    return x - body.empty


def late(body: Body, x: Tensor) -> Tensor:
    body.register_buffer("late", x.detach().mean(0))
    return x - body.late


def parameter(body: Body, x: Tensor) -> Tensor:
    body.layer.weight = nn.Parameter(body.layer.weight * 0.9)
    return x


def tensor(body: Body, x: Tensor) -> Tensor:
    body.plain = body.plain * 0.9 + x.detach().mean(0)
    return x - body.plain


def first_call(body: Body, x: Tensor) -> Tensor:
    if not hasattr(body, "first"):
        body.first = x.detach().mean(0)
    return x - body.first


def first_weight(body: Body, x: Tensor) -> Tensor:
    if body.made is None:
        body.made = body.layer.weight.detach().mean(0)
    return x - body.made


def made_and_changed(body: Body, x: Tensor) -> Tensor:
    body.made = torch.zeros(8) if body.made is None else body.made + 1
    return x - body.made


def number(body: Body, x: Tensor) -> Tensor:
    body.count = getattr(body, "count", 0) + 1
    return x * body.count


def in_a_list(body: Body, x: Tensor) -> Tensor:
    body.tensors[0] = body.tensors[0] * 0.5
    return x * body.tensors[0]


def grows(body: Body, x: Tensor) -> Tensor:
    body.tensors.append(x.detach().mean(0))
    return x - body.tensors[-1]


def in_a_dict(body: Body, x: Tensor) -> Tensor:
    body.numbers["n"] += 1
    return x * body.numbers["n"]


def in_a_deque(body: Body, x: Tensor) -> Tensor:
    body.window.append(x.detach().mean(0))
    return x - sum(body.window)


def in_a_set(body: Body, x: Tensor) -> Tensor:
    body.names.add(f"seen {len(body.names)}")
    return x


def field(body: Body, x: Tensor) -> Tensor:
    body.state.n += 1
    return x * body.state.n


def tensor_field(body: Body, x: Tensor) -> Tensor:
    body.state.t = body.state.t + 1
    return x - body.state.t


def of_class(body: Body, x: Tensor) -> Tensor:
    Body.calls += 1
    return x * Body.calls


def list_of_class(body: Body, x: Tensor) -> Tensor:
    body.of_class.append(1)
    return x * len(body.of_class)


def global_number(body: Body, x: Tensor) -> Tensor:
    global CALLS
    CALLS += 1
    return x * CALLS


def global_tensor(body: Body, x: Tensor) -> Tensor:
    global SCALE
    SCALE = SCALE * 0.5
    return x * SCALE


def global_list(body: Body, x: Tensor) -> Tensor:
    SEEN[0] += 1
    return x * SEEN[0]


NO_RANDOM = "a graph would hold the first random numbers"
REFUSED = [
    (keeps_gradients, "forward assigns buffer 'body.mean' a tensor that carries gradients, which end with the step"),
    (another_shape, "'body.mean' a tensor of shape [] and dtype float32, expected a tensor of shape [8] and"),
    (
        another_type,
        "'body.mean' a tensor of shape [8] and dtype float64, expected a tensor of shape [8] and dtype float32",
    ),
    (itself, "forward assigns buffer 'body.mean' a parameter, a buffer or a column itself: assign its .clone()"),
    (two_names, "forward assigns buffer 'body.one', which has several names"),
    (no_value, "forward assigns buffer 'body.empty', which has no value before its first forward"),
    (late, "forward assigns buffer 'body.late', which has no value before its first forward"),
    (parameter, "forward assigns parameter 'body.layer.weight': only the optimizer may"),
    (tensor, "in module 'body': forward changes self.plain, which a graph cannot follow: make it a buffer"),
    (first_call, "in module 'body': forward changes self.first, which a graph"),
    (first_weight, "in module 'body': forward changes self.made, which a graph"),
    (made_and_changed, "in module 'body': forward changes self.made, which a graph"),
    (number, "in module 'body': forward changes self.count, which a graph"),
    (in_a_list, "in module 'body': forward changes self.tensors[0], which a graph"),
    (grows, "in module 'body': forward changes self.tensors, which a graph"),
    (in_a_dict, "in module 'body': forward changes self.numbers['n'] from 0 to 1, which a graph"),
    (in_a_deque, "in module 'body': forward changes self.window, which a graph"),
    (in_a_set, "in module 'body': forward changes self.names, which a graph"),
    (field, "in module 'body': forward changes self.state.n from 0 to 1, which a graph"),
    (tensor_field, "in module 'body': forward changes self.state.t, which a graph"),
    (of_class, "forward changes Body.calls from 0 to 1, which a graph"),
    (list_of_class, "forward changes Body.of_class, which a graph"),
    (global_number, "test_forward_state.CALLS from 0 to 1, which a graph"),
    (global_tensor, "test_forward_state.SCALE, which a graph"),
    (global_list, "test_forward_state.SEEN[0] from 0 to 1, which a graph"),
    (lambda _, x: x if random.random() < 0.5 else x * 2, f"forward draws from Python's module random: {NO_RANDOM}"),
    (lambda _, x: x * float(np.random.rand()), f"forward draws from Python's module numpy.random: {NO_RANDOM}"),
    (lambda body, x: x * body.draws.random(), f"in module 'body': forward draws from self.draws: {NO_RANDOM}"),
    (lambda body, x: x * float(body.numpy.random()), f"in module 'body': forward draws from self.numpy: {NO_RANDOM}"),
    (lambda body, x: x * torch.rand(8, generator=body.generator), "forward draws from a torch.Generator of its own"),
]


@pytest.mark.parametrize(("compute", "expected"), REFUSED)
def test_what_a_graph_cannot_follow_is_refused_by_name(
    compute: Callable[[Body, Tensor], Tensor], expected: str
) -> None:
    with pytest.raises(UserError) as caught:
        capture_of(lambda: Model(compute), COLUMNS)
    text = str(caught.value)
    assert text.startswith("model: ") and expected in text and "\n" not in text
    assert CALLS == 0 and SEEN == [0] and Body.calls == 0 and not Body.of_class, "what was changed is put back"


def for_the_outermost(body: Body, x: Tensor) -> Tensor:
    """A loss that a layer keeps, a number and a tensor for a log."""
    body.penalty, body.length, body.state.t = x.square().mean(), x.shape[-1], x.detach()
    return x + body.penalty * body.length


def mask(body: Body, x: Tensor) -> Tensor:
    if body.made is None or body.made.shape[-1] < x.shape[-1]:
        body.made = torch.arange(x.shape[-1]).remainder(2).to(x.dtype)
    return x * body.made


@pytest.mark.parametrize("compute", [for_the_outermost, mask])
def test_what_no_later_forward_needs_is_no_state(compute: Callable[[Body, Tensor], Tensor]) -> None:
    def build() -> nn.Module:
        return Model(compute)

    captured, module = capture_of(build, COLUMNS), module_of(build)
    pipeline = Pipeline(captured, [], weights_of(build, captured), CONFIG)
    for step in range(2):
        data = batches(COLUMNS, 2, 3, step)
        loss, gradients = pipeline.step(step, data)
        expected_loss, expected = reference_step(module, data, CONFIG)
        assert loss == expected_loss
        assert all(torch.equal(gradients[name], value) for name, value in expected.items())
