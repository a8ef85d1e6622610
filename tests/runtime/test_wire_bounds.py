"""Every number, text and list of what another machine may send has bounds: found by walking the types, so that a new
field without bounds fails here.

Ranks of an island are processes of one user, who started them: what these say among themselves, outside of frames, is
not looked at.
"""

from __future__ import annotations

import typing
from collections.abc import Iterator

import msgspec
import pytest
from msgspec import inspect

from isthmus.errors import PeerError
from isthmus.runtime.identity import Ticket
from isthmus.runtime.messages.all_messages import AnyMessage
from isthmus.runtime.messages.fleet import JoinAnswer, JoinRequest
from isthmus.runtime.transport.channel import decode_message

SENT = (*typing.get_args(AnyMessage), JoinRequest, JoinAnswer, Ticket)
"""By coordinators, devices, replicas, executors, sites and stages that serve; and by machines that are not known."""
WITHOUT = {
    "DataSpec.options value": "of a data set, which its own struct checks before it is loaded",
    "DataSpec.of value value": "of a data set, which its own struct checks before it is loaded",
    "AlgorithmSpec.options value": "of an algorithm, which its own struct checks before it is made",
    "ModelSpec.options value": "of a model, which its own struct checks before it is built",
    "LearningRate.options value": "of torch's scheduler, compared with its signature before it is made",
    "Op.args item": "a constant of the model's forward: masks have -inf, and any float64 may be one",
    "Op.kwargs value": "a constant of the model's forward: masks have -inf, and any float64 may be one",
    "ArgList.items item": "a constant of the model's forward: masks have -inf, and any float64 may be one",
    "AnyOptimizerConfig.options value": "of torch's optimizer, compared with its signature and tried before the run",
    "ItemReported.metrics item": "sums of metrics, NaN and infinite as the loss is",
    "SiteValues.figures value": "those that are not finite are left out where they are read",
    "ItemReported.loss": "NaN and infinite where the job ignores what is not finite",
}
"""Values without bounds, and why; lists, tables and texts around them have some."""

Between = inspect.IntType | inspect.FloatType
Sized = (
    inspect.StrType
    | inspect.BytesType
    | inspect.ListType
    | inspect.VarTupleType
    | inspect.SetType
    | inspect.FrozenSetType
    | inspect.DictType
)
Closed = (
    inspect.BoolType
    | inspect.NoneType
    | inspect.LiteralType
    | inspect.EnumType
    | inspect.TupleType
    | inspect.UnionType
    | inspect.StructType
)
"""Have no more values, or parts, than their types say."""


def bounded(found: inspect.Type) -> bool:
    if isinstance(found, Between):
        below = found.ge is not None or found.gt is not None
        return below and (found.le is not None or found.lt is not None)
    if isinstance(found, Sized):
        return found.max_length is not None
    return isinstance(found, Closed)


def inside(found: inspect.Type) -> Iterator[tuple[str, inspect.Type]]:
    match found:
        case inspect.UnionType(types=types):
            yield from (("", one) for one in types)
        case inspect.TupleType(item_types=types):
            yield from ((f" {number}", one) for number, one in enumerate(types))
        case inspect.DictType(key_type=key, value_type=value):
            yield from ((" key", key), (" value", value))
        case (
            inspect.ListType(item_type=item)
            | inspect.VarTupleType(item_type=item)
            | inspect.SetType(item_type=item)
            | inspect.FrozenSetType(item_type=item)
        ):
            yield " item", item
        case _:
            pass


def unbounded(kinds: typing.Iterable[type[msgspec.Struct]]) -> set[str]:
    """Fields and parts of fields, of these structs and all in them."""
    left: list[tuple[str, inspect.Type]] = [("", inspect.type_info(kind)) for kind in kinds]
    seen: set[type] = set()
    bad: set[str] = set()
    while left:
        path, found = left.pop()
        if not bounded(found):
            bad.add(path)
        if isinstance(found, inspect.StructType) and found.cls not in seen:
            seen.add(found.cls)
            left += [(f"{found.cls.__name__}.{field.name}", field.type) for field in found.fields]
        left += [(path + part, one) for part, one in inside(found)]
    return bad


def test_all_that_crosses_the_wire_has_bounds() -> None:
    """Both ways: a reason above that no field needs any more fails too."""
    assert unbounded(SENT) == set(WITHOUT)


class _Part(msgspec.Struct):
    low: typing.Annotated[int, msgspec.Meta(ge=0)]
    high: typing.Annotated[float, msgspec.Meta(lt=1)]
    good: typing.Annotated[int, msgspec.Meta(gt=0, lt=9)] | None = None


class _Whole(msgspec.Struct):
    parts: tuple[_Part, ...]
    table: typing.Annotated[
        dict[str, typing.Annotated[set[int], msgspec.Meta(max_length=2)]], msgspec.Meta(max_length=2)
    ]
    pair: tuple[bool, bytes]
    anything: object


def test_a_field_without_bounds_is_found_wherever_it_is() -> None:
    assert unbounded([_Whole]) == {
        "_Whole.parts",
        "_Part.low",
        "_Part.high",
        "_Whole.table key",
        "_Whole.table value item",
        "_Whole.pair 1",
        "_Whole.anything",
    }


OPENING = {"phase": {"round": 1, "attempt": 0, "number": 0}, "clients": 1, "samples": 1, "durable_round": -1}


def opened(**changed: object) -> dict[str, object]:
    body = {"type": "PhaseOpened", "opening": {**OPENING, **changed}, "tasks": [[0, 1]]}
    return {"type": "ToExecutor", "run": "r", "body": body}


@pytest.mark.parametrize(
    ("frame", "where"),
    [
        (opened(phase={"round": -1}), "body.opening.phase.round"),
        (opened(phase={"round": 1, "attempt": -1}), "body.opening.phase.attempt"),
        (opened(phase={"round": 1, "number": -1}), "body.opening.phase.number"),
        (opened(clients=-1), "body.opening.clients"),
        (opened(samples=1 << 60), "body.opening.samples"),
        (opened(durable_round=-2), "body.opening.durable_round"),
        ({"type": "Heartbeat", "run": "r" * 65}, "run"),
    ],
)
def test_a_number_out_of_bounds_is_no_message(frame: dict[str, object], where: str) -> None:
    with pytest.raises(PeerError, match=rf"at `\$\.{where}`"):
        decode_message(memoryview(msgspec.msgpack.encode(frame)))


def test_the_same_frame_within_bounds_is_one() -> None:
    decode_message(memoryview(msgspec.msgpack.encode(opened())))
