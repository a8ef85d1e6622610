"""Algorithms that a caller gives as Python objects, in place of a name that a job file could say."""

from __future__ import annotations

from isthmus.errors import UserError
from isthmus.federated.algorithms.algorithm import Algorithm

PREFIX = "given:"
_given: dict[str, Algorithm] = {}
"""By name, in this process and those forked from it."""


def give_algorithm(algorithm: Algorithm) -> str:
    """The name by which a job refers to it."""
    name = f"{PREFIX}{type(algorithm).__name__}"
    _given[name] = algorithm
    return name


def given_algorithm(name: str) -> Algorithm:
    """UserError where it was not given."""
    if name not in _given:
        raise UserError(f"algorithm {name!r}: is an object of another process: pass it again to `isthmus.federate`")
    return _given[name]
