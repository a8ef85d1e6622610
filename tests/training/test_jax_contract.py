"""The contract of the table: each operator computes what torch computes, values and gradients, within one rounding.

One rounding of a result of 16 bits is one unit in its last place: of torch's, or of the exact one, which is torch's in
float64 from the same numbers; or the result is nearer to the exact one than torch's. In float32 it is `UNITS` of them.
Operators that sum have units of the largest number that they give, `LINEAR` ones of what they take too: that is how
exact sums are.
"""

from __future__ import annotations

import importlib
import math
import operator
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax_cases
import pytest
import torch
from torch import fx

from isthmus.graph.operators import overload_of

pytest.importorskip("jax", reason="the extra jax")
from tests.tiers import THOROUGH

from isthmus.training.engine_operators import engine_operators
from isthmus.training.jax.names import NAMES, base_name, is_computed
from isthmus.training.jax.program import OPERATORS, JaxFunction, in_place

pytestmark = pytest.mark.thorough

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
UNITS = {torch.float32: 8, torch.float64: 1 << 30, torch.bfloat16: 1, torch.float16: 1}
"""How far results may be apart: libraries differ so much in exponentials and in the order of sums. Results of
float64 are of what has been float32."""


class Case(NamedTuple):
    call: jax_cases.Call
    tensors: list[torch.Tensor]
    """With those that are fixed: without a gradient."""
    args: Any
    kwargs: Any


class Hole(NamedTuple):
    index: int


def case_of(call: jax_cases.Call, dtype: torch.dtype, draws: torch.Generator) -> Case:
    tensors: list[torch.Tensor] = []

    def read(one: Any) -> Any:
        if isinstance(one, jax_cases.Tensor):
            if one.values is None:
                made = torch.randn(one.shape, generator=draws).to(dtype)
            else:
                made = torch.tensor(one.values, dtype=torch.float64 if one.dtype is None else one.dtype)
                made = made.to(one.dtype or dtype).reshape(one.shape)
            tensors.append(made.requires_grad_(made.is_floating_point() and not one.fixed))
            return Hole(len(tensors) - 1)
        return [read(each) for each in one] if type(one) is list else one

    return Case(call, tensors, [read(one) for one in call.args], {key: read(one) for key, one in call.kwargs.items()})


def filled(value: Any, holes: list[Any]) -> Any:
    if isinstance(value, Hole):
        return holes[value.index]
    if type(value) is list:
        return [filled(one, holes) for one in value]
    return {key: filled(one, holes) for key, one in value.items()} if type(value) is dict else value


def by_torch(target: str, case: Case, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    overload = overload_of(target)
    given = [t * 1 if in_place(overload) else t for t in tensors]
    result = overload(*filled(case.args, given), **filled(case.kwargs, given))
    if base_name(target) == "empty_like":
        result = torch.zeros_like(result)  # memory that no operator has written is zero
    return [result] if isinstance(result, torch.Tensor) else list(result)


def by_jax(target: str, cases: list[Case], expected: list[list[torch.Tensor]]) -> list[tuple[Any, Any]]:
    """Of each case the tensors that it took, and its results: one function computes them all."""
    graph, taken, results = fx.Graph(), [], []
    for case in cases:
        taken.append([t.detach().clone().requires_grad_(t.requires_grad) for t in case.tensors])
    holes = [[graph.placeholder(f"v{k}_{j}") for j in range(len(own))] for k, own in enumerate(taken)]
    for case, own, known in zip(cases, holes, expected, strict=True):
        made = graph.call_function(overload_of(target), tuple(filled(case.args, own)), filled(case.kwargs, own))
        made.meta["dtypes"] = tuple(t.dtype for t in known)
        single = str(overload_of(target)._schema.returns[0].type) == "Tensor" and len(known) == 1
        results.append(
            [made] if single else [graph.call_function(operator.getitem, (made, k)) for k in range(len(known))]
        )
    graph.output(tuple(one for several in results for one in several))
    found = iter(JaxFunction(graph)(*(t for own in taken for t in own)))
    return [(own, [next(found) for _ in several]) for own, several in zip(taken, results, strict=True)]


def gradients(tensors: list[torch.Tensor], results: list[torch.Tensor]) -> list[torch.Tensor | None] | None:
    """Of drawn gradients of the results. None where torch knows no derivative."""
    roots = [r for r in results if r.requires_grad]
    leaves = [t for t in tensors if t.requires_grad]
    draws = torch.Generator().manual_seed(1)
    seeds = [torch.randn(r.shape, generator=draws).to(torch.bfloat16).to(r.dtype) for r in roots]
    if not (roots and leaves):
        return [torch.zeros_like(t) for t in leaves]
    try:
        found = torch.autograd.grad(roots, leaves, seeds, allow_unused=True)
    except (RuntimeError, NotImplementedError) as e:
        assert "derivative" in str(e) or "not implemented" in str(e), e
        return None
    return [torch.zeros_like(t) if g is None else g.to_dense() for t, g in zip(leaves, found, strict=True)]


def far(one: torch.Tensor, other: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """In units of the last place of `other`, or of `scale` if that is larger; infinite where one is no number and the
    other is."""
    own = torch.finfo(dtype)
    one, other = one.double(), other.to(dtype).double()
    size = other.abs().clamp(min=own.tiny).nan_to_num(own.tiny, own.max)
    unit = own.eps * torch.exp2(torch.floor(torch.log2(size.clamp(min=scale))))
    # numbers that are not normal are 0 to XLA
    unit = torch.where(
        size <= own.tiny, torch.full_like(unit, own.tiny * (own.eps if own.bits == 16 and own.eps < 4e-3 else 1)), unit
    )
    apart = torch.where((one == other) | (one.isnan() & other.isnan()), 0, (one - other).abs() / unit)
    return apart.nan_to_num(math.inf, math.inf)


def scale_of(*tensors: torch.Tensor) -> float:
    """The largest finite number."""
    sizes = [
        t.detach().double().nan_to_num(0, 0, 0).abs().max().item()
        for t in tensors
        if t.numel() and t.is_floating_point()
    ]
    return max(sizes, default=0.0)


class Apart(NamedTuple):
    what: str
    case: int
    torchs: float
    """Units from torch's; `exact` from the exact one, and the smaller of both for each number."""
    exact: float
    nearest: float
    detail: tuple[Any, ...]


def comparisons(target: str, dtype: torch.dtype, most: int | None = None) -> list[Apart]:
    """Of `most` cases."""
    draws = torch.Generator().manual_seed(0)
    cases, expected = [], []
    for call in jax_cases.CASES[target.removeprefix("aten.")][:most]:
        case = case_of(call, dtype, draws)
        try:
            results = by_torch(target, case, case.tensors)
        except (RuntimeError, NotImplementedError) as e:
            if "not implemented for 'Half'" in str(e) or "not implemented for 'BFloat16'" in str(e):
                continue
            raise AssertionError(f"torch refuses {target} {call}: {e}") from e
        cases.append(case)
        expected.append(results)
    assert cases
    found = []
    for number, (case, theirs, (own, mine)) in enumerate(
        zip(cases, expected, by_jax(target, cases, expected), strict=True)
    ):
        wide = [
            (t.detach().double() if t.is_floating_point() else t).requires_grad_(t.requires_grad) for t in case.tensors
        ]
        exact = by_torch(target, case, wide)
        name = base_name(target)
        # Numbers of 16 bits are computed in float32, whose units count where they are larger.
        least = 16 * torch.finfo(torch.float32).eps / torch.finfo(dtype).eps if dtype is not torch.float32 else 1.0
        least = least if name in DIFFERENCES else 0.0
        for place, (a, b, c) in enumerate(zip(mine, theirs, exact, strict=True)):
            assert (a.shape, a.dtype) == (b.shape, b.dtype), (target, case.call, place, a, b)
            if place in case.call.open:
                continue
            if not b.is_floating_point():
                assert torch.equal(a, b), (target, dtype, case, place, a, b)
                continue
            found.append(
                apart(
                    f"value {place}",
                    number,
                    (a, b, c),
                    scale_of(*(case.tensors if name in LINEAR else ()), b) if name in LINEAR | SUMS else least,
                )
            )
        if case.call.open:
            continue
        ours, known, precise = gradients(own, mine), gradients(case.tensors, theirs), gradients(wide, exact)
        if known is None or ours is None or precise is None:
            assert known is None, (target, case)
            continue
        for place, (a, b, c) in enumerate(zip(ours, known, precise, strict=True)):
            linear = name in LINEAR or a.numel() < max(r.numel() for r in theirs)  # summed where it was broadcast
            scale = scale_of(*(case.tensors if linear else ()), *known) if linear or name in SUMS else least
            found.append(apart(f"gradient {place}", number, (a, b, c), scale))
    return found


def apart(what: str, case: int, values: tuple[torch.Tensor, ...], scale: float) -> Apart:
    mine, theirs, exact = (v.detach() for v in values)
    dtype = theirs.dtype
    first, second, torchs = (far(a, b, dtype, scale) for a, b in ((mine, theirs), (mine, exact), (theirs, exact)))
    nearest = torch.where(second < torchs, 0, torch.minimum(first, second))  # nothing is wrong with being nearer
    worst = [t.max().item() if t.numel() else 0.0 for t in (first, second, nearest)]
    return Apart(what, case, *worst, (mine, theirs, exact))


LINEAR = {
    *("sum", "mean", "cumsum", "var_mean", "std_mean", "linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum"),
    *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "avg_pool1d", "avg_pool2d"),
    *("adaptive_avg_pool1d", "adaptive_avg_pool2d", "scatter_add", "embedding", "index", "index_select", "gather"),
    *("expand", "expand_as", "repeat", "broadcast_tensors", "copy", "fill"),
}
SUMS = {
    *("softmax", "log_softmax", "prod", "var", "std", "logsumexp", "linalg_vector_norm", "layer_norm", "rms_norm"),
    *("group_norm", "batch_norm", "scaled_dot_product_attention", "cross_entropy_loss", "mse_loss", "l1_loss"),
    *("smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits"),
}
DIFFERENCES = {"tanh", "sigmoid", "gelu", "silu", "mish", "hardswish", "lerp", "expm1"}
"""Of numbers of about 1, whose difference may be small."""
TARGETS = sorted(f"aten.{name}" for name in jax_cases.CASES)


FIRST = list({base_name(target): target for target in reversed(TARGETS)}.values())[::4]
"""An overload of every fourth operator: what is compiled takes most of the time."""


@pytest.fixture(autouse=True, scope="module")
def _compiled_quickly() -> Iterator[None]:
    config = importlib.import_module("jax").config
    config.update("jax_disable_most_optimizations", not THOROUGH)
    yield
    config.update("jax_disable_most_optimizations", False)


@pytest.mark.parametrize("target", TARGETS if THOROUGH else FIRST)
def test_an_operator_computes_what_torch_computes(target: str) -> None:
    for dtype in DTYPES if THOROUGH else DTYPES[:1]:
        for found in comparisons(target, dtype, None if THOROUGH else 3):
            assert found.nearest <= UNITS[found.detail[0].dtype], (target, dtype, found)


def test_every_operator_that_jax_computes_has_its_cases() -> None:
    assert OPERATORS.keys() == NAMES, "operators.txt is what planners know"
    assert {target for target in engine_operators("jax").operators if is_computed(target)} == set(TARGETS)


WITHOUT_NUMBERS = {
    "layout",
    "device",
    "pin_memory",
    "memory_format",
    "non_blocking",
    "copy",
    "path",
    "cudnn_enable",
    "cudnn_enabled",
}
"""Options that no number depends on."""


@pytest.mark.parametrize("target", TARGETS)
def test_each_option_of_an_operator_has_a_case(target: str) -> None:
    """Another value than its default."""
    arguments = overload_of(target)._schema.arguments
    for place, argument in enumerate(arguments):
        if not argument.has_default_value() or argument.name in WITHOUT_NUMBERS:
            continue
        if (target, argument.name) == ("aten.scaled_dot_product_attention.default", "dropout_p"):
            continue  # what draws is torch's
        given = [
            call.args[place] if place < len(call.args) else call.kwargs.get(argument.name, argument.default_value)
            for call in jax_cases.CASES[target.removeprefix("aten.")]
        ]
        assert any(one != argument.default_value for one in given), (target, argument.name)


R, N = jax_cases.R, jax_cases.N
REFUSED = {
    "embedding.default": (R(5, 3), N([1, 5])),
    "index.Tensor": (R(4, 3), [None, N([3])]),
    "index_select.default": (R(4, 3), 0, N([-1])),
    "gather.default": (R(4, 3), 0, N([[4]])),
    "scatter_add.default": (R(4, 3), 1, N([[-1]]), R(1, 1)),
    "cross_entropy_loss.default": (R(2, 4), N([0, 4])),
    "floor_divide.default": (N([1, 2]), N([1, 0])),
    "div.Tensor_mode": (N([1, 2]), N([1, 0])),
    "remainder.Tensor": (N([1, 2]), N([1, 0])),
}
"""For the values of their arguments, which compiled code does not look at by itself."""


@pytest.mark.parametrize("name", REFUSED)
def test_values_that_torch_refuses_are_refused(name: str) -> None:
    options = {"rounding_mode": "trunc"} if name == "div.Tensor_mode" else {}
    case = case_of(jax_cases.call(*REFUSED[name], **options), torch.float32, torch.Generator())
    with pytest.raises((IndexError, RuntimeError)):
        by_torch(f"aten.{name}", case, case.tensors)
    with pytest.raises(IndexError, match="out of range, or a whole number is divided by 0"):
        by_jax(f"aten.{name}", [case], [[torch.zeros(())]])
