"""LEAF's FEMNIST files: writers as clients, and all samples as one set."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.data.pictures import everything, load

from isthmus.data.leaf import LeafClients, LeafOptions
from isthmus.errors import UserError

KIND = "leaf-femnist"
SIDE = 4


def writer(name: str, count: int) -> dict[str, object]:
    draws = np.random.default_rng(sum(name.encode()))
    x = (draws.integers(0, 256, (count, SIDE * SIDE)) / 255).tolist()
    return {"x": x, "y": draws.integers(0, 62, count).tolist()}


def write(path: Path, sizes: dict[str, int], **also: object) -> dict[str, dict[str, object]]:
    """As LEAF's scripts do. Returns user_data."""
    data = {name: writer(name, count) for name, count in sizes.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    tables = {"users": list(sizes), "num_samples": list(sizes.values()), "user_data": data, **also}
    path.write_text(json.dumps(tables))
    return data


def pixels(data: dict[str, object]) -> torch.Tensor:
    return torch.tensor(data["x"], dtype=torch.float32).view(-1, 1, SIDE, SIDE)


@pytest.fixture
def divided(tmp_path: Path) -> dict[str, dict[str, object]]:
    """Files as `preprocess.sh` leaves them; a writer's samples are in both parts."""
    found = write(tmp_path / "train" / "all_data_0_train_9.json", {"f00_1": 3, "f00_2": 5}, hierarchies=["a", "b"])
    found |= write(tmp_path / "train" / "all_data_1_train_9.json", {"f10_9": 2, "none": 0})
    write(tmp_path / "test" / "all_data_0_test_9.json", {"f00_1": 1, "f00_2": 2})
    return found


def test_a_client_is_a_writer(divided: dict[str, dict[str, object]], tmp_path: Path) -> None:
    clients = LeafClients(LeafOptions(path=str(tmp_path), side=SIDE))
    assert clients.sizes.tolist() == [3, 5, 2]
    assert clients.columns["pixel_values"].shape == (1, SIDE, SIDE) and clients.columns["labels"].limit == 62
    for number, name in enumerate(("f00_1", "f00_2", "f10_9")):
        found = clients.load(number)
        assert (
            torch.equal(found["pixel_values"], pixels(divided[name])) and found["labels"].tolist() == divided[name]["y"]
        )
    both = clients.load_many([2, 0])
    assert torch.equal(both["pixel_values"], torch.cat([pixels(divided[n]) for n in ("f10_9", "f00_1")]))


def test_a_writer_in_two_files_is_one_client(tmp_path: Path) -> None:
    first = write(tmp_path / "train" / "a.json", {"w": 3, "v": 2})
    second = write(tmp_path / "train" / "b.json", {"u": 1, "w": 4})
    write(tmp_path / "test" / "a.json", {"w": 1})
    clients = LeafClients(LeafOptions(path=str(tmp_path), side=SIDE))
    assert clients.sizes.tolist() == [7, 2, 1]
    found = clients.load(0)
    assert torch.equal(found["pixel_values"], torch.cat([pixels(first["w"]), pixels(second["w"])]))
    assert found["labels"].tolist() == [*first["w"]["y"], *second["w"]["y"]]
    data = load(KIND, tmp_path, side=SIDE)
    assert everything(data)["labels"].tolist() == [
        label for number in range(3) for label in clients.load(number)["labels"].tolist()
    ]


@pytest.mark.parametrize("listed", [True, False], ids=["listed twice", "listed once"])
def test_a_key_twice_in_one_file_loses_no_sample(listed: bool, tmp_path: Path) -> None:
    """JSON's readers keep the last one only."""
    parts = [writer(name, count) for name, count in (("first", 2), ("v", 3), ("last", 4))]
    entries = ", ".join(f"{name}: {json.dumps(part)}" for name, part in zip(('"w"', '"v"', '"w"'), parts, strict=True))
    users, counts = (["w", "v", "w"], [2, 3, 4]) if listed else (["w", "v"], [6, 3])
    tables = {"users": users, "num_samples": counts}
    (tmp_path / "a.json").write_text(f'{json.dumps(tables)[:-1]}, "user_data": {{{entries}}}}}')
    clients = LeafClients(LeafOptions(path=str(tmp_path), side=SIDE, holdout=0))
    assert clients.sizes.tolist() == [6, 3]
    assert clients.load(0)["labels"].tolist() == [*parts[0]["y"], *parts[2]["y"]]
    assert clients.load(1)["labels"].tolist() == parts[1]["y"]


def test_names_of_writers_may_hold_any_letters(tmp_path: Path) -> None:
    names = ['a "b" {c}', "d, é: \\", "}"]
    data = write(tmp_path / "a.json", dict.fromkeys(names, 2))
    clients = LeafClients(LeafOptions(path=str(tmp_path), side=SIDE, holdout=0))
    assert [clients.load(number)["labels"].tolist() for number in range(3)] == [data[name]["y"] for name in names]


def test_all_samples_are_a_data_set(divided: dict[str, dict[str, object]], tmp_path: Path) -> None:
    data = load(KIND, tmp_path, side=SIDE)
    found = everything(data)
    whole = torch.cat([pixels(divided[name]) for name in ("f00_1", "f00_2", "f10_9")])
    assert torch.equal(found["pixel_values"], whole) and len(data) == 10
    assert torch.equal(data.batch([9, 0, 4, 9], ["pixel_values"])["pixel_values"], whole[[9, 0, 4, 9]])
    assert data.batch([3], ["labels"])["labels"].tolist() == [divided["f00_2"]["y"][0]]
    assert len(load(KIND, tmp_path, "heldout", side=SIDE)) == 3
    assert data.fingerprint != load(KIND, tmp_path, "heldout", side=SIDE).fingerprint


@pytest.mark.parametrize("folder", [".", "all_data", "train"])
def test_without_a_test_folder_writers_are_held_out(folder: str, tmp_path: Path) -> None:
    write(tmp_path / folder / "all_data_0.json", {f"w{k}": k + 1 for k in range(10)})
    parts = [load(KIND, tmp_path, split, side=SIDE, holdout=0.3) for split in ("train", "heldout")]
    assert sum(len(part) for part in parts) == 55
    assert len(LeafClients(LeafOptions(path=str(tmp_path), side=SIDE, holdout=0.3)).sizes) == 7


def test_other_fractions_than_of_255_are_kept(tmp_path: Path) -> None:
    data = {"w": {"x": [[0.1234567] * SIDE**2], "y": [1]}}
    (tmp_path / "a.json").write_text(json.dumps({"users": ["w"], "num_samples": [1], "user_data": data}))
    found = everything(load(KIND, tmp_path, side=SIDE, holdout=0))["pixel_values"]
    assert torch.equal(found, torch.full((1, 1, SIDE, SIDE), 0.1234567))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.pop("users"), "is no file of LEAF's: .*missing required field `users`"),
        (lambda d: d["num_samples"].append(3), "got 1 users and 2 num_samples"),
        (lambda d: d["users"].__setitem__(0, "v"), "user_data has 'w', users has not"),
        (lambda d: d["num_samples"].__setitem__(0, 3), "user 'w' has 2 x and 2 y, expected 3 as num_samples says"),
        (lambda d: d["user_data"]["w"]["x"][1].pop(), r"user 'w': got 15 pixels, expected 16 \(option 'side'\)"),
        (lambda d: d["user_data"]["w"]["y"].__setitem__(0, 62), r"got labels of \d+ to 62, expected 0 to 61"),
        (lambda d: d["user_data"]["w"]["x"][1].__setitem__(0, 5.0), "user 'w': got pixels of .* to 5, expected 0 to 1"),
        (lambda d: d["user_data"]["w"]["x"][1].__setitem__(0, -1), "user 'w': got pixels of -1 to .*, expected 0 to 1"),
        (lambda d: d["user_data"]["w"]["x"].__setitem__(0, "a text"), "user 'w': cannot be read"),
    ],
)
def test_files_that_are_not_leafs(change, message: str, tmp_path: Path) -> None:
    write(tmp_path / "a.json", {"w": 2})
    tables = json.loads((tmp_path / "a.json").read_text())
    change(tables)
    (tmp_path / "a.json").write_text(json.dumps(tables))
    with pytest.raises(UserError, match=message):
        everything(load(KIND, tmp_path, side=SIDE, holdout=0))
    with pytest.raises(UserError, match=r"has no .json files"):
        (tmp_path / "empty").mkdir()
        load(KIND, tmp_path / "empty")
