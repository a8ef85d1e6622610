import importlib.metadata
from importlib.metadata import EntryPoint

import msgspec
import pytest
import torch

from isthmus.data import ColumnSpec, DataSpec, dataset_kinds, load_dataset
from isthmus.errors import UserError


class Counting:
    """A third party's data set."""

    def __init__(self, options: dict[str, int], split: str) -> None:
        self.columns = {"x": ColumnSpec(dtype="int64")}
        self.size = options["size"]
        self.fingerprint = f"{split}{self.size}"

    def __len__(self) -> int:
        return self.size

    def batch(self, indices, columns):
        return {name: torch.tensor(list(indices)) for name in columns}


def not_a_dataset(options: dict[str, int], split: str) -> str:
    return f"{options} {split}"


@pytest.fixture
def registered(monkeypatch):
    entries = [
        EntryPoint("counting", f"{__name__}:Counting", "isthmus.datasets"),
        EntryPoint("broken", "nowhere.at_all:load", "isthmus.datasets"),
        EntryPoint("wrong", f"{__name__}:not_a_dataset", "isthmus.datasets"),
        EntryPoint("constant", "math:pi", "isthmus.datasets"),
        EntryPoint("digits", f"{__name__}:Counting", "isthmus.datasets"),
    ]
    monkeypatch.setattr(
        importlib.metadata, "entry_points", lambda *, group: [entry for entry in entries if entry.group == group]
    )


def test_kinds():
    assert {"text", "pairs", "npz", "digits"} <= set(dataset_kinds())


def test_third_party_kind(registered):
    assert "counting" in dataset_kinds()
    data = load_dataset(DataSpec(kind="counting", options={"size": 3}), "heldout")
    assert (len(data), data.fingerprint) == (3, "heldout3")
    assert len(load_dataset(DataSpec(kind="digits"), "train")) > 1000  # a built-in cannot be replaced


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("broken", r"isthmus\.datasets entry 'broken' \(nowhere\.at_all:load\) cannot be loaded"),
        ("wrong", "data kind 'wrong': str has no columns, fingerprint, batch"),
        ("constant", "expected a callable"),
        ("countin", "unknown data kind 'countin': did you mean 'counting'"),
    ],
)
def test_third_party_mistakes(registered, kind, message):
    with pytest.raises(UserError, match=message):
        load_dataset(DataSpec(kind=kind, options={"size": 1}), "train")


def test_unknown_split():
    with pytest.raises(UserError, match="unknown split 'heldoutt': did you mean 'heldout'"):
        load_dataset(DataSpec(kind="digits"), "heldoutt")


def test_spec_is_read_from_json():
    spec = msgspec.json.decode(b'{"kind": "digits", "options": {"flat": true}}', type=DataSpec)
    assert load_dataset(spec, "train").columns["pixel_values"].shape == (64,)
    assert msgspec.json.decode(msgspec.json.encode(spec), type=DataSpec) == spec
