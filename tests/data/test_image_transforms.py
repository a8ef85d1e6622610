"""Transforms mean what torchvision's of the same names do, and random ones depend on (seed, epoch, sample) alone."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tests.data.pictures import drawing, load, picture_folder

from isthmus.data import SampleOrder
from isthmus.data.dataset import batch_at
from isthmus.data.images.decoding import pixels
from isthmus.data.images.pipeline import read_pipeline
from isthmus.errors import StepError, UserError
from isthmus.rng import stream

FLIP = {"name": "RandomHorizontalFlip"}


def through(image: np.ndarray, *tables: dict[str, object], mode: str = "RGB", seed: int = 0) -> np.ndarray:
    """float32 [channels, height, width]"""
    return read_pipeline(tables, mode, "transforms")(Image.fromarray(image), stream(seed, "augment"))


def plain(image: np.ndarray) -> np.ndarray:
    return pixels(Image.fromarray(image))


@pytest.mark.parametrize(
    ("size", "options", "expected"),
    [
        ((10, 20), {"size": 5}, (5, 10)),
        ((20, 10), {"size": 5}, (10, 5)),
        ((7, 10), {"size": 5}, (5, 7)),  # 7.14 is cut, as torchvision does
        ((10, 20), {"size": [3, 4]}, (3, 4)),
        ((10, 40), {"size": 5, "max_size": 10}, (2, 10)),
    ],
)
def test_resize(size: tuple[int, int], options: dict[str, object], expected: tuple[int, int]) -> None:
    image = drawing(0, *size)
    found = through(image, {"name": "Resize", **options})
    assert found.shape == (3, *expected)
    assert np.array_equal(found, plain(np.asarray(Image.fromarray(image).resize(expected[::-1], Image.BILINEAR))))


def test_center_crop_cuts_the_middle_and_pads_what_is_missing() -> None:
    image = drawing(1, 7, 8)
    assert np.array_equal(through(image, {"name": "CenterCrop", "size": [3, 4]}), plain(image)[:, 2:5, 2:6])
    found = through(image, {"name": "CenterCrop", "size": 10})
    assert np.array_equal(found[:, 1:8, 1:9], plain(image)) and found.sum() == pytest.approx(
        plain(image).sum(), rel=1e-5
    )


def test_pad() -> None:
    image = drawing(2, 4, 5)
    padded = through(image, {"name": "Pad", "padding": [1, 2, 3, 4], "fill": 51})
    assert padded.shape == (3, 10, 9) and np.array_equal(padded[:, 2:6, 1:6], plain(image))
    assert np.allclose(padded[:, :2], 0.2) and np.allclose(padded[:, :, :1], 0.2)
    reflected = through(image, {"name": "Pad", "padding": [1, 2], "padding_mode": "reflect"})
    assert np.array_equal(reflected, np.pad(plain(image), [(0, 0), (2, 2), (1, 1)], "reflect"))


def test_random_crops_are_windows_and_every_window_comes() -> None:
    image = drawing(3, 4, 5)
    seen = set()
    for seed in range(60):
        found = through(image, {"name": "RandomCrop", "size": [3, 4]}, seed=seed)
        (place,) = [
            (y, x) for y in range(2) for x in range(2) if np.array_equal(found, plain(image)[:, y : y + 3, x : x + 4])
        ]
        seen.add(place)
    assert len(seen) == 4
    with pytest.raises(ValueError, match=r"got 4 x 5 pixels .* expected at least 6 x 5"):
        through(image, {"name": "RandomCrop", "size": [6, 5]})
    assert through(image, {"name": "RandomCrop", "size": [6, 5], "padding": 1}).shape == (3, 6, 5)
    assert through(image, {"name": "RandomCrop", "size": 9, "pad_if_needed": True}).shape == (3, 9, 9)


def test_random_resized_crops_keep_to_their_area_and_ratio() -> None:
    rows, columns = np.mgrid[0:200, 0:200]
    image = np.stack([rows, columns, rows], axis=-1).astype(np.uint8)  # a pixel says where it is
    for seed in range(40):
        options = {"size": 50, "scale": [0.1, 0.5], "ratio": [0.5, 2], "interpolation": "nearest"}
        found = through(image, {"name": "RandomResizedCrop", **options}, seed=seed) * 255
        height, width = (np.ptp(found[k]) * 50 / 49 for k in (0, 1))
        assert 0.09 < height * width / 200**2 < 0.52 and 0.45 < width / height < 2.2
    wide = drawing(4, 4, 400)
    whole = {"name": "RandomResizedCrop", "size": 4, "scale": [1, 1], "interpolation": "nearest"}
    assert through(wide, whole).shape == (3, 4, 4), "no such crop: the middle of the allowed ratio"


@pytest.mark.parametrize(("name", "axis"), [("RandomHorizontalFlip", 2), ("RandomVerticalFlip", 1)])
def test_flips_happen_as_often_as_they_should(name: str, axis: int) -> None:
    image = drawing(5)
    flipped = [np.array_equal(through(image, {"name": name}, seed=s), np.flip(plain(image), axis)) for s in range(400)]
    assert abs(sum(flipped) - 200) < 4 * math.sqrt(100)
    assert np.array_equal(through(image, {"name": name, "p": 1}), np.flip(plain(image), axis))
    assert np.array_equal(through(image, {"name": name, "p": 0}), plain(image))


def test_normalize_is_last_and_a_number_per_channel() -> None:
    image = drawing(6)
    table = {"name": "Normalize", "mean": [0.1, 0.2, 0.3], "std": [0.5, 1, 2]}
    expected = (torch.from_numpy(plain(image)) - torch.tensor([0.1, 0.2, 0.3])[:, None, None]).div(
        torch.tensor([0.5, 1, 2])[:, None, None]
    )
    assert np.array_equal(through(image, table), expected.numpy())
    assert through(drawing(6, channels=1), {"name": "Normalize", "mean": [0.5], "std": [1]}, mode="L").shape == (
        1,
        8,
        8,
    )


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ([{"size": 3}], "option 'transforms', transform 1: got None as name"),
        ([{"name": "Resize"}], r"transform 1 \(Resize\): .*missing required field `size`"),
        ([{"name": "Resize", "size": 0}], "size: got 0, expected 1 to 8192"),
        ([{"name": "Resize", "size": [1, 2, 3]}], r"\(Resize\)"),
        ([{"name": "Resize", "size": 8, "interpolation": "bilinar"}], "did you mean 'bilinear'"),
        ([{"name": "Resize", "size": 8, "max_size": 8}], "max_size: expected more than size"),
        (
            [FLIP, {"name": "RandomCrop", "size": 8, "pading": 1}],
            r"transform 2 \(RandomCrop\) option 'pading': did you",
        ),
        ([{"name": "RandomCrop", "size": 8, "padding": [1, 2, 3]}], "padding: got 3 numbers, expected 1 or 2 or 4"),
        ([{"name": "RandomHorizontalFlip", "p": 1.5}], "'p'"),
        ([{"name": "RandomResizedCrop", "size": 8, "scale": [0.5, 0.1]}], "expected the smaller number first"),
        ([{"name": "Normalize", "mean": [0, 0], "std": [1, 1]}], "got 2 numbers, expected 3 for mode 'RGB'"),
        ([{"name": "Normalize", "mean": [0], "std": [0]}], "got mean 0 and std 0, expected finite numbers"),
        ([{"name": "Normalize", "mean": [0], "std": [1e-60]}], "got mean 0 and std 0, expected finite numbers"),
        ([{"name": "Normalize", "mean": [0], "std": [math.nan]}], "got mean 0 and std nan, expected finite numbers"),
        ([{"name": "Normalize", "mean": [1e60], "std": [1]}], "got mean inf and std 1, expected finite numbers"),
        ([{"name": "RandomResizedCrop", "size": 8, "scale": [0, 0]}], "expected a part with an area"),
        ([{"name": "RandomResizedCrop", "size": 8, "ratio": [1, math.inf]}], "expected a part with an area"),
        ([{"name": "Normalize", "mean": [0], "std": [1]}, FLIP], "got 'RandomHorizontalFlip' after 'Normalize'"),
        ([{"name": "ToTensor"}], "become float32 of 0 to 1 by themselves"),
        (
            [{"name": "RandomHorizontalFlop"}],
            "transform 1: unknown transform 'RandomHorizontalFlop': did you mean 'Rand",
        ),
    ],
)
def test_mistakes_are_named(tables: list[dict[str, object]], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_pipeline(tables, "RGB", "transforms")


def test_an_image_that_cannot_go_through_is_named(tmp_path: Path) -> None:
    picture_folder(tmp_path, classes=1)
    data = load("image-folder", tmp_path, holdout=0, transforms=[{"name": "RandomCrop", "size": 9}])
    with pytest.raises(StepError, match=r"class-0/0.png \(sample 0\): RandomCrop: got 8 x 8 pixels"):
        _ = data.columns
    data = load("image-folder", tmp_path, holdout=0, transforms=[{"name": "Pad", "padding": 8192}] * 2)
    with pytest.raises(StepError, match=r"a transform makes .* pixels, expected at most"):
        _ = data.columns


def test_what_is_drawn_depends_on_seed_epoch_and_sample_alone(tmp_path: Path) -> None:
    picture_folder(tmp_path, classes=2, each=5)
    crop = {"name": "RandomCrop", "size": 6}
    options = {"holdout": 0, "transforms": [crop, FLIP]}
    data, again = load("image-folder", tmp_path, **options), load("image-folder", tmp_path, **options)
    order = SampleOrder(10, seed=3)
    names = ["pixel_values", "labels"]
    whole = batch_at(data, order, 0, 40, names)
    parts = [batch_at(again, order, start, 5, names) for start in (35, 0, 15, 25, 5, 30, 10, 20)]
    for k, start in enumerate((35, 0, 15, 25, 5, 30, 10, 20)):
        assert torch.equal(parts[k]["pixel_values"], whole["pixel_values"][start : start + 5])
    samples = order.indices(0, 40)
    views = [whole["pixel_values"][np.flatnonzero(samples == 4)[epoch]] for epoch in range(4)]
    assert len({tuple(view.flatten().tolist()) for view in views}) > 1, "another epoch, another view"
    other = batch_at(data, SampleOrder(10, seed=4, shuffle=False), 0, 10, names)
    same = batch_at(data, SampleOrder(10, seed=3, shuffle=False), 0, 10, names)
    assert not torch.equal(other["pixel_values"], same["pixel_values"])
    assert torch.equal(data.batch(range(10), names)["pixel_values"], again.batch(range(10), names)["pixel_values"])


def test_nothing_else_draws_from_the_same_numbers(tmp_path: Path) -> None:
    picture_folder(tmp_path, classes=1)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    data = load("image-folder", tmp_path, holdout=0, transforms=[{"name": "RandomCrop", "size": 6}])
    data.batch(range(4), ["pixel_values"])
    assert torch.equal(torch.get_rng_state(), before[0]) and np.array_equal(np.random.get_state()[1], before[1])


def test_held_out_images_go_through_the_same_without_chance(tmp_path: Path) -> None:
    picture_folder(tmp_path, classes=1, each=10, height=10, width=12)
    normalize = {"name": "Normalize", "mean": [0.5], "std": [0.5]}
    pairs = [
        ([{"name": "RandomCrop", "size": 6, "padding": 2}, FLIP], [{"name": "CenterCrop", "size": 6}]),
        (
            [{"name": "RandomResizedCrop", "size": [4, 5]}],
            [{"name": "Resize", "size": 5}, {"name": "CenterCrop", "size": [4, 5]}],
        ),
    ]
    for random, central in pairs:
        held = load("image-folder", tmp_path, "heldout", holdout=0.4, transforms=[*random, normalize])
        told = load(
            "image-folder",
            tmp_path,
            "heldout",
            holdout=0.4,
            transforms=random,
            heldout_transforms=[*central, normalize],
        )
        assert torch.equal(*(d.batch(range(4), ["pixel_values"])["pixel_values"] for d in (held, told)))


CASES = [
    {"name": "Resize", "size": 7},
    {"name": "Resize", "size": [9, 4], "interpolation": "bicubic"},
    {"name": "Resize", "size": 6, "max_size": 7},
    {"name": "CenterCrop", "size": [5, 9]},
    {"name": "CenterCrop", "size": 15},
    {"name": "Pad", "padding": [1, 2], "fill": 7},
    {"name": "Pad", "padding": [1, 2, 3, 1], "padding_mode": "symmetric"},
    {"name": "RandomHorizontalFlip", "p": 1},
    {"name": "RandomVerticalFlip", "p": 1},
    {"name": "RandomCrop", "size": [11, 10], "padding": [0, 0, 0, 0]},
]
"""Of an image of 11 x 10 pixels, none leaves anything to chance."""


def torchvision_v2():
    try:
        from torchvision.transforms import v2  # noqa: PLC0415
    except Exception as e:
        pytest.skip(f"torchvision cannot be imported: {type(e).__name__}")
    return v2


@pytest.mark.parametrize("table", CASES, ids=lambda t: t["name"])
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_they_equal_torchvisions_bit_for_bit(table: dict[str, object], channels: int) -> None:
    v2 = torchvision_v2()
    image = drawing(8, 11, 10, channels)
    options = {name: value for name, value in table.items() if name != "name"}
    theirs = getattr(v2, str(table["name"]))(**options)(Image.fromarray(image))
    assert np.array_equal(through(image, table, mode={1: "L", 3: "RGB", 4: "RGBA"}[channels]), pixels(theirs))


def test_other_transforms_of_torchvisions_draw_from_the_samples_own_numbers(tmp_path: Path) -> None:
    torchvision_v2()
    picture_folder(tmp_path, classes=1)
    options = {"holdout": 0, "transforms": [{"name": "ColorJitter", "brightness": 0.9}, FLIP]}
    data, again = (load("image-folder", tmp_path, **options) for _ in range(2))
    before = torch.get_rng_state()
    found = data.batch([0, 1, 2], ["pixel_values"])["pixel_values"]
    assert torch.equal(again.batch([2], ["pixel_values"])["pixel_values"][0], found[2])
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(UserError, match="'heldout_transforms': missing"):
        load("image-folder", tmp_path, "heldout", transforms=options["transforms"])
    with pytest.raises(UserError, match="unknown transform 'ColorJiter': did you mean 'ColorJitter'"):
        load("image-folder", tmp_path, transforms=[{"name": "ColorJiter"}])
    with pytest.raises(UserError, match="transform 'ColorJitter': "):
        load("image-folder", tmp_path, transforms=[{"name": "ColorJitter", "colour": 1}])
