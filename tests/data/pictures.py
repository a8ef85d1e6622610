"""Small images written for tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from isthmus.data import Dataset, DataSpec, Split, load_dataset


def load(kind: str, path: Path, split: Split = "train", **options: object) -> Dataset:
    return load_dataset(DataSpec(kind=kind, options={"path": str(path), **options}), split)


def everything(data: Dataset) -> dict[str, torch.Tensor]:
    return data.batch(range(len(data)), list(data.columns))


def drawing(seed: int, height: int = 8, width: int = 8, channels: int = 3) -> np.ndarray:
    """uint8 [height, width(, channels)] of noise."""
    shape = (height, width, channels) if channels > 1 else (height, width)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def save(path: Path, values: np.ndarray, **how: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(values).save(path, **how)
    return path


def picture_folder(root: Path, classes: int = 3, each: int = 4, **sizes: int) -> Path:
    """root/class-k/i.png"""
    for k in range(classes):
        for i in range(each):
            save(root / f"class-{k}" / f"{i}.png", drawing(k * each + i, **sizes))
    return root
