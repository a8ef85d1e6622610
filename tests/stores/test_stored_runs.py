"""A run whose machine is lost goes on from an S3 bucket on an empty one: bit for bit, whenever it was killed."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import isthmus as package
from isthmus.api.folder import RunFolder
from isthmus.api.stored_run import chosen_folder, documents_of, uploaded
from isthmus.errors import UserError
from isthmus.federated.evaluation import RoundHistory
from isthmus.federated.server import STATES
from isthmus.stores import Store, StoreConfig, commits_in
from isthmus.training.checkpoint import latest_checkpoint, newest_whole_checkpoint, read_manifest, read_tensors
from tests.interpreters import script
from tests.runtime.commands import devices_of, is_running, isthmus, refused, wait_until
from tests.tiers import represented_by

from .conftest import ask_for_keys
from .s3_server import Gate

JOB = """
name = "small"
fleet = "laptop"
planner = "even"

[model]
name = "mlp"
options = { features = 64, width = 8, layers = 2, classes = 10 }

[data]
kind = "digits"
options = { flat = true }

[training]
steps = 8
batch_size = 8
micro_batches = 2
clip_norm = 1.0
save_every = 2

[runtime]
emulate = false

[learning_rate]
schedule = "cosine"

[store]
url = "s3://bucket/runs/first"
"""
SCRIPT = """
import time
from pathlib import Path
import isthmus

class Waits(isthmus.Observer):
    def saved(self, step, directory):
        while step == 2 and not Path("go").exists():
            time.sleep(0.01)

isthmus.train("job.toml", run="lost", observer=Waits())
"""
"""Goes on from the first checkpoint when it is told to."""
FEDERATED = """
name = "rounds"

[model]
name = "mlp"
options = { features = 64, width = 4, layers = 1, classes = 10 }

[data]
kind = "digits"
options = { flat = true }

[federated.partition]
scheme = "iid"
clients = 5

[federated]
algorithm = "fedavg"
rounds = 3

[training]
eval_every = 1

[federated.participation]
clients = 3

[runtime]
scheme = "sp"
"""


@pytest.fixture(scope="module", autouse=True)
def here(s3: Gate, tmp_path_factory: pytest.TempPathFactory) -> object:
    """A folder with the job, whose run is kept in the bucket."""
    folder, before = tmp_path_factory.mktemp("here"), Path.cwd()
    os.chdir(folder)
    Path("job.toml").write_text(JOB)
    yield
    os.chdir(before)


@pytest.fixture(scope="module")
def whole() -> Path:
    """What nothing disturbs."""
    done = isthmus("train", "job.toml", "--run", "whole", "--set", "store.url=memory://whole")
    assert done.code == 0, done.err
    return Path("whole")


def _equal(first: Path, second: Path) -> None:
    before, after = (read_tensors(latest_checkpoint(run / "checkpoints")) for run in (first, second))
    assert before.keys() == after.keys()
    assert [name for name, value in before.items() if not torch.equal(value, after[name])] == []
    assert RunFolder(first).losses() == RunFolder(second).losses()


def _steps(url: str) -> list[int]:
    return sorted(int(commit[-6:]) for commit in commits_in(Store(url).names()))


def test_killed_in_an_upload_it_goes_on_from_the_bucket(s3: Gate, whole: Path) -> None:
    """Another checkpoint's upload is cut off in its middle, and the machine is lost with all of its files."""
    url = "s3://bucket/runs/first"
    process = subprocess.Popen(script(SCRIPT, Path.cwd()), start_new_session=True)
    wait_until(lambda: _steps(url) == [2], process)
    s3.hold("/stage-1.safetensors")
    Path("go").touch()
    wait_until(s3.reached.is_set, process)
    devices = devices_of(process.pid)
    process.kill()
    process.wait()
    wait_until(lambda: not any(map(is_running, devices.values())))
    s3.open()
    shutil.rmtree("lost")
    begun = [name for name in Store(url).names() if name.endswith("/stage-0.safetensors")]
    assert len(begun) == 2, "the upload had begun"
    assert _steps(url) == [2], "and left nothing that looks like a checkpoint"

    done = isthmus("train", "job.toml", "--run", "second", "--resume")
    assert done.code == 0, done.err
    assert f"fetching checkpoints/step-000002 from {url}" in done.err
    assert "resuming second after step 2" in done.err
    assert f"uploaded to {url}" in done.err
    _equal(whole, Path("second"))
    assert {8} <= set(_steps(url)) <= {2, 4, 6, 8} and len(_steps(url)) <= 2, "no more than the folder keeps"
    left = [name for name in Store(url).names() if name.startswith("checkpoints/")]
    assert {name.split("/")[1] for name in left} == {f"step-{step:06d}" for step in _steps(url)}, "nor parts of others"


def test_the_bucket_holds_the_whole_run(whole: Path) -> None:
    """A finished run is there with its documents, but for what is this machine's; its model is exported from there."""
    names = set(Store("s3://bucket/runs/first").names())
    assert {"job.json", "plan.json", "losses.jsonl", "trace.jsonl", "summary.json", "loss.png"} <= names
    assert {"record.json", "spans.jsonl"}.isdisjoint(names)
    assert isthmus("export", "s3://bucket/runs/first", "from-bucket").code == 0
    assert isthmus("export", "whole", "from-folder").code == 0
    first, second = (load_file(f"{name}/model.safetensors") for name in ("from-bucket", "from-folder"))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_a_tracked_run_is_the_same_run_on_another_machine(tmp_path: Path) -> None:
    """By its id trackers find it."""
    for name in ("job.json", "tracked.id", "record.json"):
        (tmp_path / name).touch()
    assert [path.name for path in documents_of(tmp_path)] == ["tracked.id", "job.json"]


def test_a_machine_that_is_behind_takes_what_the_bucket_has(whole: Path) -> None:
    """Another machine made the steps since: it would make them again."""
    shutil.copytree("second", "behind")
    shutil.rmtree("behind/checkpoints/step-000008")
    done = isthmus("train", "job.toml", "--run", "behind", "--resume")
    assert done.code == 0 and "fetching checkpoints/step-000008" in done.err
    assert "nothing left to do: behind has 8 steps" in done.err
    _equal(whole, Path("behind"))


def test_a_damaged_checkpoint_in_the_bucket_is_passed_over() -> None:
    shutil.copytree("second", "damaged")
    Path("damaged/store.json").unlink()
    config = StoreConfig(url="memory://damaged")
    noted: list[str] = []
    with uploaded(config, RunFolder(Path("damaged")), noted.append, resume=True):
        pass
    assert _steps(config.url) == [8] and noted[-1] == "uploaded to memory://damaged"
    store, name = Store(config.url), "checkpoints/step-000008/stage-1.safetensors"
    for path in Path("second/checkpoints/step-000006").iterdir():
        store.upload(path, f"checkpoints/step-000006/{path.name}")
    weights = store.read(name) or b""
    store.write(name, weights[:-1] + bytes([weights[-1] ^ 1]))
    folder = chosen_folder(Path("runs"), "small", resume=True, run=None, store=config, note=noted.append)
    assert noted[-2:] == [f"fetching checkpoints/step-{step:06d} from memory://damaged" for step in (8, 6)]
    found = newest_whole_checkpoint(folder.checkpoints, noted.append)
    assert found is not None and read_manifest(found).step == 6 and "not as it was saved" in noted[-1]
    assert folder.path == Path("runs/small") and [path.name for path in Path("runs").iterdir()] == ["small"]


def test_what_is_refused_is_one_line(whole: Path) -> None:
    train = ("train", "job.toml", "--run", "none")
    refused(isthmus(*train), 2, "store.url: s3://bucket/runs/first: holds a run already; resume it")
    refused(isthmus(*train, "--set", "store.url=s3://missing/x"), 2, "s3://missing/x", "bucket does not exist")
    refused(isthmus(*train, "--set", "store.url=s3://bucket/no", "--resume"), 2, "s3://bucket/no: holds no run")
    refused(isthmus(*train, "--set", "store.ulr=s3://bucket/x"), 2, "store.ulr", "url")
    refused(isthmus("export", "s3://bucket/no", "nowhere"), 2, "s3://bucket/no: holds no run")
    other = ("train", "job.toml", "--run", "whole", "--resume")
    refused(isthmus(*other), 2, "holds another run than whole, expected a URL of its own")
    ask_for_keys(os.environ["AWS_ENDPOINT_URL"], asks=True)
    try:
        refused(isthmus(*train), 2, "s3://bucket/runs/first", "The AWS Access Key Id you provided does not exist")
    finally:
        ask_for_keys(os.environ["AWS_ENDPOINT_URL"], asks=False)
    assert not Path("none").exists() and not Path("nowhere").exists()


def test_noise_on_activations_has_no_store() -> None:
    job = package.Job(name="x", model={"name": "mlp"}, data={"kind": "digits"})  # type: ignore[arg-type]
    overrides = {
        "store.url": "s3://bucket/x",
        "plan.data_holder": "laptop-0",
        "privacy.activations": {"clip": 1.0, "noise_multiplier": 1.0},
    }
    with pytest.raises(UserError, match=r"store: got one with privacy\.activations"):
        package.train(job, overrides=overrides)


@pytest.mark.long
def test_python_objects_go_on_from_the_bucket() -> None:
    def trained(*, resume: bool) -> package.Run:
        torch.manual_seed(0)
        return package.train(
            model=torch.nn.Linear(4, 2),
            loss=torch.nn.functional.cross_entropy,
            data={"input": torch.randn(64, 4), "target": torch.randint(0, 2, (64,))},
            steps=1,
            batch=4,
            run="objects",
            overrides={"store.url": "memory://objects"},
            resume=resume,
        )

    before = trained(resume=False).losses
    shutil.rmtree("objects")
    assert trained(resume=True).losses == before and len(before) == 1
    assert not any("given" in name for name in Store("memory://objects").names()), "samples stay"


@pytest.mark.parametrize("algorithm", represented_by(["fedavg", "scaffold"], "scaffold"))
def test_federated_rounds_go_on_from_the_bucket(algorithm: str) -> None:
    """Clients of scaffold keep states."""
    Path("rounds.toml").write_text(FEDERATED.replace("fedavg", algorithm))
    address, (plain, begun, on) = f"s3://bucket/runs/{algorithm}", [f"{algorithm}-{n}" for n in range(3)]
    url = ("--set", f"store.url={address}")
    assert isthmus("train", "rounds.toml", "--run", plain).code == 0
    assert isthmus("train", "rounds.toml", "--run", begun, *url, "--rounds", "2").code == 0
    shutil.rmtree(begun)
    done = isthmus("train", "rounds.toml", "--run", on, *url, "--resume")
    assert done.code == 0 and f"resuming {on} after 2 rounds" in done.err, done.err
    last = "rounds/round-000002.safetensors"
    before, after = load_file(f"{plain}/{last}"), load_file(f"{on}/{last}")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before if name != STATES)
    lines, again = (RoundHistory.of(Path(run)).lines() for run in (plain, on))
    assert [line.evaluation for line in lines] == [line.evaluation for line in again] and len(again) == 3
    names = Store(address).names()
    assert last in names and (last.replace("safetensors", "states") in names) == (algorithm == "scaffold")
    assert not list(Path(on, "rounds").glob("*.states")), "they are where states lie"
