"""Which devices may read a job's data, by what they say of them."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import msgspec
import pytest

from isthmus.data import ColumnSpec, DataSpec
from isthmus.data.description import DataDescription
from isthmus.errors import IsthmusError, PeerError, UserError
from isthmus.runtime.coordinator.data_holders import DataHolders, UnequalData, unchanged

GOOD = DataDescription(columns={"x": ColumnSpec(dtype="float32", shape=(4,))}, train=10, digests={"train": "1"})
OTHER = msgspec.structs.replace(GOOD, digests={"train": "2"})
MISSING = UserError("device 'c': no file")


class Answers:
    """Devices that say what they are told to; digests are equal if their last characters are."""

    def __init__(self, said: Mapping[str, DataDescription | IsthmusError], gone: Sequence[str] = ()) -> None:
        self._said = said
        self._gone = gone
        self.asked: list[str] = []
        self.may_answer = threading.Event()
        self.may_answer.set()

    def here(self, devices: Sequence[str], *, every: bool) -> list[str]:
        return [d for d in devices if every or d in self._said]

    def describe(
        self, devices: Sequence[str], data: DataSpec, *, heldout: bool
    ) -> dict[str, DataDescription | IsthmusError]:
        assert self.may_answer.wait(30) and not data.description, "a path of the coordinator's is nobody's business"
        self.asked += devices
        return {device: self._said[device] for device in devices}

    def are_equal(self, one: tuple[str, str], other: tuple[str, str]) -> bool:
        for device, _ in (one, other):
            if device in self._gone:
                raise PeerError(f"device {device!r}: has left")
        return one[1][-1] == other[1][-1]


def holders(asks: Answers, *, alike: bool = True) -> tuple[DataHolders, list[str]]:
    noted: list[str] = []
    data = DataSpec(kind="npz", description="what.json")
    return DataHolders(asks, data, ("a", "b", "c", "d"), heldout=False, alike=alike, note=noted.append), noted


def test_one_that_can_read_them_is_enough_to_begin_with() -> None:
    asks = Answers({"a": GOOD, "c": MISSING})
    found, noted = holders(asks)
    found.ask()
    assert found.described == {"a": GOOD}
    assert noted == ["device 'c': no file; it is given no part that reads data"]
    found.ask(["a"])
    assert asks.asked == ["a", "c"], "who has answered is not asked again"
    with pytest.raises(UserError, match="device 'c': no file"):
        found.ask(["a", "c"])
    with pytest.raises(UserError, match="device 'c': no file"):
        holders(Answers({"c": MISSING}))[0].ask()


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (OTHER, "devices 'a' and 'b' have different training samples"),
        (msgspec.structs.replace(GOOD, train=12), "devices 'a' and 'b' differ: 10 and 12 training samples"),
        (
            msgspec.structs.replace(GOOD, columns={"x": ColumnSpec(dtype="float64", shape=(4,))}),
            "devices 'a' and 'b' differ: column 'x': float32",
        ),
    ],
)
def test_what_differs_names_both(other: DataDescription, words: str) -> None:
    with pytest.raises(UnequalData, match=words):
        holders(Answers({"a": GOOD, "b": other}))[0].ask()


def test_holders_of_their_own_data_may_have_as_many_as_they_like() -> None:
    more = msgspec.structs.replace(OTHER, train=12)
    found, _ = holders(Answers({"a": GOOD, "b": more}), alike=False)
    found.ask(["a", "b"])
    assert found.described == {"a": GOOD, "b": more}
    wrong = msgspec.structs.replace(more, columns={})
    with pytest.raises(UnequalData, match="column 'x'"):
        holders(Answers({"a": GOOD, "b": wrong}), alike=False)[0].ask(["a", "b"])


def test_one_that_comes_late_is_asked_beside_the_work() -> None:
    asks = Answers({"a": GOOD, "b": GOOD, "c": OTHER})
    found, noted = holders(asks)
    found.remember({"a": GOOD})
    asks.may_answer.clear()
    assert found.is_known("a") and found.is_known("nobody's holder")
    assert not found.is_known("b") and not found.is_known("b") and not found.is_known("c")
    asks.may_answer.set()
    deadline = threading.Event()
    while not (found.is_known("b") and found.is_known("c")):
        deadline.wait(0.01)
    assert found.described.keys() == {"a", "b"} and sorted(asks.asked) == ["b", "c"]
    assert len(noted) == 1 and "devices 'a' and 'c' have different training samples" in noted[0]


def test_who_cannot_be_compared_reads_nothing() -> None:
    """Whoever had the data is gone: nobody can tell whether these are the same."""
    found, _ = holders(Answers({"b": GOOD}, gone=["a"]))
    found.remember({"a": GOOD})
    with pytest.raises(PeerError, match="those of device 'b' cannot be compared with others': device 'a': has left"):
        found.ask(["b"])
    found, _ = holders(Answers({"c": GOOD}, gone=["a"]))
    found.remember({"a": GOOD, "b": GOOD})
    found.ask(["c"])
    assert "c" in found.described, "any one that was compared before speaks for the others"


def test_a_checkpoints_data_are_known_again_by_who_had_them() -> None:
    before = {"a": {"train": "x1"}}
    assert unchanged(before, {"a": {"train": "x1"}, "b": {"train": "y1"}})
    assert unchanged(before, {"c": {"train": "x1"}}), "under the same key, as on one machine"
    assert not unchanged(before, {"b": {"train": "y1"}}), "under another key nobody can tell"
    with pytest.raises(UserError, match="resume: data: device 'a' has other training samples"):
        unchanged(before, {"a": {"train": "x2"}})


def test_a_run_of_joined_devices_goes_on_on_one_computer_and_back() -> None:
    """There all devices share one key, so that no digest is that of before: nobody can tell whether the data are."""
    joined, here = {"a": {"train": "x1"}, "b": {"train": "y1"}}, {"a": {"train": "z"}, "b": {"train": "z"}}
    assert not unchanged(joined, here) and not unchanged(here, joined)
    with pytest.raises(UserError, match="has other training samples"):
        unchanged(here, {"a": {"train": "z2"}, "b": {"train": "z2"}})
    with pytest.raises(UserError, match="has other training samples"):
        unchanged(joined, {"a": {"train": "x2"}, "b": {"train": "y2"}})
