"""The document: sizes, references, JSON there and back."""

from __future__ import annotations

import pytest

from isthmus.errors import UserError
from isthmus.graph import Affine, Op, OpGraph, Ref, TensorSpec, decode, encode
from isthmus.graph.opgraph import ArgList, Named, add_sizes

ROW = TensorSpec("float32", (Affine(2, 1), 3), (3, 1))


def graph() -> OpGraph:
    return OpGraph(
        name="tiny",
        mode="train",
        ops=(
            Op(name="x", kind="placeholder", target="x", outputs=(ROW,), requires_grad=(False,)),
            Op(
                name="w",
                kind="parameter",
                target="layer.w",
                outputs=(TensorSpec("bfloat16", (3,), (1,)),),
                requires_grad=(True,),
            ),
            Op(
                name="cat",
                kind="operator",
                target="aten.cat.default",
                args=(ArgList((Ref("x"), ArgList((Ref("w", 0),)), None, True, 2, 0.5, "text")), Affine(4)),
                kwargs={"dtype": Named("dtype", "float32"), "like": Ref("x"), "value": Named("float", "-inf")},
                outputs=(ROW, ROW),
                requires_grad=(True, False),
                module="layer",
                flops_forward=Affine(6, 3),
                random=True,
                mutates=("x",),
            ),
        ),
        loss=Ref("cat"),
        count=Ref("cat", 1),
        outputs={"logits": Ref("cat", 1)},
        batch=4,
    )


def test_json_round_trip():
    assert decode(encode(graph())) == graph()
    assert encode(decode(encode(graph()))) == encode(graph())


@pytest.mark.parametrize("text", [b"{", b"[]", b'{"name": "x"}', b'{"name": 3}'])
def test_a_document_that_is_none(text: bytes):
    with pytest.raises(UserError, match="operator graph: cannot be read"):
        decode(text)


def test_sizes():
    assert ROW.shape_at(5) == (11, 3)
    assert ROW.nbytes(5) == 11 * 3 * 4
    assert add_sizes(2, 3) == 5
    assert add_sizes(2, Affine(3)) == Affine(3, 2)
    assert add_sizes(Affine(1, 1), Affine(3)) == Affine(4, 1)


def test_refs_reach_into_lists_and_keywords():
    assert graph().op("cat").refs() == [Ref("x"), Ref("w"), Ref("x")]


def test_parameters():
    assert graph().trainable == ("layer.w",)
    assert graph().parameter_bytes == 6
    with pytest.raises(KeyError):
        graph().op("nothing")
