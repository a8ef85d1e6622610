"""Pipelines over folders of images: the same run as over arrays, random transforms as in the plain loop."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image

from isthmus.data import DataSpec, load_dataset
from isthmus.errors import IsthmusError
from isthmus.job import prepare
from tests.runtime.jobs import RESNET, final_weights, job_of, plain_run, random_cut, run

COUNT = 48


def digit_levels() -> tuple[np.ndarray, np.ndarray]:
    """uint8 [48, 32, 32] and labels, in the order of the files that `digit_folder` writes."""
    digits = load_dataset(DataSpec(kind="digits", options={"size": 32}), "train").batch(
        range(COUNT), ["pixel_values", "labels"]
    )
    levels = (digits["pixel_values"][:, 0] * 255).round().to(torch.uint8).numpy()
    labels = digits["labels"].numpy()
    order = np.argsort(labels, kind="stable")
    return levels[order], labels[order]


def digit_folder(root: Path) -> Path:
    for number, (image, label) in enumerate(zip(*digit_levels(), strict=True)):
        (root / str(label)).mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(root / str(label) / f"{number:03d}.png")
    return root


@pytest.mark.long
def test_a_resnet_on_a_folder_of_images_is_the_resnet_on_their_arrays(tmp_path: Path) -> None:
    levels, labels = digit_levels()
    pixels = np.repeat(levels[:, None].astype(np.float32) / np.float32(255), 3, axis=1)
    np.savez(tmp_path / "arrays.npz", pixel_values=pixels, labels=labels)
    arrays = DataSpec(kind="npz", options={"path": str(tmp_path / "arrays.npz"), "holdout": 0})
    folder = DataSpec(kind="image-folder", options={"path": str(digit_folder(tmp_path / "png")), "holdout": 0})
    prepared = prepare(job_of("hf-resnet", RESNET, folder))
    run(prepared, random_cut(prepared, 2, 0, once=True), tmp_path / "run")
    module, _ = plain_run(msgspec.structs.replace(prepared.job, data=arrays), prepared)
    found = final_weights(tmp_path / "run")
    for name, value in module.state_dict().items():
        assert torch.equal(found[name], value), name


def test_random_transforms_are_those_of_the_plain_loop_over_epochs(tmp_path: Path) -> None:
    transforms = [
        {"name": "RandomCrop", "size": 28, "padding": 2},
        {"name": "RandomHorizontalFlip"},
        {"name": "Normalize", "mean": [0.5], "std": [0.5]},
    ]
    options = {"path": str(digit_folder(tmp_path / "png")), "mode": "L", "holdout": 0.2, "transforms": transforms}
    data = DataSpec(kind="image-folder", options=options)
    model = {"channels": 1, "width": 4, "stages": 2}
    job = job_of("cnn", model, data, steps=8, eval_every=8, eval_samples=8)  # 64 samples: into the second epoch
    prepared = prepare(job)
    run(prepared, random_cut(prepared, 2, 0, once=True), tmp_path / "run")
    module, _ = plain_run(job, prepared)
    found = final_weights(tmp_path / "run")
    for name, value in module.state_dict().items():
        assert torch.equal(found[name], value), name


def test_a_damaged_image_ends_the_run_with_its_name(tmp_path: Path) -> None:
    folder = digit_folder(tmp_path / "png")
    (folder / "9" / "047.png").write_bytes(b"damaged")
    data = DataSpec(kind="image-folder", options={"path": str(folder), "mode": "L", "holdout": 0})
    prepared = prepare(job_of("cnn", {"channels": 1, "width": 4, "stages": 2}, data, steps=6))
    with pytest.raises(IsthmusError, match=r"9/047.png \(sample 47\): cannot be decoded.*step \d, samples"):
        run(prepared, random_cut(prepared, 2, 0, once=True), tmp_path / "run")
