"""One encoded image to the form that a data set's pixels have. Pillow decodes; what it refuses names the image.

Only raster formats are decoded. (Pillow knows more: for EPS it starts Ghostscript.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, BinaryIO, Literal

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from isthmus.errors import StepError
from isthmus.extensions import import_extra

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
ENDINGS = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".pbm", ".pnm"})
MOST_PIXELS = 89_478_485
"""Pillow's own limit (`Image.MAX_IMAGE_PIXELS`): beyond it a small file may be meant to fill the memory."""
CHANNELS = {"RGB": 3, "RGBA": 4, "L": 1, "I;16": 1}
_SIXTEEN_BITS = 65535
Mode = Literal["RGB", "RGBA", "L", "I;16"]
Colour = Annotated[int, Meta(ge=0, le=255)]


class PixelOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The form of every image, whatever its file holds. Modes are Pillow's.

    `RGB`: grey is copied into three channels, palettes become their colours, CMYK is converted without a colour
    profile; `L`: grey (ITU-R 601); `I;16`: grey that keeps 16 bits. Transparent images lose alpha, or with
    `background` are laid on that colour; `RGBA` keeps it. `exif_orientation` turns photographs upright.
    """

    mode: Mode = "RGB"  # The mode that every image is converted to; the names are Pillow's.
    background: tuple[Colour, Colour, Colour] | None = None
    """Colour (red, green, blue) on which transparent images are laid; without it alpha is dropped."""
    exif_orientation: bool = True  # Turn photographs upright.
    max_pixels: Annotated[int, Meta(ge=1, le=MOST_PIXELS)] = MOST_PIXELS  # A larger image is refused.


def decode(file: BinaryIO, named: str, options: PixelOptions) -> Image:
    """The image in `options.mode`; with `I;16` in Pillow's mode `F`, 0 to 1. Of several frames the first.

    Raises `StepError` that begins with `named` for what is no image, damaged, or larger than `max_pixels`: that is
    read from the header, before memory is allocated.
    """
    pillow = import_extra("PIL.Image", "data of images")
    try:
        with pillow.open(file, formats=FORMATS) as image:
            width, height = image.size
            if width * height > options.max_pixels:
                raise StepError(
                    named, f"got {width} x {height} pixels, expected at most {options.max_pixels} (max_pixels)"
                )
            image.load()
            return _converted(_upright(image) if options.exif_orientation else image, options)
    except (StepError, MemoryError):
        raise
    except pillow.DecompressionBombError as e:  # of Pillow's own limit, which it compares first
        most = 2 * pillow.MAX_IMAGE_PIXELS
        text = f"got over {most} pixels, expected at most {min(options.max_pixels, most)} (max_pixels)"
        raise StepError(named, text) from e
    except Exception as e:  # Pillow's decoders raise many families for damaged files
        reason = " ".join(f"{e}".split()) or type(e).__name__
        if isinstance(e, pillow.UnidentifiedImageError):
            reason = f"is no image of these formats: {', '.join(FORMATS)}"
        raise StepError(named, f"cannot be decoded: {reason}") from e


def _upright(image: Image) -> Image:
    turned: Image | None = import_extra("PIL.ImageOps").exif_transpose(image)
    return turned or image


def _converted(image: Image, options: PixelOptions) -> Image:
    if options.background is not None and options.mode != "RGBA" and image.has_transparency_data:
        pillow = import_extra("PIL.Image")
        behind: Image = pillow.new("RGBA", image.size, (*options.background, 255))
        image = pillow.alpha_composite(behind, image.convert("RGBA"))
    if image.mode == "F":
        raise ValueError("it holds fractions, expected 8 or 16 bits a channel")
    if image.mode.startswith("I"):
        return _from_16_bits(image, options.mode)
    if options.mode == "I;16":
        return _fractions(np.asarray(image.convert("L"), dtype=np.float32) / np.float32(255))
    return image if image.mode == options.mode else image.convert(options.mode)


def _from_16_bits(image: Image, mode: str) -> Image:
    """Pillow clips 16 bits at 255 where it converts them to 8: they are scaled here."""
    values = np.asarray(image).astype(np.int64)
    if values.size and (values.min() < 0 or values.max() > _SIXTEEN_BITS):
        raise ValueError(f"it holds values of {values.min()} to {values.max()}, expected 0 to {_SIXTEEN_BITS}")
    if mode == "I;16":
        return _fractions(values.astype(np.float32) / np.float32(_SIXTEEN_BITS))
    eight = np.rint(values / (_SIXTEEN_BITS / 255)).astype(np.uint8)
    grey: Image = import_extra("PIL.Image").fromarray(eight)
    return grey if mode == "L" else grey.convert(mode)


def _fractions(values: NDArray[np.float32]) -> Image:
    return import_extra("PIL.Image").fromarray(values)


def pixels(image: Image) -> NDArray[np.float32]:
    """float32 [channels, height, width], 0 to 1."""
    values = np.asarray(image)
    planes = values[None] if values.ndim == 2 else values.transpose(2, 0, 1)
    return planes.astype(np.float32) if image.mode == "F" else planes.astype(np.float32) / np.float32(255)
