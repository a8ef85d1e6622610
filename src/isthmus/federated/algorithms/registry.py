"""The algorithms by name: ours, those of other packages or the user's own file, and those that a caller gives as
objects."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from isthmus.errors import UserError, unknown_name, users_code
from isthmus.extensions import import_object, load_third_party, read_options, third_party
from isthmus.federated.algorithms.algorithm import BUFFERS, Algorithm
from isthmus.federated.algorithms.fedavg import FedAvg
from isthmus.federated.algorithms.feddyn import FedDyn
from isthmus.federated.algorithms.fednova import FedNova
from isthmus.federated.algorithms.fedopt import FedAdam, FedAvgM, FedYogi
from isthmus.federated.algorithms.fedprox import FedProx
from isthmus.federated.algorithms.mime import Mime
from isthmus.federated.algorithms.scaffold import Scaffold
from isthmus.option_docs import OptionDoc, first_line, option_docs
from isthmus.wire_types import Table, Text

ENTRY_POINTS = "isthmus.algorithms"

_BUILT_IN: Mapping[str, type[Algorithm]] = {
    "fedadam": FedAdam,
    "fedavg": FedAvg,
    "fedavgm": FedAvgM,
    "feddyn": FedDyn,
    "fednova": FedNova,
    "fedprox": FedProx,
    "fedyogi": FedYogi,
    "mime": Mime,
    "scaffold": Scaffold,
}


class AlgorithmSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of `algorithm_names()`, or `package.module:Class`; `options` are the fields of the class.

    Naming a class runs its module, so a spec is only ever read from the user's own file, never from a link.
    """

    name: Text = "fedavg"  # One of `isthmus algorithms`, or `package.module:Class` of your own.
    options: Table[Text, object] = {}  # Settings of the algorithm.


def algorithm_names() -> list[str]:
    """The names that `load_algorithm` knows, entry points of `isthmus.algorithms` included, sorted."""
    return sorted({*_BUILT_IN, *third_party(ENTRY_POINTS)})


def describe_algorithm(name: str) -> tuple[str, tuple[OptionDoc, ...]]:
    """One line on an algorithm, and its options. Raises UserError for an unknown name."""
    found = _class_of(name)
    return first_line(found), option_docs(found)


def load_algorithm(spec: AlgorithmSpec) -> Algorithm:
    """Raises UserError for an unknown name, an option that is not one, and a class that is no `Algorithm`."""
    if spec.name.startswith(GIVEN):
        algorithm = given_algorithm(spec.name)
    else:
        algorithm = read_options(spec.name, spec.options, _class_of(spec.name))
    with users_code(f"algorithm {spec.name!r}"):
        passes = [dict(one.returns) for one in algorithm.passes]
    if not all(passes) or not passes:
        raise UserError(f"algorithm {spec.name!r}: returns nothing, expected a value at least in every pass")
    for number, returns in enumerate(passes):
        if taken := [name for name in returns if name.partition("/")[0] == BUFFERS]:
            raise UserError(
                f"algorithm {spec.name!r}: returns {taken[0]!r}, which are the model's: expected another name"
            )
        for value, combine in returns.items():
            if combine not in ("weighted_mean", "mean", "sum", "collect"):
                raise UserError(
                    f"algorithm {spec.name!r}: pass {number} combines {value!r} by {combine!r}, "
                    "expected weighted_mean, mean, sum or collect"
                )
    return algorithm


def _class_of(name: str) -> type[Algorithm]:
    if name in _BUILT_IN:
        return _BUILT_IN[name]
    others = third_party(ENTRY_POINTS)
    if ":" in name:
        found = import_object("algorithm", name)
    elif name in others:
        found = load_third_party(others[name])
    else:
        raise unknown_name("algorithm", name, algorithm_names())
    if not (isinstance(found, type) and issubclass(found, Algorithm)):
        raise UserError(f"algorithm {name!r}: expected a subclass of isthmus.federated.Algorithm, got {found!r}")
    return found


GIVEN = "given:"
_given: dict[str, Algorithm] = {}  # algorithms by name, in this process and those forked from it


def give_algorithm(algorithm: Algorithm) -> str:
    """The name by which a job refers to it."""
    name = f"{GIVEN}{type(algorithm).__name__}"
    _given[name] = algorithm
    return name


def given_algorithm(name: str) -> Algorithm:
    """UserError where it was not given."""
    if name not in _given:
        raise UserError(f"algorithm {name!r}: is an object of another process: pass it again to `isthmus.federate`")
    return _given[name]
