"""FLOPs and memory of operators against formulas by hand, and against what autograd really keeps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from isthmus.graph import Affine, Op, OpGraph
from isthmus.graph.capture import Column, capture
from isthmus.models import ModelSpec, build_model

BATCH = 5
VOCABULARY, TOKENS, WIDTH, HEADS, LAYERS = 64, 16, 32, 4, 2
GPT = ModelSpec(
    name="gpt",
    options={"vocab_size": VOCABULARY, "sequence_length": TOKENS, "width": WIDTH, "layers": LAYERS, "heads": HEADS},
)
TEXT = {name: Column("int64", (TOKENS,)) for name in ("input_ids", "labels")}


@pytest.fixture(scope="module")
def gpt() -> OpGraph:
    return capture(lambda: build_model(GPT), TEXT).train


def of(graph: OpGraph, module: str, target: str) -> Op:
    (op,) = (op for op in graph.ops if op.module == module and op.target.startswith(f"aten.{target}."))
    return op


def flops(op: Op) -> tuple[int, int]:
    return op.flops_forward.at(BATCH), op.flops_backward.at(BATCH)


def test_linear_layers():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 16)
            self.second = nn.Linear(16, 4, bias=False)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self.second(self.first(x).relu()), y)

    graph = capture(Two, {"x": Column("float32", (8,)), "y": Column("int64", ())}).train
    product = 2 * BATCH * 8 * 16
    assert flops(of(graph, "first", "linear")) == (product, product), "its input needs no gradient"
    product = 2 * BATCH * 16 * 4
    assert flops(of(graph, "second", "linear")) == (product, 2 * product)
    (relu,) = (op for op in graph.ops if op.target == "aten.relu.default")
    assert flops(relu) == (BATCH * 16, BATCH * 16)
    assert relu.saved_bytes == Affine(16 * 4), "its result"
    assert of(graph, "first", "linear").saved_bytes == Affine(8 * 4), "its input"
    assert of(graph, "second", "linear").saved_bytes == Affine(0), "its input is kept already"
    assert graph.parameter_bytes == 4 * (8 * 16 + 16 + 16 * 4)


def test_what_operators_need_while_they_run():
    """Gradients of what an operator took and gave, and what its backward makes between them."""

    class Tied(nn.Module):
        def __init__(self, *, frozen: bool) -> None:
            super().__init__()
            self.words = nn.Embedding(64, 8).requires_grad_(not frozen)
            self.first = nn.Linear(8, 8)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(F.linear(self.first(self.words(x)), self.words.weight), y)

    columns = {"x": Column("int64", ()), "y": Column("int64", ())}
    weight, hidden, logits = 4 * 64 * 8, 4 * 8 * BATCH, 4 * 64 * BATCH
    for frozen in (False, True):
        graph = capture(lambda frozen=frozen: Tied(frozen=frozen), columns).train
        head = of(graph, "", "linear").working_bytes.at(BATCH)
        assert head == logits + hidden + (0 if frozen else weight), "gradients of logits, of hidden, of weights"
        entropy = of(graph, "", "cross_entropy_loss").working_bytes.at(BATCH)
        assert 2 * logits <= entropy < 2.1 * logits, "gradients of the logarithms, and of the logits"
    learning = capture(lambda: Tied(frozen=False), columns).train
    assert of(learning, "words", "embedding").working_bytes.at(BATCH) >= weight + hidden
    assert (
        of(capture(lambda: Tied(frozen=True), columns).train, "words", "embedding").working_bytes.at(BATCH)
        <= 2 * hidden
    )


def test_frozen_layers_need_fewer_products():
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8)
            self.second = nn.Linear(8, 8).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x)).mean()

    graph = capture(Frozen, {"x": Column("float32", (8,))}).train
    product = 2 * BATCH * 8 * 8
    assert flops(of(graph, "second", "linear")) == (product, product), "no gradient of its weight"
    assert of(graph, "second", "linear").saved_bytes == Affine(0)


def test_convolutions():
    class Convolutions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(3, 8, 3, padding=1)
            self.second = nn.Conv2d(8, 16, 3, stride=2, padding=1, groups=2)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x)).mean()

    graph = capture(Convolutions, {"x": Column("float32", (3, 12, 12))}).train
    product = 2 * BATCH * 12 * 12 * 8 * 3 * 9
    assert flops(of(graph, "first", "conv2d")) == (product, product)
    product = 2 * BATCH * 6 * 6 * 16 * 4 * 9
    assert flops(of(graph, "second", "conv2d")) == (product, 2 * product)


@pytest.mark.parametrize(("kind", "gates"), [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)])
def test_recurrent_layers(kind: type[nn.LSTM | nn.GRU | nn.RNN], gates: int):
    """An LSTM is one fused kernel that gives all gradients; the others save the one of the first state."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8)
            self.layer = kind(8, 16, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.first(x))[0].mean()

    graph = capture(Recurrent, {"x": Column("float32", (TOKENS, 8))}).train
    (layer,) = (op for op in graph.ops if op.target.endswith(".input"))
    product = 2 * BATCH * TOKENS * gates * 16 * (8 + 16)
    forward, backward = flops(layer)
    assert forward == product
    assert 1.9 * product < backward <= 2 * product


def test_attention(gpt: OpGraph):
    product = 2 * BATCH * HEADS * TOKENS * TOKENS * (WIDTH // HEADS)
    attention = of(gpt, "blocks.1.attention", "scaled_dot_product_attention")
    assert flops(attention) == (2 * product, 5 * product)


def test_a_whole_model(gpt: OpGraph):
    """Six FLOPs per weight and token, and attention; the rest is element-wise."""
    weights = LAYERS * 12 * WIDTH * WIDTH + WIDTH * VOCABULARY
    attention = 14 * LAYERS * TOKENS * TOKENS * WIDTH
    exact = BATCH * (6 * weights * TOKENS + attention)
    total = sum(sum(flops(op)) for op in gpt.ops)
    assert exact < total < 1.15 * exact
    views = [op for op in gpt.ops if op.target in ("aten.transpose.int", "aten.chunk.default", "aten.unflatten.int")]
    assert views and not any(sum(flops(op)) for op in views)


@pytest.mark.parametrize("batch", [2, 6])
def test_kept_bytes_are_those_that_autograd_keeps(gpt: OpGraph, batch: int):
    module = build_model(GPT)
    held = {p.untyped_storage().data_ptr() for p in module.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in held:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    ids = torch.zeros(batch, TOKENS, dtype=torch.int64)
    with saved_tensors_hooks(keep, lambda t: t):
        module(ids, ids)
    measured = sum(t.untyped_storage().nbytes() for t in kept.values())
    assert sum(op.saved_bytes.at(batch) for op in gpt.ops) == pytest.approx(measured, rel=0.1)


def test_evaluation_keeps_nothing_and_has_no_backward():
    graph = capture(lambda: build_model(GPT), TEXT).eval
    assert not any(op.saved_bytes.at(BATCH) or op.flops_backward.at(BATCH) for op in graph.ops)
    assert any(op.flops_forward.at(BATCH) for op in graph.ops)


def test_costs_at_a_fixed_batch():
    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            x = self.layer(x)
            return (x @ x.t()).logsumexp(1).mean()

    graph = capture(Pairs, {"x": Column("float32", (8,))}, batch=6).train
    (product,) = (op for op in graph.ops if op.target == "aten.matmul.default")
    assert product.flops_forward == Affine(0, 2 * 6 * 6 * 8)
    assert product.flops_backward == Affine(0, 4 * 6 * 6 * 8)
