"""Federated training on images: shared out by label, by LEAF's writers, with samples drawn anew in every round."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from isthmus.data import load_dataset
from isthmus.data.clients import Redrawn
from isthmus.data.dataset import Split
from isthmus.errors import UserError
from isthmus.federated.job import FederatedJob, client_data
from isthmus.federated.site import OwnData
from tests.data.pictures import picture_folder
from tests.runtime.commands import isthmus, refused

CROP = [{"name": "RandomCrop", "size": 6}]


def job(kind: str, options: dict[str, object], **tables: object) -> FederatedJob:
    given = {
        "name": "images",
        "model": {"name": "cnn", "options": {"width": 4, "stages": 2, "classes": 62}},
        "data": {"kind": kind, "options": options},
        "federated": {"rounds": 2, **tables},
    }
    return msgspec.convert(given, FederatedJob)


def test_a_folder_is_shared_out_by_its_labels_without_decoding(tmp_path: Path) -> None:
    picture_folder(tmp_path, classes=3, each=8)
    (tmp_path / "class-1" / "3.png").write_bytes(b"damaged")
    options: dict[str, object] = {"path": str(tmp_path), "holdout": 0, "mode": "L", "transforms": CROP}
    data = client_data(job("image-folder", options, partition={"scheme": "dirichlet", "clients": 4, "alpha": 0.1}))
    assert sum(data.sizes) == 24
    with pytest.raises(UserError, match="no column 'writer'"):
        client_data(job("image-folder", options, partition={"scheme": "natural", "column": "writer"}))


@pytest.mark.parametrize("site", [False, True])
def test_a_rounds_samples_are_of_seed_round_and_sample(site: bool, tmp_path: Path) -> None:
    picture_folder(tmp_path, classes=2, each=6)
    options: dict[str, object] = {"path": str(tmp_path), "holdout": 0, "mode": "L", "transforms": CROP}
    given = job("image-folder", options, partition={"clients": 1 if site else 2})
    assert given.data is not None
    data = OwnData(load_dataset(given.data, "train")) if site else client_data(given)
    assert isinstance(data, Redrawn)
    rounds = [data.of_round(7, k).load(0)["pixel_values"] for k in (0, 1, 0)]
    assert torch.equal(rounds[0], rounds[2]) and not torch.equal(rounds[0], rounds[1])
    assert torch.equal(data.of_round(7, 1).load_many([0])["pixel_values"], rounds[1])


def leaf(root: Path, split: Split, writers: int) -> None:
    draws = np.random.default_rng(writers)
    sizes = {f"w{k}": 4 + k for k in range(writers)}
    data = {
        name: {"x": (draws.integers(0, 256, (n, 64)) / 255).tolist(), "y": draws.integers(0, 62, n).tolist()}
        for name, n in sizes.items()
    }
    folder = root / ("train" if split == "train" else "test")
    folder.mkdir(parents=True)
    (folder / "data.json").write_text(
        json.dumps({"users": list(sizes), "num_samples": list(sizes.values()), "user_data": data})
    )


JOB = """
name = "images"
[model]
name = "cnn"
options = {{ width = 4, stages = 2, classes = 62 }}
[data]
kind = "{kind}"
[data.options]
{options}
{partition}
[federated]
rounds = 2
[federated.participation]
clients = 3
[training]
eval_every = 1
batch_size = 4
[runtime]
executors = 2
"""


def weights(job_file: Path, run: Path, scheme: str) -> dict[str, torch.Tensor]:
    done = isthmus("train", job_file, "--scheme", scheme, "--run", run)
    assert done.code == 0, done.err
    return load_file(max((run / "rounds").iterdir()))


def test_writers_train_as_clients(tmp_path: Path) -> None:
    leaf(tmp_path / "femnist", "train", 5)
    leaf(tmp_path / "femnist", "heldout", 2)
    options = f'path = "{tmp_path}/femnist"\nside = 8'
    (tmp_path / "job.toml").write_text(JOB.format(kind="leaf-femnist", options=options, partition=""))
    assert weights(tmp_path / "job.toml", tmp_path / "run", "sp")


def test_executors_draw_the_samples_of_a_round_as_one_process_does(tmp_path: Path) -> None:
    picture_folder(tmp_path / "png", classes=2, each=10)
    options = f'path = "{tmp_path}/png"\nmode = "L"\ntransforms = [{{ name = "RandomCrop", size = 6 }}]'
    shared = JOB.format(kind="image-folder", options=options, partition="[federated.partition]\nclients = 4")
    (tmp_path / "job.toml").write_text(shared)
    alone, clients_per_vmap = (weights(tmp_path / "job.toml", tmp_path / scheme, scheme) for scheme in ("sp", "ours"))
    assert alone.keys() == clients_per_vmap.keys() and all(
        torch.equal(alone[name], clients_per_vmap[name]) for name in alone
    )


def test_an_executor_says_which_image_is_damaged(tmp_path: Path) -> None:
    picture_folder(tmp_path / "png", classes=2, each=10)
    (tmp_path / "png" / "class-1" / "3.png").write_bytes(b"damaged")
    options = f'path = "{tmp_path}/png"\nmode = "L"\nholdout = 0'
    shared = JOB.format(kind="image-folder", options=options, partition="[federated.partition]\nclients = 3")
    (tmp_path / "job.toml").write_text(shared)
    done = isthmus("train", tmp_path / "job.toml", "--scheme", "ours", "--run", tmp_path / "run")
    refused(done, 2, "class-1/3.png (sample 13): cannot be decoded")
