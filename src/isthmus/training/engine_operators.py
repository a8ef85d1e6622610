"""Which operators a device computes, at which schemas: said when it joins, and asked of its own stage."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Annotated

import msgspec
import torch
from msgspec import Meta

from isthmus.engines import EngineName
from isthmus.graph.operators import lacking, operators_here, overload_of
from isthmus.graph.schema import RECURRENT
from isthmus.training.jax.names import is_computed
from isthmus.wire_types import Text

MOST_OPERATORS = 4096


class EngineOperators(msgspec.Struct, frozen=True, kw_only=True):
    """A device's description of its engine."""

    engine: EngineName = "torch"
    torch: Annotated[str, Meta(max_length=100)]  # version, which JAX's devices have too
    operators: Annotated[dict[Text, Text], Meta(max_length=MOST_OPERATORS)]  # targets and digests of their schemas

    def lacks(self, schemas: Mapping[str, str]) -> tuple[str, ...]:
        """Return the operators of a graph that the engine lacks."""
        return lacking(schemas, self.operators)


@functools.cache
def engine_operators(engine: EngineName) -> EngineOperators:
    found = operators_here()
    if engine == "jax":
        found = {target: schema for target, schema in found.items() if is_computed(target) or _is_drawn(target)}
    return EngineOperators(engine=engine, torch=str(torch.__version__), operators=dict(found))


def _is_drawn(target: str) -> bool:
    """Return whether it draws random numbers, which torch does for every engine; a recurrent layer does much else
    too."""
    return target not in RECURRENT and torch.Tag.nondeterministic_seeded in overload_of(target).tags
