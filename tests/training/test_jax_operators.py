"""Every operator that JAX computes gives what torch gives, and the same gradients."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from isthmus.graph.operators import is_callable, overload_of

pytest.importorskip("jax", reason="the extra jax")
from tests.tiers import THOROUGH

from isthmus.training.jax.names import NAMES, base_name, is_computed
from isthmus.training.jax.program import OPERATORS, JaxFunction, in_place

pytestmark = pytest.mark.thorough

CALLS: dict[str, list[Any]] = json.loads((Path(__file__).parents[1] / "graph" / "operator_calls.json").read_text())
"""Of each operator with arguments that it takes."""
FLAGS = {"t": "bool", "s": [2, 3]}
CALLS.update(
    {
        name: [[[FLAGS, FLAGS], {}], [[FLAGS, {"t": "bool", "s": [3]}], {}]]
        for name in ("__and__.Tensor", "__or__.Tensor")
    }
)
CALLS["dropout.default"] += [[[{"t": "float32", "s": [2, 3]}, 0.5, False], {}]]
REAL, WHOLE = "float32", "int64"
MORE = {
    "conv_transpose1d.default": [[{"t": REAL, "s": [2, 3, 8]}, {"t": REAL, "s": [3, 4, 5]}, None, [2]], {}],
    "cross_entropy_loss.default": [[{"t": REAL, "s": [5, 4]}, {"t": WHOLE, "s": [5]}], {}],
    "gather.default": [[{"t": REAL, "s": [5, 4]}, 0, {"t": WHOLE, "s": [3, 4]}], {}],
    "view.default": [[{"t": REAL, "s": [6, 4]}, [6, -1]], {}],
}
"""Whose sizes may be others; those of the file are tied to values."""
REFUSED = {"aten.div_.Scalar"}
"""Torch refuses its known call: a quotient is no whole number."""
TARGETS = sorted(t for name in CALLS if is_computed(t := f"aten.{name}") and is_callable(t) and t not in REFUSED)
CLOSE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 6e-2}
IN_FLOAT = {"aten.hardsigmoid.default"}
"""torch's kernel has a constant of type float32."""


class Values:
    """The tensors of one call, drawn from a seed, of floating type `dtype`."""

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        self.tensors: list[Tensor] = []
        self._dtype = dtype
        self._draws = torch.Generator().manual_seed(seed)

    def read(self, given: Any, name: str) -> Any:
        match given:
            case {"t": dtype, "s": shape}:
                return self._tensor(getattr(torch, dtype), shape, given.get("v"), name)
            case {"d": dtype}:
                return getattr(torch, dtype)
            case {"m": name}:
                return getattr(torch, name)
            case list():
                return [self.read(one, name) for one in given]
            case _:
                return given

    def _tensor(self, dtype: torch.dtype, shape: list[int], given: list[Any] | None, name: str) -> Any:
        if dtype.is_floating_point:
            dtype = self._dtype
        if given is not None:
            made = torch.tensor(given).to(dtype).reshape(shape)
        elif dtype.is_floating_point:
            made = torch.randn(shape, generator=self._draws, dtype=torch.float64).to(dtype)
            if name in ("log", "log2", "log1p", "sqrt", "rsqrt", "pow"):
                made = made.abs() + 0.1
        else:
            made = torch.randint(0, 2, shape, generator=self._draws).to(dtype)
        if made.is_complex():
            pytest.skip("complex numbers are torch's")
        self.tensors.append(made)
        return fx.Proxy  # replaced by a placeholder


def graph_of(target: str, call: list[Any], values: Values) -> fx.Graph:
    """One operator, whose tensors are the placeholders; the buffer that it writes is given back too."""
    graph, nodes = fx.Graph(), list[fx.Node]()
    name = base_name(target)

    def filled(given: Any) -> Any:
        if isinstance(given, dict) and "t" in given:
            values.read(given, name)
            nodes.append(graph.placeholder(f"value_{len(nodes)}"))
            return nodes[-1]
        return [filled(one) for one in given] if isinstance(given, list) else values.read(given, name)

    args, kwargs = [filled(one) for one in call[0]], {key: filled(one) for key, one in call[1].items()}
    made = graph.call_function(overload_of(target), tuple(args), kwargs)
    made.meta["call"] = (args, kwargs)
    return graph


def check(target: str, call: list[Any], dtype: torch.dtype, seed: int) -> bool:
    """False where torch refuses the call, or its result is not a number."""
    if (target == "aten.scaled_dot_product_attention.default" and 0.1 in call[0]) or (
        target == "aten.dropout.default" and call[0][2]
    ):
        return False  # it draws: torch computes it
    if target == "aten.narrow.default" and isinstance(call[0][2], dict):
        return False  # graphs have numbers there
    values = Values(torch.float32 if target in IN_FLOAT and dtype is torch.float64 else dtype, seed)
    graph = graph_of(target, call, values)
    (made,) = [node for node in graph.nodes if node.op == "call_function"]
    places = [node for node in graph.nodes if node.op == "placeholder"]
    kept = kept_by(made) if base_name(target) == "batch_norm" else set()
    mine = [t.clone().requires_grad_(t.is_floating_point() and k not in kept) for k, t in enumerate(values.tensors)]
    given = [m * 1 if in_place(made.target) else m for m in mine]
    by_place = dict(zip(places, given, strict=True))
    try:
        result = made.target(*map_arg(made.args, by_place.__getitem__), **map_arg(made.kwargs, by_place.__getitem__))
    except (RuntimeError, IndexError, NotImplementedError, ValueError, TypeError):
        return False
    expected = [result] if isinstance(result, Tensor) else list(result)
    if not expected or any(t.is_complex() for t in expected):
        return False
    made.meta["dtypes"] = tuple(t.dtype for t in expected)
    results = (
        [made]
        if isinstance(result, Tensor)
        else [graph.call_function(tuple.__getitem__, (made, k)) for k in range(len(expected))]
    )
    graph.output(tuple(results))
    theirs = [t.clone().requires_grad_(one.requires_grad) for t, one in zip(values.tensors, mine, strict=True)]
    found = JaxFunction(graph)(*theirs)
    for one, other in zip(found, expected, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype), (target, call)
        if base_name(target) == "empty_like":
            continue  # memory that nobody has written
        assert alike(one, other, dtype), (target, call, one, other)
    compare_gradients((target, call), (mine, expected), (theirs, list(found)), dtype)
    return True


def kept_by(made: fx.Node) -> set[int]:
    """Places of batch norm's statistics: torch takes no gradient of them."""
    places = [node for node in made.graph.nodes if node.op == "placeholder"]
    return {places.index(statistic) for statistic in made.args[3:5] if statistic is not None}


def alike(one: Tensor, other: Tensor, dtype: torch.dtype) -> bool:
    close = max(CLOSE[dtype], CLOSE.get(other.dtype, 0))
    one, other = one.detach().double(), other.detach().double()
    if dtype is torch.bfloat16 and torch.isfinite(other).all():
        return bool((one - other).norm() <= close * other.norm() + close)
    return torch.allclose(one, other, rtol=close, atol=close * 10, equal_nan=True)


def compare_gradients(
    what: object, torchs: tuple[list[Tensor], list[Tensor]], jaxs: tuple[list[Tensor], list[Tensor]], dtype: torch.dtype
) -> None:
    found = []
    for inputs, results in (torchs, jaxs):
        roots = [r for r in results if r.requires_grad and r.numel()]
        leaves = [t for t in inputs if t.requires_grad]
        draws = torch.Generator().manual_seed(1)
        seeds = [torch.randn(r.shape, generator=draws, dtype=torch.float64).to(r.dtype) for r in roots]
        try:
            some = bool(roots and leaves)
            gradients = torch.autograd.grad(roots, leaves, seeds, allow_unused=True) if some else [None] * len(leaves)
        except (RuntimeError, NotImplementedError):
            return  # torch knows no derivative
        found.append(gradients)
    for mine, theirs in zip(*found, strict=True):
        if mine is None and theirs is None:
            continue
        zero = torch.zeros_like(mine if mine is not None else theirs)
        one, other = (zero if g is None else g.to_dense() for g in (theirs, mine))
        assert alike(one, other, dtype), (what, one, other)


"""Each call is compiled."""


@pytest.mark.parametrize("target", TARGETS if THOROUGH else TARGETS[::24])
def test_an_operator_computes_what_torch_computes(target: str) -> None:
    """Values and gradients, in three types."""
    compared = [
        check(target, call, dtype, seed)
        for seed, call in enumerate(CALLS[target.removeprefix("aten.")][: None if THOROUGH else 2])
        for dtype in (CLOSE if THOROUGH else [torch.float32])
    ]
    assert any(compared)


def test_every_entry_of_the_table_has_a_case() -> None:
    assert OPERATORS.keys() == NAMES, "operators.txt is what planners know"
    assert {base_name(target) for target in TARGETS} == NAMES


class Sizes:
    """A known call with other sizes: each size stands for another one, the same in all tensors of the call."""

    def __init__(self, seed: int, *, lists: bool) -> None:
        """With `lists`, numbers in lists of arguments are sizes too."""
        self._draws = random.Random(seed)
        self._lists = lists
        self._new: dict[int, int] = {}

    def of(self, given: Any) -> Any:
        match given:
            case {"t": dtype, "s": shape} if "v" not in given:
                return {"t": dtype, "s": [self._size(size) for size in shape]}
            case dict():
                return {key: self.of(one) for key, one in given.items()} if "t" not in given else given
            case [*numbers] if self._lists and numbers and all(type(one) is int for one in numbers):
                return [self._size(one) for one in numbers]
            case list():
                return [self.of(one) for one in given]
            case _:
                return given

    def _size(self, size: int) -> int:
        return size if size < 2 else self._new.setdefault(size, self._draws.randint(1, 7))


TRIES = 12
SHAPES = 3
"""Of each operator, with a type drawn for each."""


@pytest.mark.parametrize("target", TARGETS if THOROUGH else TARGETS[4::48])
def test_random_shapes_and_types(target: str) -> None:
    draws = random.Random(target)
    name, compared = target.removeprefix("aten."), 0
    calls = [MORE[name]] if name in MORE else CALLS[name]
    for number in range(TRIES):
        call = Sizes(draws.randrange(1 << 30), lists=number % 2 == 1).of(draws.choice(calls))
        compared += check(target, call, draws.choice(list(CLOSE)), number)
        if compared == (SHAPES if THOROUGH else 1):
            break
    assert compared
