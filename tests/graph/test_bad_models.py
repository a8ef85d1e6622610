"""What a user reads about a model that cannot be captured: one line, where it is, and what to change."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn import functional as F

from isthmus.errors import UserError
from isthmus.graph.capture import Column, capture
from isthmus.models import ModelSpec, build_model

COLUMNS = {"x": Column("float32", (8,)), "y": Column("int64", ())}


class Body(nn.Module):
    def __init__(self, compute: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.compute = compute
        self.plain = torch.zeros(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self, self.layer(x))


class Model(nn.Module):
    """A linear layer, a block that misbehaves, a head."""

    def __init__(self, compute: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8), Body(compute)])
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.blocks[1](self.blocks[0](x))), y)


class Returns(nn.Module):
    def __init__(self, choose: Callable[[Tensor, Tensor], object]) -> None:
        super().__init__()
        self.head = nn.Linear(8, 4)
        self.choose = choose

    def forward(self, x: Tensor, y: Tensor) -> object:
        return self.choose(self.head(x), y)


def message(build: Callable[[], nn.Module], columns: dict[str, Column] = COLUMNS) -> str:
    with pytest.raises(UserError) as caught:
        capture(build, columns)
    text = str(caught.value)
    assert "\n" not in text
    assert len(text) < 500
    assert text.startswith(("model: ", "column "))
    for jargon in ("Fake", "GuardOn", "aten._local", "torch.export", "dynamo", "SymInt", "unbacked"):
        assert jargon not in text
    return text


def loss(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits, y)


@pytest.mark.parametrize(
    ("choose", "expected"),
    [
        (lambda logits, y: logits, "a tensor of shape [batch, 4] and dtype float32 as its loss, expected a scalar"),
        (lambda logits, y: (logits, loss(logits, y)), "a tensor of shape [batch, 4] and dtype float32 as its loss"),
        (lambda logits, y: None, "NoneType as its loss, expected a scalar floating-point tensor"),
        (lambda logits, y: y.sum(), "a tensor of shape [] and dtype int64 as its loss"),
        (lambda logits, y: 0.5, "float as its loss"),
        (lambda logits, y: {"logits": logits}, "a mapping with ['logits'], expected a scalar under 'loss'"),
        (lambda logits, y: {"loss": None, "logits": logits}, "NoneType as its loss"),
        (lambda logits, y: {"loss": loss(logits, y), "count": y}, "shape [batch] and dtype int64 as its count"),
    ],
)
def test_what_forward_returns(choose: Callable[[Tensor, Tensor], object], expected: str):
    text = message(lambda: Returns(choose))
    assert text.startswith("model: forward returned ")
    assert expected in text


@pytest.mark.parametrize(
    "choose",
    [
        lambda logits, y: torch.tensor(1.0) + y.sum(),
        lambda logits, y: loss(logits.detach(), y),
        torch.no_grad()(loss),
    ],
)
def test_a_loss_that_trains_nothing(choose: Callable[[Tensor, Tensor], object]):
    text = message(lambda: Returns(choose))
    assert text == "model: the loss depends on no trainable parameter, so there is nothing to train"


def branch(_: nn.Module, x: Tensor) -> Tensor:
    if x.sum() > 0:
        return x
    return -x


def loop(_: nn.Module, x: Tensor) -> Tensor:
    while x.norm() < 1:
        x = x * 2
    return x


def slice_by_value(_: nn.Module, x: Tensor) -> Tensor:
    return x[:, : int(x.argmax())]


DATA = "torch.where or a mask instead of `if`, `while`, .item(), .tolist() or x[mask]"


@pytest.mark.parametrize(
    ("compute", "line"),
    [
        (branch, "if x.sum() > 0:"),
        (loop, "while x.norm() < 1:"),
        (slice_by_value, "return x[:, : int(x.argmax())]"),
        (lambda _, x: x * max(x[0].tolist()), "max(x[0].tolist())"),
    ],
)
def test_control_flow_on_data_shows_the_users_line(compute: Callable[[nn.Module, Tensor], Tensor], line: str):
    text = message(lambda: Model(compute))
    assert text.startswith("model: in module 'blocks.1' (test_bad_models.py:")
    assert line in text
    assert text.endswith(DATA)


@pytest.mark.parametrize(
    ("compute", "expected"),
    [
        (lambda _, x: x * x.max().item(), "a Python number is read from the data of a tensor"),
        (lambda _, x: x + x[x > 0].sum(), "the size of its result depends on the data of a tensor"),
        (lambda _, x: x + x.nonzero().shape[0], "depends on the data of a tensor"),
    ],
)
def test_numbers_and_sizes_from_data(compute: Callable[[nn.Module, Tensor], Tensor], expected: str):
    text = message(lambda: Model(compute))
    assert text.startswith("model: in module 'blocks.1'")
    assert expected in text
    assert text.endswith(DATA)


@pytest.mark.parametrize(
    "compute",
    [
        lambda _, x: torch.from_numpy(np.tanh(x.detach().numpy())),
        lambda _, x: x + torch.tensor(np.asarray(x).mean()),
    ],
)
def test_numpy(compute: Callable[[nn.Module, Tensor], Tensor]):
    text = message(lambda: Model(compute))
    assert text.startswith("model: in module 'blocks.1' (test_bad_models.py:")
    assert text.endswith("numpy is called on a tensor, which a graph cannot hold: use torch operators")


def even(_: nn.Module, x: Tensor) -> Tensor:
    raise ValueError("width must be even. See the manual.")


def test_the_users_own_exception_is_shown():
    text = message(lambda: Model(even))
    assert text.startswith("model: in module 'blocks.1' (test_bad_models.py:")
    assert text.endswith("ValueError: width must be even. See the manual.")


def test_shapes_that_do_not_fit():
    text = message(lambda: Model(lambda _, x: x @ torch.zeros(5, 5)))
    assert text.startswith("model: in module 'blocks.1' (test_bad_models.py:")
    assert "[batch, 8] X [5, 5]" in text


@torch.library.custom_op("isthmus_tests::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return x * 2


twice.register_fake(torch.empty_like)


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient


straight = Straight.apply


def unused(_: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = straight(x).abs().mean()
    return x * scale


def hooked(_: nn.Module, x: Tensor) -> Tensor:
    x.register_hook(lambda gradient: gradient.clamp(-1, 1))
    return x


@pytest.mark.parametrize(
    ("compute", "expected"),
    [
        (lambda _, x: twice(x), "operator isthmus_tests.twice is not on the allow-list: use operators of torch"),
        (lambda _, x: x + torch.unique(x).numel(), "depends on the data of a tensor"),
        (lambda _, x: Straight.apply(x), "autograd.Function 'Straight' brings its own backward"),
        (lambda _, x: straight(x), "autograd.Function 'Straight' brings its own backward"),
        (hooked, "it registers a hook on a tensor's gradient"),
    ],
)
def test_operators_that_a_graph_cannot_hold(compute: Callable[[nn.Module, Tensor], Tensor], expected: str):
    assert expected in message(lambda: Model(compute))


def test_a_backward_that_no_gradient_meets_is_no_hindrance():
    assert capture(lambda: Model(unused), COLUMNS).train.loss


def under_no_grad(module: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        x.clamp_(-1, 1)
    return x


def clip_weight(module: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        module.layer.weight.clamp_(-1, 1)
    return x


def out_argument(_: nn.Module, x: Tensor) -> Tensor:
    y = x.detach() * 2
    torch.add(y, 1, out=y.new_empty(0))
    return x + y


def autocast(module: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return module.layer(x).float()


def counts_calls(module: nn.Module, x: Tensor) -> Tensor:
    module.plain += 1
    return x * module.plain


@pytest.mark.parametrize(
    ("compute", "expected"),
    [
        (under_no_grad, "clamp_ writes, hidden from autograd by no_grad or detach, a tensor that carries gradients"),
        (lambda _, x: x.detach().mul_(2) + x, "mul_ writes, hidden from autograd by no_grad or detach"),
        (lambda _, x: x.data.mul_(2) + x, "uses a tensor through .data"),
        (clip_weight, "clamp_ writes parameter 'blocks.1.layer.weight' in forward: only the optimizer may"),
        (out_argument, "add writes to an out= argument: use its result instead"),
        (autocast, "forward turns autocast on: leave it out and set the precision in the job"),
        (counts_calls, "make it a buffer (register_buffer)"),
    ],
)
def test_writes_and_modes_that_a_graph_cannot_hold(compute: Callable[[nn.Module, Tensor], Tensor], expected: str):
    assert expected in message(lambda: Model(compute))


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 4)
        self.scales = [torch.rand(8)]

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x * self.scales[0]), y)


def test_a_tensor_in_a_list_is_named():
    assert "forward uses tensor self.scales[0] of module 'Listed': make it a buffer (register_b" in message(Listed)


class Takes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 4)

    def forward(self, pixels: Tensor, labels: Tensor, weight: float = 1.0) -> Tensor:
        return F.cross_entropy(self.head(pixels), labels) * weight


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        (("x", "y"), "it needs ['pixels', 'labels'] and it does not take ['x', 'y']"),
        (("pixels",), "it needs ['labels']"),
        (("pixels", "labels", "mask"), "it does not take ['mask']"),
    ],
)
def test_columns_that_forward_does_not_take(columns: tuple[str, ...], expected: str):
    text = message(Takes, dict.fromkeys(columns, COLUMNS["x"]))
    assert text == (
        f"model: forward(pixels, labels, weight) does not fit the data's columns {list(columns)}: {expected}"
    )


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("float32", "class and token ids must be int64, the data's columns are x float32, y float32: "),
        ("int32", "class ids must be int64, got int32"),
    ],
)
def test_labels_of_the_wrong_type(dtype: str, expected: str):
    text = message(lambda: Returns(loss), {"x": COLUMNS["x"], "y": Column(dtype, ())})
    assert expected in text
    assert "return F.cross_entropy(logits, y)" in text or "self.choose" in text


def test_an_unknown_type():
    text = message(lambda: Returns(loss), {"x": Column("float31", (8,)), "y": COLUMNS["y"]})
    assert text == "column 'x': got dtype 'float31', expected a torch dtype such as float32"


def broken() -> nn.Module:
    raise RuntimeError("no layer\n  called nine")


def test_a_builder_that_fails():
    text = message(broken)
    assert text.startswith("model: building ") and " failed (test_bad_models.py:" in text
    assert text.endswith("RuntimeError: no layer called nine")
    assert message(lambda: 3) == "model: building it gave int, expected an nn.Module"  # type: ignore[arg-type,return-value]
    own = {"vocab_size": 32, "width": 7, "heads": 2}
    with pytest.raises(UserError, match="gpt option 'width': 7 is no multiple of heads=2"):
        capture(lambda: build_model(ModelSpec(name="gpt", options=own)), COLUMNS)


def test_nothing_of_torch_is_printed(capfd: pytest.CaptureFixture[str]):
    message(lambda: Model(branch))
    message(lambda: Model(lambda _, x: x @ torch.zeros(5, 5)))
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""


def test_a_hook_on_a_modules_backward_is_refused() -> None:
    def build() -> nn.Module:
        module = Model(lambda _, x: x)
        module.blocks[0].register_full_backward_hook(lambda _, grads, __: (grads[0] * 2,))
        return module

    assert "'blocks.0' has a hook on its backward" in message(build)


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 4)
        self.calls = 0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        return F.cross_entropy(self.head(x), y) * (1 + 0.1 * self.calls)


def test_plain_state_that_the_forward_changes_is_refused() -> None:
    text = message(Remembers)
    assert "in module 'Remembers': forward changes self.calls from 0 to" in text
    assert "register_buffer" in text


def test_parameters_without_a_shape_are_refused() -> None:
    text = message(lambda: nn.Sequential(nn.LazyLinear(4)))
    assert "'weight' of a LazyLinear has no shape" in text


class LogitsInEval(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self.head(x)
        return F.cross_entropy(logits, y) if self.training else logits


def test_what_goes_wrong_in_eval_mode_only_says_so() -> None:
    assert message(LogitsInEval).endswith("(in eval mode)")


class Reentrant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(torch.utils.checkpoint.checkpoint(self.layer, x, use_reentrant=True), y)


def test_reentrant_checkpointing():
    assert "pass use_reentrant=False" in message(Reentrant)


class Table(nn.Module):
    """A head, and a table of a type or layout of its own, which the forward multiplies with."""

    def __init__(self, table: Tensor, kind: str) -> None:
        super().__init__()
        self.head = nn.Linear(8, 4)
        if kind == "buffer":
            self.register_buffer("table", table)
        else:
            self.table = nn.Parameter(table, requires_grad=False) if kind == "parameter" else table

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x) * self.table.to(torch.float32), y)


@pytest.mark.parametrize("kind", ["constant", "buffer", "parameter"])
@pytest.mark.parametrize("dtype", [torch.uint16, torch.float8_e4m3fn])
def test_a_tensor_of_a_type_that_no_graph_has_is_named(kind: str, dtype: torch.dtype) -> None:
    text = message(lambda: Table(torch.ones(4).to(dtype), kind))
    assert text.startswith(f"model: {kind} 'table': got dtype {str(dtype).removeprefix('torch.')}, expected one of: ")


@pytest.mark.parametrize("kind", ["constant", "buffer", "parameter"])
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_a_sparse_tensor_is_named(kind: str, layout: torch.layout) -> None:
    got = str(layout).removeprefix("torch.")
    expected = f"model: tensor 'table': got {got}, expected a dense one: use .to_dense()"
    assert message(lambda: Table(torch.eye(4).to_sparse(layout=layout), kind)) == expected


@pytest.mark.parametrize("dtype", [torch.bool, torch.complex64])
def test_an_attribute_of_another_type_is_captured(dtype: torch.dtype) -> None:
    captured = capture(lambda: Table(torch.ones(4).to(dtype), "constant"), COLUMNS)
    assert {op.outputs[0].dtype for op in captured.train.ops if op.kind == "constant"} == {str(dtype)[6:]}
