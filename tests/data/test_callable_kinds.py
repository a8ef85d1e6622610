"""A data set as `package.module:callable`, as models are."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from isthmus.data import ColumnSpec, DataSpec, SampleOrder, load_dataset
from isthmus.data.dataset import batch_at
from isthmus.errors import StepError, UserError


class Whole:
    """Everything that a data set needs."""

    columns = {"x": ColumnSpec(dtype="int64")}  # noqa: RUF012

    def __init__(self, split: str, size: int = 3) -> None:
        self.size = size
        self.fingerprint = f"{split}{size}"

    def __len__(self) -> int:
        return self.size

    def batch(self, indices, columns):
        return {name: torch.tensor(list(indices)) for name in columns}


class Mapped(torch.utils.data.Dataset):
    """As people write them: noise from whichever generator is at hand."""

    def __init__(self, size: int, noise: bool = True) -> None:
        self.size = size
        self.noise = noise

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, sample: int):
        noise = torch.rand(2) + np.random.rand() + random.random() if self.noise else 0
        return {"x": torch.full((2,), float(sample)) + noise, "labels": sample % 2, "weight": 0.5}


def mapped(split: str, size: int = 6, noise: bool = True) -> Mapped:
    return Mapped(size if split == "train" else 2, noise)


def ragged(split: str) -> list[dict[str, object]]:
    return [{"x": [1, 2]}, {"x": [1, 2, 3]}, {"y": 1}, {"x": [0.5, 1.5]}]


def columns(split: str, rows: int = 3) -> dict[str, object]:
    return {"x": torch.arange(rows), "weight": [0.5] * rows}


def pairs(split: str) -> list[tuple[int, int]]:
    return [(1, 2)]


def failing(split: str) -> None:
    raise RuntimeError("no such\nserver")


def with_path(split: str, path: str) -> Mapped:
    return Mapped(len(path))


def nothing(split: str) -> int:
    return 3


def spec(name: str, **options: object) -> DataSpec:
    return DataSpec(kind=f"{__name__}:{name}", options=options)


def test_a_data_set_of_ours_is_taken_as_it_is() -> None:
    data = load_dataset(spec("Whole", size=5), "heldout")
    assert isinstance(data, Whole) and (len(data), data.fingerprint) == (5, "heldout5")


def test_a_map_style_set_has_the_columns_of_its_first_sample() -> None:
    data = load_dataset(spec("mapped", noise=False), "train")
    assert data.columns == {
        "x": ColumnSpec(dtype="float32", shape=(2,)),
        "labels": ColumnSpec(dtype="int64"),
        "weight": ColumnSpec(dtype="float32"),
    }
    found = data.batch([4, 1], ["x", "labels"])
    assert found["x"].tolist() == [[4, 4], [1, 1]] and found["labels"].tolist() == [0, 1]
    assert len(load_dataset(spec("mapped"), "heldout")) == 2
    assert data.fingerprint == load_dataset(spec("mapped", noise=False), "train").fingerprint
    assert data.fingerprint != load_dataset(spec("mapped", noise=False, size=7), "train").fingerprint
    with pytest.raises(UserError, match="unknown column 'label': did you mean 'labels'"):
        data.batch([0], ["label"])


def test_what_its_samples_draw_is_of_seed_epoch_and_sample() -> None:
    data, again = (load_dataset(spec("mapped"), "train") for _ in range(2))
    order = SampleOrder(6, seed=1)
    before = torch.get_rng_state(), random.getstate()
    whole = batch_at(data, order, 0, 12, ["x"])["x"]
    torch.manual_seed(5), random.seed(5)
    kept = torch.get_rng_state(), random.getstate()
    assert torch.equal(batch_at(again, order, 7, 3, ["x"])["x"], whole[7:10])
    assert torch.equal(torch.get_rng_state(), kept[0]) and random.getstate() == kept[1]
    assert len({tuple(row) for row in (whole % 1).tolist()}) == 12
    assert data.fingerprint == again.fingerprint
    torch.set_rng_state(before[0]), random.setstate(before[1])


def test_columns_are_a_data_set_as_in_python() -> None:
    data = load_dataset(DataSpec(kind=f"{__name__}:columns"), "train")
    assert len(data) == 3 and list(data.columns) == ["x", "weight"]
    assert data.batch([2, 0], ["x"])["x"].tolist() == [2, 0]
    with pytest.raises(UserError, match=r"columns': holds no samples"):
        load_dataset(DataSpec(kind=f"{__name__}:columns", options={"rows": 0}), "train")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("Whole", {"sice": 3}, "unknown .*:Whole option 'sice': did you mean 'size'"),
        ("Whole", {"split": "train"}, "got an option 'split', which is train or heldout"),
        ("nowhere", {}, "has no 'nowhere'"),
        ("failing", {}, "RuntimeError: no such server .*test_callable_kinds.py, line"),
        ("nothing", {}, "int has no columns, fingerprint, batch, __len__; a map-style data set has"),
        ("KIND", {}, "has no 'KIND'"),
    ],
)
def test_mistakes_are_named(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        load_dataset(spec(name, **options), "train")
    assert "\n" not in str(caught.value)


def test_a_module_that_is_not_there_and_a_missing_argument() -> None:
    with pytest.raises(UserError, match=r"data kind 'no.such:thing': cannot import no.such"):
        load_dataset(DataSpec(kind="no.such:thing"), "train")
    with pytest.raises(UserError, match="missing a required argument: 'path'"):
        load_dataset(spec("with_path"), "train")
    with pytest.raises(UserError, match="takes no argument 'split', expected one: it is given train or heldout"):
        load_dataset(spec("Mapped", size=3), "train")


def test_samples_that_do_not_fit_are_named() -> None:
    with pytest.raises(UserError, match="sample 0: got tuple, expected a dict of columns"):
        _ = load_dataset(spec("pairs"), "train").columns
    data = load_dataset(spec("ragged"), "train")
    with pytest.raises(StepError, match=r"sample 1: column 'x': got shape \[3\], expected \[2\] as sample 0 has"):
        data.batch([0, 1], ["x"])
    with pytest.raises(StepError, match=r"sample 3: column 'x': got float64, expected int64 as sample 0 has"):
        data.batch([0, 3], ["x"])
    with pytest.raises(StepError, match="sample 2: has no column 'x', sample 0 has"):
        data.batch([2], ["x"])
