"""Operators by the schemas that this torch has of them: what a graph was captured with, and what a device computes.

Versions of torch differ in schemas. A graph says those of its operators, so devices with other versions can work on it
as long as the operators that it calls are alike.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Iterator, Mapping

import torch

from isthmus.graph.allowlist import ALLOWED
from isthmus.graph.operators import is_callable, overload_of
from isthmus.graph.opgraph import Op


def schema_of(target: str) -> str:
    """In torch's words. UserError for an operator that a graph may not call, or that this torch does not have."""
    return str(overload_of(target)._schema)  # pyright: ignore[reportPrivateUsage]  # torch has no public way to it


def schemas_of(ops: Iterable[Op]) -> dict[str, str]:
    """Return the schemas by target, sorted."""
    return {target: schema_of(target) for target in sorted({op.target for op in ops if op.kind == "operator"})}


def digest(schema: str) -> str:
    """Short enough to say for each operator."""
    return hashlib.sha256(schema.encode()).hexdigest()[:8]


@functools.cache
def operators_here() -> Mapping[str, str]:
    """Every operator that a graph may call and this torch has, with the digest of its schema."""
    return {target: digest(schema_of(target)) for target in sorted(_targets())}


def _targets() -> Iterator[str]:
    for name in {allowed.partition(".")[0] for allowed in ALLOWED}:
        packet: object = getattr(torch.ops.aten, name, None)
        if isinstance(packet, torch._ops.OpOverloadPacket):  # pyright: ignore[reportPrivateUsage]
            yield from filter(is_callable, (f"aten.{name}.{overload}" for overload in packet.overloads()))


def lacking(schemas: Mapping[str, str], operators: Mapping[str, str]) -> tuple[str, ...]:
    """Return those operators of a graph, by `schemas`, that a device does not have, or has at another schema."""
    return tuple(target for target, schema in schemas.items() if operators.get(target) != digest(schema))
