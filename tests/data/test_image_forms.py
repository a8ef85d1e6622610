"""What an image becomes, whatever its file holds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.data.pictures import drawing, load, save

from isthmus.errors import StepError


def pixels(path: Path, **options: object) -> np.ndarray:
    """float32 [channels, height, width] of the one image in a folder."""
    data = load("image-folder", path.parent.parent, holdout=0, **options)
    return data.batch([0], ["pixel_values"])["pixel_values"][0].numpy()


@pytest.fixture
def at(tmp_path: Path) -> Path:
    return tmp_path / "class" / "image.png"


def levels(found: np.ndarray) -> list[int]:
    return np.rint(found * 255).astype(int).ravel().tolist()


def test_grey_becomes_three_equal_channels_and_colour_becomes_grey(at: Path) -> None:
    grey = save(at, drawing(1, channels=1))
    found = pixels(grey)
    assert (
        found.shape == (3, 8, 8)
        and (found == found[0]).all()
        and (found[0] == drawing(1, channels=1) / np.float32(255)).all()
    )
    assert np.array_equal(pixels(grey, mode="L")[0], drawing(1, channels=1).astype(np.float32) / np.float32(255))
    colour = save(at, np.full((1, 1, 3), (255, 0, 0), dtype=np.uint8))
    assert levels(pixels(colour, mode="L")) == [76], "299/1000 of red: ITU-R 601"


def test_alpha_is_dropped_laid_on_a_colour_or_kept(at: Path) -> None:
    save(at, np.array([[[200, 100, 50, 0], [200, 100, 50, 255]]], dtype=np.uint8))
    assert levels(pixels(at)[:, 0, 0]) == [200, 100, 50]
    on_white = pixels(at, background=[255, 255, 255])
    assert levels(on_white[:, 0, 0]) == [255, 255, 255] and levels(on_white[:, 0, 1]) == [200, 100, 50]
    assert levels(pixels(at, mode="L", background=[0, 0, 0]))[0] == 0
    assert levels(pixels(at, mode="RGBA")[:, 0, 0]) == [200, 100, 50, 0]


def test_palettes_become_their_colours_with_their_transparency(at: Path) -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 40, 50, 60])
    image.putdata([0, 1])
    at.parent.mkdir()
    image.save(at, transparency=1)
    assert levels(pixels(at)[:, 0, 0]) == [10, 20, 30] and levels(pixels(at)[:, 0, 1]) == [40, 50, 60]
    assert levels(pixels(at, background=[1, 2, 3])[:, 0, 1]) == [1, 2, 3]


def test_cmyk_is_converted(at: Path) -> None:
    image = Image.new("CMYK", (4, 4), (0, 255, 255, 0))
    at.parent.mkdir()
    image.save(at.with_suffix(".tif"))
    assert levels(pixels(at)[:, 0, 0]) == [255, 0, 0]


def test_sixteen_bits_are_kept_or_scaled_not_clipped(at: Path) -> None:
    values = np.array([[0, 256, 32768, 65535]], dtype=np.uint16)
    save(at, values)
    assert np.array_equal(pixels(at, mode="I;16")[0], values.astype(np.float32) / np.float32(65535))
    assert levels(pixels(at, mode="L")) == [0, 1, 128, 255]
    assert pixels(at).shape == (3, 1, 4)
    save(at, drawing(2, channels=1))
    assert np.array_equal(pixels(at, mode="I;16"), pixels(at, mode="L")), "8 bits are the same fractions"
    resized = pixels(at, mode="I;16", transforms=[{"name": "Resize", "size": 4}, {"name": "Pad", "padding": 1}])
    assert resized.shape == (1, 6, 6) and resized[0, 1:-1, 1:-1].std() > 0 and not resized[0, 0].any()


def test_fractions_are_refused(at: Path) -> None:
    at.parent.mkdir()
    Image.fromarray(np.ones((2, 2), dtype=np.float32)).save(at.with_suffix(".tif"))
    with pytest.raises(StepError, match="it holds fractions, expected 8 or 16 bits"):
        pixels(at)


def test_photographs_are_turned_upright_unless_told_otherwise(at: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees clockwise
    save(at.with_suffix(".png"), drawing(3, 2, 5), exif=exif)
    assert pixels(at).shape == (3, 5, 2) and pixels(at, exif_orientation=False).shape == (3, 2, 5)
    assert np.array_equal(pixels(at), np.rot90(pixels(at, exif_orientation=False), -1, axes=(1, 2)))


def test_of_several_frames_the_first(at: Path) -> None:
    at.parent.mkdir()
    frames = [Image.new("L", (2, 2), level) for level in (10, 200)]
    frames[0].save(at.with_suffix(".gif"), save_all=True, append_images=frames[1:])
    assert levels(pixels(at, mode="L")) == [10] * 4


def test_jpeg_comes_close(at: Path) -> None:
    smooth = np.tile(np.arange(0, 240, 15, dtype=np.uint8), (16, 1))
    save(at.with_suffix(".jpeg"), np.stack([smooth] * 3, axis=-1), quality=95)
    assert np.abs(pixels(at)[0] * 255 - smooth).max() < 8
