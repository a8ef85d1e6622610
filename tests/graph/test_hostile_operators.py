"""A graph that a hostile coordinator wrote: nothing it can call reads or writes beyond its tensors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from isthmus.errors import UserError
from isthmus.graph import Ref
from isthmus.graph.operators import operator_of
from isthmus.graph.opgraph import Affine, Arg, ArgList, Named, Op, TensorSpec
from isthmus.graph.partition import StageGraph
from isthmus.training.program import Program

SEARCH_S = float(os.environ.get("ISTHMUS_HOSTILE_CALLS_S", "0"))
"""Seconds to search with fresh seeds in place of the few calls of every run."""


def test_no_operator_crashes_or_shows_memory_that_is_not_its_own():
    seed = int.from_bytes(os.urandom(3)) if SEARCH_S else 1
    command = [sys.executable, str(Path(__file__).with_name("hostile_calls.py")), str(seed), "3", str(SEARCH_S)]
    found = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True, text=True)
    *wrong, last = (json.loads(line) for line in found.stdout.splitlines() if line.startswith("["))
    assert last[0] == "done" and last[1] > 600
    assert wrong == []


SCALAR = TensorSpec("float32", (), ())


def run(target: str, *args: Arg, inputs: dict[str, Tensor] | None = None, **kwargs: Arg) -> Tensor:
    """What a device gives for a graph of this one operator."""
    op = Op(name="o", kind="operator", target=target, args=args, kwargs=kwargs, outputs=(SCALAR,))
    stage = StageGraph(
        index=0,
        ops=(op,),
        columns=(),
        receives=(),
        sends=(),
        shared_from={},
        shared_with={},
        loss=Ref("o"),
        count=None,
        outputs={},
    )
    values = {Ref(name): value for name, value in (inputs or {}).items()}
    return Program(stage, "eval", batch=2).run(values, 0, 0)[Ref("o")]


@pytest.mark.parametrize(
    "target",
    [
        "aten._reshape_alias.default",
        "aten._embedding_bag.default",
        "aten.set.source_Storage",
        "aten.resize_.default",
        "aten.add.out",
        "aten.add.str",
        "aten.to.prim_dtype",
        "aten.lstm.data",
        "aten.add",
        "aten.add.__class__",
        "aten.median.dim",
        "prim.device.default",
        "aten.linear.default.default",
        "aten.relu_.default",
    ],
)
def test_operators_and_overloads_that_are_refused(target: str):
    with pytest.raises(UserError, match=r"allow-list|has no operator"):
        run(target, Ref("x"), inputs={"x": torch.ones(3)})


@pytest.mark.parametrize(
    "kwargs",
    [
        {"dtype": 13},
        {"dtype": Named("dtype", "quint8")},
        {"dtype": Named("dtype", "strided")},
        {"layout": 1},
        {"layout": Named("layout", "sparse_coo")},
        {"device": "meta"},
        {"dtype": Ref("x")},
        {"device": Named("dtype", "float32")},
    ],
)
def test_kinds_of_tensors_that_a_graph_may_not_ask_for(kwargs: dict[str, Arg]):
    with pytest.raises(UserError, match="expected"):
        run("aten.zeros.default", ArgList((2, 2)), inputs={"x": torch.tensor(13)}, **kwargs)


@pytest.mark.parametrize("reduction", [-1, 3, Affine(8, 0), Ref("three"), True])
def test_a_loss_is_reduced_in_a_way_that_there_is(reduction: Arg):
    inputs = {"x": torch.rand(4), "y": torch.rand(4), "three": torch.tensor(3)}
    with pytest.raises(UserError, match="'reduction'"):
        run("aten.binary_cross_entropy.default", Ref("x"), Ref("y"), None, reduction, inputs=inputs)


SIZE = ArgList((50, 40))
EMPTY = {
    "empty.memory_format": (SIZE,),
    "empty_like.default": (Ref("x"),),
    "empty_permuted.default": (SIZE, ArgList((1, 0))),
    "empty_strided.default": (SIZE, ArgList((40, 1))),
    "new_empty.default": (Ref("x"), SIZE),
    "new_empty_strided.default": (Ref("x"), SIZE, ArgList((1, 50))),
}


@pytest.mark.parametrize("name", EMPTY)
def test_memory_that_nothing_has_written_is_zero(name: str):
    secrets = [torch.full((50, 40), 7.0) for _ in range(20)]
    inputs = {"x": torch.ones(50, 40)}
    del secrets  # freed memory is given out again as it is
    results = [run(f"aten.{name}", *EMPTY[name], inputs=inputs) for _ in range(20)]
    assert not any(result.any() for result in results)
    eager = getattr(getattr(torch.ops.aten, name.split(".")[0]), name.split(".")[1])
    plain = [inputs["x"] if isinstance(a, Ref) else list(a.items) for a in EMPTY[name]]
    assert results[0].stride() == eager(*plain).stride()


@pytest.mark.parametrize("name", ["empty_strided.default", "new_empty_strided.default"])
def test_gaps_of_memory_that_nothing_has_written_are_zero(name: str):
    secrets = [torch.full((3601,), 7.0) for _ in range(20)]
    del secrets
    given = () if name.startswith("empty") else (torch.ones(1),)
    for _ in range(20):
        made = operator_of(f"aten.{name}")(*given, [2], [3600])
        assert not made.as_strided((3601,), (1,)).any()


@pytest.mark.parametrize("name", ["as_strided", "as_strided_scatter"])
@pytest.mark.parametrize(
    ("size", "stride", "offset"),
    [
        ((21,), (1,), None),
        ((2,), (20,), None),
        ((1,), (1,), 0),
        ((1,), (1,), 70),
        ((2, 2), (19, 1), 50),
        ((3,), (-1,), 60),
    ],
)
def test_a_view_reaches_the_elements_of_its_tensor_alone(
    name: str, size: tuple[int, ...], stride: tuple[int, ...], offset: int | None
):
    part = torch.arange(100.0)[50:70]
    call = operator_of(f"aten.{name}.default")
    source = (part,) if name == "as_strided" else (part, torch.zeros(size))
    with pytest.raises(UserError, match=r"elements of the tensor itself|a size and a stride"):
        call(*source, list(size), list(stride), offset)
    whole = (part,) if name == "as_strided" else (part, torch.zeros(2, 10))
    expected = part.view(2, 10) if name == "as_strided" else torch.zeros(20)
    assert torch.equal(call(*whole, [2, 10], [10, 1]), expected)


ATTENTION = "aten.scaled_dot_product_attention.default"


@pytest.mark.parametrize(
    ("shapes", "rest"),
    [
        ([(2, 2, 4, 8), (2, 2, 3, 8), (2, 2, 5, 8)], ()),  # kernels read keys that there are not
        ([(2, 2, 4, 8), (2, 2, 5, 6), (2, 2, 5, 8)], ()),
        ([(2, 4, 4, 8), (2, 3, 5, 8), (2, 3, 5, 8)], (None, 0.0, False)),
        ([(2, 4, 4, 8), (2, 3, 5, 8), (2, 3, 5, 8)], (None, 0.0, False, None, True)),
        ([(2, 2, 4, 8), (2, 2, 5, 8), (2, 5, 8)], ()),
        ([(2, 2, 4, 8), (2, 2, 5, 8), (2, 2, 5, 8)], (None, 1.5)),
        ([(2, 2, 4, 8), (2, 2, 5, 8), (2, 2, 5, 8), (4, 4)], (Ref("t3"),)),
        ([(2, 2, 4, 8), (2, 2, 5, 8), (2, 2, 5, 8), (7, 1, 4, 5)], (Ref("t3"),)),
    ],
)
def test_attention_whose_tensors_do_not_fit_is_refused(shapes: list[tuple[int, ...]], rest: tuple[Arg, ...]):
    inputs = {f"t{i}": torch.ones(shape) for i, shape in enumerate(shapes)}
    with pytest.raises(UserError, match=r"scaled_dot_product_attention\.default: expected"):
        run(ATTENTION, Ref("t0"), Ref("t1"), Ref("t2"), *rest, inputs=inputs)


@pytest.mark.parametrize(
    ("shapes", "gqa"),
    [
        ([(2, 4, 4, 8), (2, 4, 5, 8), (2, 4, 5, 6), (4, 5)], False),
        ([(2, 4, 4, 8), (2, 2, 5, 8), (2, 2, 5, 8), (2, 1, 1, 5)], True),
        ([(4, 8), (5, 8), (5, 8), (1, 5)], False),
        ([(2, 4, 4, 8), (1, 4, 5, 8), (2, 4, 5, 8), (2, 4, 4, 5)], False),
    ],
)
def test_attention_whose_tensors_fit_is_what_torch_computes(shapes: list[tuple[int, ...]], gqa: bool):
    inputs = {f"t{i}": torch.randn(shape, generator=torch.Generator().manual_seed(i)) for i, shape in enumerate(shapes)}
    found = run(
        ATTENTION,
        *(Ref(f"t{i}") for i in range(4)),
        inputs=inputs,
        enable_gqa=gqa,
        scale=0.3,
    )
    wanted = torch.nn.functional.scaled_dot_product_attention(*inputs.values(), enable_gqa=gqa, scale=0.3)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("stride", [(80, 40, 8, 1), (64, 8, 16, 1), (0, 32, 8, 1), (32, 0, 8, 1), (16, 8, 0, 1)])
def test_queries_in_any_layout_but_overlapping_ones(stride: tuple[int, ...]):
    shape, values = (2, 2, 4, 8), torch.randn(400, generator=torch.Generator().manual_seed(1))
    query = values.as_strided(shape, stride)
    other = torch.randn(2, 2, 5, 8, generator=torch.Generator().manual_seed(2))
    refs = [Ref(name) for name in "qkv"]
    found = run(ATTENTION, *refs, inputs={"q": query, "k": other, "v": other})
    wanted = torch.nn.functional.scaled_dot_product_attention(query.contiguous(), other, other)
    torch.testing.assert_close(found, wanted)
    with pytest.raises(UserError, match="do not overlap"):
        run(ATTENTION, *refs, inputs={"q": values.as_strided(shape, (2, 2, 1, 1)), "k": other, "v": other})


@pytest.mark.parametrize("how", ["reflection", "replication"])
def test_a_padding_that_takes_away_is_refused(how: str):
    with pytest.raises(UserError, match="no negative padding"):
        run(f"aten.{how}_pad1d.default", Ref("x"), ArgList((-2, -2)), inputs={"x": torch.ones(1, 4)})


@pytest.mark.parametrize("name", ["remainder.Scalar_Tensor", "remainder.Tensor", "fmod.Tensor", "floor_divide.default"])
def test_the_least_integer_is_not_divided_by_minus_one(name: str):
    inputs = {"x": torch.tensor([-(2**31)], dtype=torch.int32), "y": torch.tensor([-1], dtype=torch.int32)}
    above: Arg = -(2**31) if "Scalar_" in name else Ref("x")
    with pytest.raises(UserError, match="no least integer"):
        run(f"aten.{name}", above, Ref("y"), inputs=inputs)
    assert run(f"aten.{name}", Ref("y") if "Scalar_" not in name else 7, Ref("y"), inputs=inputs) is not None


@pytest.mark.parametrize(("shape", "target"), [((0, 3), 0), ((2, 3), 3), ((2, 3), -2)])
def test_labels_of_many_classes_that_do_not_fit_are_refused(shape: tuple[int, ...], target: int):
    inputs = {"x": torch.ones(shape), "y": torch.full(shape, target)}
    with pytest.raises(UserError, match="expected"):
        run("aten.multilabel_margin_loss.default", Ref("x"), Ref("y"), inputs=inputs)


def test_the_loss_of_no_sample_is_refused():
    inputs = {"x": torch.ones(0, 33), "y": torch.ones(0, dtype=torch.int64)}
    with pytest.raises(UserError, match="not empty"):
        run("aten.multi_margin_loss.default", Ref("x"), Ref("y"), inputs=inputs)


@pytest.mark.parametrize("stride", [0, 3])
def test_targets_in_one_row_lie_without_gaps(stride: int):
    targets = torch.ones(20, dtype=torch.int64).as_strided((5,), (stride,))
    inputs = {"x": torch.zeros(6, 2, 4), "y": targets, "many": torch.tensor([6, 6]), "few": torch.tensor([3, 2])}
    refs = [Ref(name) for name in inputs]
    with pytest.raises(UserError, match="without gaps"):
        run("aten.ctc_loss.Tensor", *refs, 0, inputs=inputs)
    assert run("aten.ctc_loss.Tensor", *refs, 0, inputs=inputs | {"y": targets.contiguous()}).isfinite()


BEYOND = "beyond any memory|at most 1024 or the size"


@pytest.mark.parametrize(
    ("target", "args"),
    [
        ("max_pool1d.default", (ArgList((2**33 + 1,)), ArgList((2**33,)), ArgList((0,)), ArgList((2**40,)), True)),
        ("avg_pool1d.default", (ArgList((2,)), ArgList((2000,)))),
        ("im2col.default", (2, 2**62, 0, 1)),
        ("im2col.default", (2, 2**32, 0, 1)),
        ("unfold.default", (0, 1, -(2**62))),
        ("tile.default", (ArgList((2**62,)),)),
    ],
)
def test_sizes_beyond_the_input_are_refused(target: str, args: tuple[Arg, ...]):
    with pytest.raises(UserError, match=BEYOND):
        run(f"aten.{target}", Ref("x"), *args, inputs={"x": torch.ones(2, 3, 8)})


def test_an_end_beyond_the_tensor_is_its_end():
    rows = run("aten.slice.Tensor", Ref("x"), 0, 1, 2**63 - 1, inputs={"x": torch.arange(4)})
    assert rows.tolist() == [1, 2, 3]
