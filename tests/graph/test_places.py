"""Where a forward may keep state beside its module: each place is refused by name, and what is no state is not."""

from __future__ import annotations

import functools
import itertools
import os
import random
import threading
import time
import weakref
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from contextvars import ContextVar
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.lazy import Lazy
from tests.training.in_process import capture_of
from torch import Tensor, nn
from torch.nn import functional as F

from isthmus.data import ColumnSpec
from isthmus.errors import UserError
from isthmus.graph.forward_state import ForwardState, check_changes

transformers = Lazy("transformers")

COLUMNS = {"x": ColumnSpec(dtype="float32", shape=(8,)), "y": ColumnSpec(dtype="int64", shape=(), limit=4)}
Compute = Callable[[Any, Tensor], Tensor]
helpers = ModuleType("helpers")
"""Another module of the user's."""
exec("n = 0\nclass Box:\n    n = 0\ndef step():\n    global n\n    n += 1\n    return n", vars(helpers))
step = helpers.step
SCALES, BY_NAME, NUMBER, STEPS = (
    [torch.ones(8)],
    {"a": torch.ones(8)},
    ContextVar("NUMBER", default=0),
    itertools.count(),
)


class Slots:
    __slots__ = ("n",)

    def __init__(self) -> None:
        self.n = 0


class Behind:
    """A property that is stored elsewhere, and one that is computed once."""

    _n = 0

    @property
    def n(self) -> int:
        return self._n

    @n.setter
    def n(self, value: int) -> None:
        self._n = value

    @functools.cached_property
    def once(self) -> int:
        return 3


class Act:
    calls = 0

    def __init__(self) -> None:
        self.n = 0

    def __call__(self, _: Any, x: Tensor) -> Tensor:
        Act.calls += 1
        return x * Act.calls

    def method(self, _: Any, x: Tensor) -> Tensor:
        self.n += 1
        return x * self.n


class Net(nn.Module):
    def __init__(self, compute: Compute) -> None:
        super().__init__()
        self.layer, self.drop, self.head = nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 4)
        self.compute = compute
        self.seen: int | None = None
        self.count, self.cycle, self.numbers = itertools.count(1), itertools.cycle([1, 2]), (n for n in range(9))
        self.pairs, self.each, self.of_list = zip([1, 2], [3, 4], strict=True), enumerate("ab"), iter([1, 2])
        self.bits, self.draws = np.random.PCG64(0), (random.Random(0),)
        self.pair: tuple[int, list[int]] = (1, [0])
        self.window, self.counter, self.default = (
            deque([SimpleNamespace(n=0)]),
            Counter[str](),
            defaultdict[str, int](int),
        )
        self.order = OrderedDict(a=1, b=2)
        self.bytes, self.array, self.numpy = bytearray(2), array("i", [0]), np.zeros(2)
        self.slots, self.behind, self.local = Slots(), Behind(), threading.local()
        self.local.n = 0
        self.key = SimpleNamespace(n=0)
        self.by_object = weakref.WeakKeyDictionary({self.drop: 0})
        self.scales = [torch.ones(8)]
        self.others = [nn.BatchNorm1d(8)]

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.compute(self, self.layer(x))), y)


def closures() -> tuple[Compute, Compute, Compute]:
    count, numbers, scale = 0, [0], torch.ones(8)

    def adds(_: Net, x: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return x * count

    def in_place(_: Net, x: Tensor) -> Tensor:
        numbers[0] += 1
        return x * numbers[0]

    def halves(_: Net, x: Tensor) -> Tensor:
        nonlocal scale
        scale = scale * 0.5
        return x * scale

    return adds, in_place, halves


adds, in_place, halves = closures()
TABLE = {"adds": adds}


def counted(compute: Compute) -> Compute:
    calls = 0

    @functools.wraps(compute)
    def wrapper(net: Net, x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return compute(net, x) * calls

    return wrapper


def calls_another(net: Net, x: Tensor) -> Tensor:
    return adds(net, x)


def from_a_table(net: Net, x: Tensor) -> Tensor:
    return TABLE["adds"](net, x)


@counted
def decorated(_: Net, x: Tensor) -> Tensor:
    return x


@torch.no_grad()
@counted
def without_gradients(_: Net, x: Tensor) -> Tensor:
    return x


def with_default(_: Net, x: Tensor, seen: list[int] = []) -> Tensor:  # noqa: B006
    seen.append(1)
    return x * len(seen)


def with_keyword(_: Net, x: Tensor, *, seen: list[int] = [0]) -> Tensor:  # noqa: B006
    seen[0] += 1
    return x * seen[0]


def with_attribute(_: Net, x: Tensor) -> Tensor:
    with_attribute.calls += 1
    return x * with_attribute.calls


with_attribute.calls = 0


def given(_: Net, x: Tensor, seen: list[int]) -> Tensor:
    seen[0] += 1
    return x * seen[0]


def of_another_module(_: Net, x: Tensor) -> Tensor:
    return x * step()


def in_another_module(_: Net, x: Tensor) -> Tensor:
    helpers.n += 1
    return x * helpers.n


def class_of_another_module(_: Net, x: Tensor) -> Tensor:
    helpers.Box.n += 1
    return x * helpers.Box.n


def global_iterator(_: Net, x: Tensor) -> Tensor:
    return x * next(STEPS)


def to_the_end(net: Net, x: Tensor) -> Tensor:
    for n in net.numbers:
        x = x + n
    return x


def if_it_can(net: Net, x: Tensor) -> Tensor:
    try:
        return x * next(net.count)
    except Exception:
        return x


def first_call(net: Net, x: Tensor) -> Tensor:
    if net.seen is None:
        net.seen = 1
        return x * 2
    return x


def another_first(net: Net, x: Tensor) -> Tensor:
    net.seen = 1 if net.seen is None else 2
    return x * net.seen


def in_a_tuple(net: Net, x: Tensor) -> Tensor:
    net.pair[1][0] += 1
    return x * net.pair[1][0]


def in_a_deque(net: Net, x: Tensor) -> Tensor:
    net.window[0].n += 1
    return x * net.window[0].n


def counter(net: Net, x: Tensor) -> Tensor:
    net.counter["a"] += 1
    return x * net.counter["a"]


def default(net: Net, x: Tensor) -> Tensor:
    net.default["a"] += 1
    return x * net.default["a"]


def order(net: Net, x: Tensor) -> Tensor:
    net.order.move_to_end(next(iter(net.order)))
    return x * next(iter(net.order.values()))


def of_bytes(net: Net, x: Tensor) -> Tensor:
    net.bytes[0] += 1
    return x * net.bytes[0]


def of_array(net: Net, x: Tensor) -> Tensor:
    net.array[0] += 1
    return x * net.array[0]


def of_numpy(net: Net, x: Tensor) -> Tensor:
    net.numpy += 1
    return x * float(net.numpy[0])


def slots(net: Net, x: Tensor) -> Tensor:
    net.slots.n += 1
    return x * net.slots.n


def property_setter(net: Net, x: Tensor) -> Tensor:
    net.behind.n += 1
    return x * net.behind.n


def thread(net: Net, x: Tensor) -> Tensor:
    net.local.n += 1
    return x * net.local.n


def weak(net: Net, x: Tensor) -> Tensor:
    net.by_object[net.drop] += 1
    return x * net.by_object[net.drop]


def context(_: Net, x: Tensor) -> Tensor:
    NUMBER.set(NUMBER.get() + 1)
    return x * NUMBER.get()


def environment(_: Net, x: Tensor) -> Tensor:
    os.environ["A_NUMBER"] = str(int(os.environ.get("A_NUMBER", "0")) + 1)
    return x * int(os.environ["A_NUMBER"])


def into_dict(net: Net, x: Tensor) -> Tensor:
    vars(net).update(seen=(net.seen or 0) + 1)
    return x * vars(net)["seen"]


def into_globals(_: Net, x: Tensor) -> Tensor:
    globals()["late"] = globals().get("late", 0) + 1
    return x * globals()["late"]


def swaps(net: Net, x: Tensor) -> Tensor:
    net.layer, net.drop = net.drop, net.layer
    return net.layer(x)


def adds_a_hook(net: Net, x: Tensor) -> Tensor:
    net.drop.register_forward_hook(lambda _, __, output: output * 2)
    return net.drop(x)


def other_mode(net: Net, x: Tensor) -> Tensor:
    x = net.drop(x)
    net.drop.eval()
    return x


REFUSED: list[tuple[Compute, str]] = [
    (adds, "in module 'Net': forward changes 'count' that adds holds from its enclosing function, from 0 to 1, which"),
    (in_place, "forward changes 'numbers[0]' that in_place holds from its enclosing function, from 0 to 1, which"),
    (halves, "forward changes 'scale' that halves holds from its enclosing function, which a graph"),
    (calls_another, "'count' that adds holds from its enclosing function"),
    (from_a_table, "'count' that adds holds from its enclosing function"),
    (functools.partial(adds), "'count' that adds holds from its enclosing function"),
    (decorated, "'calls' that decorated holds from its enclosing function"),
    (without_gradients, "'calls' that without_gradients holds from its enclosing function"),
    (lambda net, x: x + without_gradients(net, x), "'calls' that without_gradients holds from its enclosing function"),
    (with_default, "forward changes the default 'seen' of with_default, which a graph"),
    (with_keyword, "forward changes the default 'seen[0]' of with_keyword, from 0 to 1, which"),
    (with_attribute, "forward changes with_attribute.calls from 0 to 1, which"),
    (functools.partial(given, seen=[0]), "forward changes self.compute.keywords['seen'][0] from 0 to 1"),
    (Act(), "forward changes Act.calls from 0 to 1"),
    (Act().method, "forward changes self.compute.__self__.n from 0 to 1"),
    (of_another_module, "model: forward changes helpers.n from 0 to 1"),
    (in_another_module, "model: forward changes helpers.n from 0 to 1"),
    (class_of_another_module, "forward changes helpers.Box.n from 0 to 1"),
    (global_iterator, "forward takes from the iterator test_places.STEPS, which a graph"),
    *(
        (lambda net, x, name=name: x if next(getattr(net, name)) else -x, f"the iterator self.{name}, ")
        for name in ("pairs", "numbers", "count", "cycle", "each", "of_list")
    ),
    (to_the_end, "forward takes from the iterator self.numbers"),
    (if_it_can, "forward takes from the iterator self.count"),
    (first_call, "forward changes self.seen, which"),
    (another_first, "forward changes self.seen, which"),
    (in_a_tuple, "forward changes self.pair[1][0] from 0 to 1"),
    (in_a_deque, "forward changes self.window[0].n from 0 to 1"),
    (counter, "forward changes self.counter['a'], which"),
    (default, "forward changes self.default['a'], which"),
    (order, "forward changes self.order, which"),
    (of_bytes, "forward changes self.bytes, which"),
    (of_array, "forward changes self.array, which"),
    (of_numpy, "forward changes self.numpy, which"),
    (lambda net, x: x * net.draws[0].random(), "forward draws from self.draws[0]"),
    (lambda net, x: x * float(np.random.Generator(net.bits).random()), "forward draws from self.bits"),
    (slots, "forward changes self.slots.n from 0 to 1"),
    (property_setter, "forward changes self.behind._n, which"),
    (thread, "forward changes self.local.n from 0 to 1"),
    (weak, "forward changes self.by_object["),
    (context, "forward changes test_places.NUMBER from 0 to 1, which"),
    (environment, "model: forward changes os.environ['A_NUMBER'], which"),
    (into_dict, "forward changes self.seen, which"),
    (into_globals, "test_places.late, which"),
    (swaps, "forward changes self.layer, which"),
    (adds_a_hook, "in module 'drop': forward changes the hooks of self, which"),
    (other_mode, "in module 'drop': forward changes self.training from True to False"),
]


def refusal(net: Net) -> str:
    """As the capture asks, without its export."""
    data = {"x": torch.zeros(3, 8), "y": torch.zeros(3, dtype=torch.int64)}
    before = ForwardState(net)
    net(**data)
    changes = before.changes()
    for change in changes:
        change.put_back()
    with pytest.raises(UserError) as caught:
        check_changes(changes, lambda: net(**data))
    return str(caught.value)


@pytest.mark.parametrize(("compute", "expected"), REFUSED)
def test_state_is_refused_by_name_wherever_it_is_held(compute: Compute, expected: str) -> None:
    text = refusal(Net(compute))
    assert text.startswith("model: ") and expected in text and "\n" not in text
    assert refusal(Net(compute)) == text, "what was changed is put back"


def capture_text(compute: Compute, prepare: Callable[[Net], object] = lambda _: None) -> str:
    def build() -> nn.Module:
        net = Net(compute)
        prepare(net)
        return net

    with pytest.raises(UserError) as caught:
        capture_of(build, COLUMNS)
    return str(caught.value)


class WarnsOnce(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.warned, self.device = nn.Linear(8, 4), False, None

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if not self.warned:
            self.warned = True
        if self.device is None:
            self.device = x.device
        os.environ.setdefault("ISTHMUS_TEST_SETTLED", "1")
        return F.cross_entropy(self.fc(x), y)


class Starts(WarnsOnce):
    """Its first forward computes something else."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = x if self.warned else 2 * x
        return super().forward(x, y)


class Counts(WarnsOnce):
    """Forwards change it as long as there are any."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.warned += 1
        return super().forward(x, y)


def test_what_only_the_first_forward_changes_is_no_state() -> None:
    module = WarnsOnce()
    captured = capture_of(lambda: module, COLUMNS)
    assert (module.warned, module.device, "ISTHMUS_TEST_SETTLED" in os.environ) == (False, None, False)
    plain = capture_of(lambda: Ready(), COLUMNS)
    assert [op.target for op in captured.train.ops] == [op.target for op in plain.train.ops]
    for unlike in (Starts, Counts):
        with pytest.raises(UserError, match=r"forward changes self\.warned"):
            capture_of(unlike, COLUMNS)


class Ready(WarnsOnce):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.fc(x), y)


@pytest.mark.long
def test_the_states_of_a_transformer_can_be_asked_for() -> None:
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16
    )
    config.output_hidden_states = True
    tokens = ColumnSpec(dtype="int64", shape=(8,), limit=32)
    assert capture_of(lambda: transformers.LlamaForCausalLM(config), {"input_ids": tokens, "labels": tokens}).train.ops


def test_hooks_are_code_of_the_forward() -> None:
    calls = 0

    def hook(_: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        nonlocal calls
        calls += 1
        return (inputs[0] * calls,)

    text = capture_text(lambda _, x: x, lambda net: net.layer.register_forward_pre_hook(hook))
    assert "in module 'layer': forward changes 'calls' that hook holds from its enclosing function, from 0 to 1" in text


@pytest.mark.parametrize(
    ("compute", "expected"),
    [
        (lambda _, x: x * SCALES[0].mul_(0.5), "mul_ writes tensor test_places.SCALES[0] in forward: make it a buffer"),
        (lambda _, x: x * BY_NAME["a"].mul_(2), "mul_ writes tensor test_places.BY_NAME['a'] in forward: make it"),
        (lambda net, x: x * net.scales[0], "forward uses tensor self.scales[0] of module 'Net': make it a buffer"),
        (
            lambda net, x: net.others[0](x),
            "forward uses tensor self.others[0].num_batches_tracked of module 'Net': make it a buffer",
        ),
    ],
)
def test_tensors_are_named_as_their_author_named_them(compute: Compute, expected: str) -> None:
    assert expected in capture_text(compute)


class Lazy(dict[str, int]):
    """Shows what it would have to load."""

    def items(self) -> Any:
        raise ImportError


LAZY, MADE = Lazy(a=1), defaultdict[str, int](int)


def only_if_asked(_: Net, x: Tensor) -> Tensor:
    MADE["a"] = 2
    return x * LAZY["a"] * MADE["a"]


@functools.lru_cache
def twice(n: int) -> int:
    return 2 * n


def memory() -> Compute:
    masks: dict[int, Tensor] = {}
    last: dict[str, Tensor] = {}

    def compute(_: Net, x: Tensor) -> Tensor:
        if x.shape[1] not in masks:
            masks[x.shape[1]] = torch.arange(x.shape[1]).remainder(2).to(x.dtype)
        last["x"] = x
        return last["x"] * masks[x.shape[1]]

    return compute


def for_a_log(net: Net, x: Tensor) -> Tensor:
    net.behind.at, net.slots.n, net.key.id, net.seen = time.time_ns(), 5, id(x), None
    for_a_log.size = x.shape[-1]
    return net.drop.eval()(x)


def other_names(net: Net, x: Tensor) -> Tensor:
    """New names of old objects, and objects of the forward's own."""
    net.shared, net.last = net.behind, net.window[0]
    made = SimpleNamespace(n=0, seen=[0])
    made.n += 1
    made.seen.append(made.n)
    return x * (net.shared.once + net.last.n + len(made.seen))


@pytest.mark.parametrize(
    "compute", [lambda _, x: x * twice(x.shape[1]), memory(), for_a_log, other_names, only_if_asked]
)
def test_what_is_no_state_is_captured(compute: Compute) -> None:
    """Caches, masks that are made once, values for others to read, and iterators that are only held."""
    assert capture_of(lambda: Net(compute), COLUMNS).train.ops
    assert not MADE
