"""Models made by hand: operator graphs of four shapes, with FLOPs, bytes and parameters of their own."""

from __future__ import annotations

import random

from isthmus.graph import Affine, Op, OpGraph, Ref, TensorSpec

KINDS = ("chain", "transformer", "branches", "u-shape")


def model(source: random.Random, kind: str, operators: int) -> OpGraph:
    """About `operators` operators of one of `KINDS`, and a loss."""
    made = _Graph(source)
    width = source.randint(8, 64)
    if kind == "chain":
        _chain(made, operators, width)
    elif kind == "transformer":
        _transformer(made, max(1, operators // 6), width)
    elif kind == "branches":
        _branches(made, operators, width)
    else:
        _u_shape(made, max(1, operators // 3), width)
    return made.finished(f"{kind}-{operators}")


class _Graph:
    def __init__(self, source: random.Random) -> None:
        self.source = source
        self.ops = [_placeholder("inputs", 16), _placeholder("labels", 1)]
        self.last = "inputs"
        self.count = 0

    def weight(self, *shape: int) -> str:
        name = f"w{len(self.ops)}"
        self.ops.append(
            Op(
                name=name,
                kind="parameter",
                target=name,
                outputs=(_tensor(*shape, batched=False),),
                requires_grad=(True,),
            )
        )
        return name

    def add(self, *args: str, width: int, flops: int, saved: int | None = None) -> str:
        """An operator on the values and parameters named, with an output of [batch, width]."""
        name = f"op{self.count}"
        self.count += 1
        kept = 4 * width if saved is None else saved
        self.ops.append(
            Op(
                name=name,
                kind="operator",
                target="aten.test.default",
                args=tuple(map(Ref, args)),
                outputs=(_tensor(width),),
                requires_grad=(True,),
                flops_forward=Affine(flops),
                flops_backward=Affine(2 * flops),
                saved_bytes=Affine(kept),
            )
        )
        self.last = name
        return name

    def layer(self, before: str, wide: int, width: int) -> str:
        """A matrix product with a weight of its own."""
        return self.add(before, self.weight(wide, width), width=width, flops=2 * wide * width)

    def finished(self, name: str) -> OpGraph:
        self.ops.append(
            Op(
                name="loss",
                kind="operator",
                target="aten.test.default",
                args=(Ref(self.last), Ref("labels")),
                outputs=(_tensor(batched=False),),
                requires_grad=(True,),
                flops_forward=Affine(8),
                flops_backward=Affine(16),
            )
        )
        return OpGraph(name=name, mode="train", ops=tuple(self.ops), loss=Ref("loss"))


def _chain(made: _Graph, operators: int, width: int) -> None:
    wide = 16
    for _ in range(operators):
        after = max(2, int(width * made.source.uniform(0.3, 2)))
        if made.source.random() < 0.7:
            made.layer(made.last, wide, after)
        else:
            made.add(made.last, width=after, flops=made.source.randint(1, 20) * after)
        wide = after


def _transformer(made: _Graph, layers: int, width: int) -> None:
    """Residual blocks; the first weight is used again at the end where the coin says so."""
    table = made.weight(16, width)
    stream = made.add("inputs", table, width=width, flops=16 * width)
    for _ in range(layers):
        mixed = made.layer(made.layer(stream, width, 3 * width), 3 * width, width)
        stream = made.add(stream, mixed, width=width, flops=width, saved=0)
        wide = made.layer(made.layer(stream, width, 4 * width), 4 * width, width)
        stream = made.add(stream, wide, width=width, flops=width, saved=0)
    if made.source.random() < 0.5:
        made.add(stream, table, width=16, flops=32 * width)


def _branches(made: _Graph, operators: int, width: int) -> None:
    """Towers side by side that meet again, one after another in the cut order."""
    stream = made.add("inputs", made.weight(16, width), width=width, flops=32 * width)
    while made.count < operators:
        towers = [stream for _ in range(made.source.randint(2, 3))]
        for _ in range(made.source.randint(1, 3)):
            towers = [made.layer(tower, width, width) for tower in towers]
        stream = made.add(*towers, width=width, flops=width, saved=0)


def _u_shape(made: _Graph, depth: int, width: int) -> None:
    """Down, and up again with what was kept on the way."""
    stream = made.add("inputs", made.weight(16, width), width=width, flops=32 * width)
    kept: list[tuple[str, int]] = []
    for _ in range(depth):
        kept.append((stream, width))
        narrow = max(2, width * 2 // 3)
        stream, width = made.layer(stream, width, narrow), narrow
    for skip, wide in reversed(kept):
        up = made.layer(stream, width, wide)
        stream, width = made.add(up, skip, width=wide, flops=4 * wide), wide


def _tensor(*shape: int, batched: bool = True) -> TensorSpec:
    full = (Affine(1), *shape) if batched else shape
    return TensorSpec("float32", full, tuple(1 for _ in full))


def _placeholder(name: str, *shape: int) -> Op:
    return Op(name=name, kind="placeholder", target=name, outputs=(_tensor(*shape),), requires_grad=(False,))
