"""Captures of built-in models are made once per user, and are the same when they are read again."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from isthmus.graph.capture import capture
from isthmus.graph.captured import Captured, Column
from isthmus.job import Job, prepared
from isthmus.job.prepared import cached_capture, digest_of_module
from isthmus.job.settings import load_job
from isthmus.models import build_model

COLUMNS = {"pixel_values": Column("float32", (1, 8, 8)), "labels": Column("int64", ())}
JOB = """
name = "one"
fleet = "three-sites"
[model]
name = "mlp"
[data]
kind = "digits"
[training]
steps = 1
batch_size = 8
micro_batches = 2
[[optimizer]]
name = "sgd"
lr = 0.1
"""


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "isthmus" / "captures"


@pytest.fixture
def job(tmp_path: Path) -> Job:
    (tmp_path / "job.toml").write_text(JOB)
    return load_job(tmp_path / "job.toml")


MADE: dict[tuple[object, ...], Captured] = {}
"""A capture takes half a second: these tests ask whether there was one, and make each once."""


def capture_of(job: Job) -> Captured:
    if job.model.name == "kept_net:build":
        module = importlib.import_module("kept_net")
        source = Path(str(module.__file__)).read_bytes()
    else:
        source = b""
    key = (msgspec.json.encode(job.model), source, job.micro_batch_size, torch.get_default_dtype())
    if key not in MADE:
        MADE[key] = capture(lambda: build_model(job.model), COLUMNS, name=job.model.name, batch=job.micro_batch_size)
    return MADE[key]


class Counted:
    """Captures the job's model, and counts how often."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self, job: Job) -> Captured:
        def captured() -> Captured:
            self.times += 1
            return capture_of(job)

        return cached_capture(job, COLUMNS, captured)


def test_what_is_read_again_is_what_was_captured(cache: Path, job: Job) -> None:
    counted = Counted()
    first, again = counted(job), counted(job)
    assert counted.times == 1 and len(list(cache.iterdir())) == 1
    assert (first.train, first.eval) == (again.train, again.eval)
    assert first.constants.keys() == again.constants.keys()
    assert all(torch.equal(value, again.constants[name]) for name, value in first.constants.items())


def test_another_model_precision_or_version_is_captured_anew(
    cache: Path, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted, replace = Counted(), msgspec.structs.replace
    wider = replace(job, model=replace(job.model, options={"width": 32}))
    narrow = replace(job, training=replace(job.training, precision="bf16"))
    for number, other in enumerate((job, wider, narrow), start=1):
        counted(other)
        assert counted.times == number
    monkeypatch.setattr(prepared, "made_by", lambda: ("another version",))
    counted(job)
    assert counted.times == 4 and len(list(cache.iterdir())) == 4


def test_another_default_type_is_captured_anew(cache: Path, job: Job) -> None:
    counted = Counted()
    first = counted(job)
    torch.set_default_dtype(torch.float64)
    try:
        assert counted(job).train != first.train
    finally:
        torch.set_default_dtype(torch.float32)
    assert counted(job).train == first.train and counted.times == 2


def test_a_capture_at_every_batch_size_is_one_and_others_are_of_their_size(cache: Path, job: Job) -> None:
    larger = msgspec.structs.replace(job, training=msgspec.structs.replace(job.training, batch_size=16))
    counted = Counted()
    assert counted(larger).train == counted(job).train and counted.times == 1

    made = counted(job)
    of_eight = msgspec.structs.replace(made, train=msgspec.structs.replace(made.train, batch=8))
    wider = msgspec.structs.replace(job.model, options={"width": 32})
    job, larger = (msgspec.structs.replace(each, model=wider) for each in (job, larger))
    assert cached_capture(larger, COLUMNS, lambda: of_eight).train.batch == 8
    assert cached_capture(larger, COLUMNS, lambda: made).train.batch == 8
    assert cached_capture(job, COLUMNS, lambda: made).train.batch is None


def test_models_of_the_users_code_and_of_the_hub_are_captured_every_time(cache: Path, job: Job) -> None:
    replace = msgspec.structs.replace
    for name in ("isthmus.models.mlp:MLP", "hf", "given:Module-0"):
        times: list[str] = []

        def captured(times: list[str] = times, name: str = name) -> Captured:
            times.append(name)
            return capture_of(job)

        other = replace(job, model=replace(job.model, name=name))
        for _ in range(2):
            cached_capture(other, COLUMNS, captured)
        assert len(times) == 2
    assert not cache.exists()


def test_a_pretrained_model_is_kept_until_its_config_is_another(cache: Path, job: Job, tmp_path: Path) -> None:
    replace, times = msgspec.structs.replace, list[int]()
    made = Counted()(job)
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    pretrained = replace(job, model=replace(job.model, name="hf", options={"path": str(tmp_path)}))

    def captured() -> Captured:
        times.append(len(times))
        return made

    for _ in range(2):
        assert cached_capture(pretrained, COLUMNS, captured).train == made.train
    assert len(times) == 1
    (tmp_path / "config.json").write_text('{"hidden_size": 16}')
    cached_capture(pretrained, COLUMNS, captured)
    assert len(times) == 2


def test_a_class_of_transformers_is_kept(cache: Path, job: Job) -> None:
    other = msgspec.structs.replace(job, model=msgspec.structs.replace(job.model, name="hf:BertModel"))
    made, times = Counted()(job), list[str]()
    for _ in range(2):
        cached_capture(other, COLUMNS, lambda: (times.append(""), made)[1])
    assert len(times) == 1


OWN = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(64, width), nn.Linear(width, 10)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.body(pixel_values.flatten(1)).relu()), labels)

def build(width: int = 16) -> nn.Module:
    return Net(width)
"""


@pytest.fixture
def own(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    """A job whose model is in a file of the user's."""
    (tmp_path / "kept_net.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    yield msgspec.structs.replace(job, model=msgspec.structs.replace(job.model, name="kept_net:build"))
    sys.modules.pop("kept_net", None)


def anew(counted: Counted, job: Job) -> Captured:
    """As another process has it, which has not imported the model."""
    sys.modules.pop("kept_net", None)
    importlib.invalidate_caches()
    return counted(job)


def test_a_model_of_ones_own_is_kept_until_its_file_is_another(cache: Path, own: Job, tmp_path: Path) -> None:
    counted, file = Counted(), tmp_path / "kept_net.py"
    first, again = anew(counted, own), anew(counted, own)
    assert counted.times == 1 and first.train == again.train and "kept_net" not in sys.modules
    file.write_text(OWN.replace("16", "24"))
    assert anew(counted, own).train != first.train and counted.times == 2
    file.write_text(OWN)
    assert anew(counted, own).train == first.train and counted.times == 2


def test_a_module_that_is_imported_already_is_captured_every_time(cache: Path, own: Job) -> None:
    """Its file may have been edited since."""
    counted = Counted()
    anew(counted, own)
    counted(own)
    assert counted.times == 2


@pytest.mark.parametrize(
    "line",
    [
        "import os",
        "import json",
        "import numpy as np",
        "from pathlib import Path",
        "from . import other",
        "import other",
        "import torch.hub",
        "from torch import load",
        "TABLE = open(__file__).read()",
        "FAST = torch.cuda.is_available()",
        "WEIGHTS = lambda: torch.load('w.pt')",
        "exec('import os')",
        "torch.os.environ",
        "getattr(torch, 'lo' + 'ad')('w.pt')",
        "TABLE = torch.from_file('w.bin')",
        "FEW = torch.get_num_threads()",
        "this is no Python",
    ],
)
def test_a_model_that_may_depend_on_more_than_its_file_is_captured_every_time(
    own: Job, tmp_path: Path, line: str
) -> None:
    assert digest_of_module(own.model.name) is not None
    (tmp_path / "kept_net.py").write_text(f"{OWN}\n{line}\n")
    assert digest_of_module(own.model.name) is None


def test_a_damaged_file_is_written_again_and_a_folder_that_cannot_be_written_is_left_alone(
    cache: Path, job: Job, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    counted = Counted()
    counted(job)
    (file,) = cache.iterdir()
    file.write_bytes(file.read_bytes()[:50])
    counted(job)
    counted(job)
    assert counted.times == 2
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    counted(job)
    assert counted.times == 3


def test_the_oldest_goes_first(cache: Path, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "MOST_KEPT", 2)
    counted, replace = Counted(), msgspec.structs.replace
    jobs = [replace(job, model=replace(job.model, options={"width": width})) for width in (8, 16, 24)]
    for number, each in enumerate(jobs):
        counted(each)
        newest = max(cache.iterdir(), key=lambda file: file.stat().st_mtime_ns)
        os.utime(newest, (number, number))
    assert len(list(cache.iterdir())) == 2
    counted(jobs[2])
    assert counted.times == 3
    counted(jobs[0])
    assert counted.times == 4


def test_what_another_process_removes_before_it_is_read_is_captured_again(
    cache: Path, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepared, "_drop_surplus", lambda folder: [f.unlink() for f in folder.iterdir()])
    counted = Counted()
    assert counted(job).train.ops and counted.times == 2 and not list(cache.iterdir())
