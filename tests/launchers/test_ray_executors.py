"""`[runtime] backend = "ray"` on Ray's own test cluster, whose nodes are processes of this machine.

What `make test` tries on a cluster is in `test_ray.py`, which has one.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

import isthmus
from isthmus.api.folder import AGENTS_LOG
from isthmus.callbacks import StepDone
from isthmus.errors import UserError
from isthmus.federated.evaluation import RoundHistory
from isthmus.federated.job import FederatedJob, load_federated_job
from tests.federated.test_federated_runs import model, write
from tests.fleet_service.parties import soon

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")

from .agents import processes_with  # noqa: E402
from .ray_cluster import RayCluster  # noqa: E402

ON_RAY = {"runtime.backend": "ray"}
LONG = {"training.epochs": 40}
"""Rounds that are still trained when an executor of the first one is killed."""
WITHIN_S = 120.0
Overrides = Mapping[str, object]
NOTHING: Overrides = {}


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    """Two nodes."""
    with RayCluster(2) as made:
        yield made


def job(folder: Path, overrides: Overrides) -> FederatedJob:
    folder.mkdir(parents=True, exist_ok=True)
    return load_federated_job(write(folder), overrides)


class Trained(isthmus.Observer):
    """A run of the small job to its end; `first` is called once its first round is over, and may wait."""

    def __init__(
        self, folder: Path, overrides: Overrides = NOTHING, first: Callable[[Trained], None] = lambda _: None
    ) -> None:
        self.notes: list[str] = []
        self._first = first
        isthmus.federate(job(folder, overrides), run=folder / "run", observer=self)
        self.bits = model(folder / "run")
        rounds = RoundHistory(folder / "run" / "rounds.jsonl").lines()
        self.trained = [set(line.record.trained) for line in rounds]
        """Who trained in each round."""

    def note(self, text: str) -> None:
        self.notes.append(text)

    def stepped(self, done: StepDone) -> None:
        if done.step == 1:
            self._first(self)

    def wait_for(self, text: str) -> None:
        soon(lambda: any(text in note for note in self.notes), WITHIN_S)


def check_nothing_is_left(cluster: RayCluster, run: Path) -> None:
    """No process, actor or placement group, and no key in the run's folder."""
    soon(lambda: not processes_with("join --name executor-") and not cluster.folders(), 60.0)
    soon(lambda: not cluster.actors() and not cluster.groups(), 60.0)
    assert not list(run.rglob("*.pem"))


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The run in one process."""
    return Trained(tmp_path_factory.mktemp("reference"), {"runtime.scheme": "sp"}).bits


@pytest.mark.long
@pytest.mark.parametrize("scheme", ["parrot", "ours"])
@pytest.mark.parametrize("algorithm", ["scaffold", "fedadam", "mime"])
def test_the_bits_of_processes(algorithm: str, scheme: str, cluster: RayCluster, tmp_path: Path) -> None:
    same = {"federated.algorithm": algorithm, "runtime.scheme": scheme}
    expected = Trained(tmp_path / "processes", same)
    found = Trained(tmp_path / "ray", {**same, **ON_RAY})
    assert found.bits == expected.bits
    # On a busy machine one of them may train all clients of a round before the other begins.
    assert set.union(*found.trained) == {"executor-0", "executor-1"}


@pytest.mark.long
def test_a_killed_node_costs_nothing_but_time(cluster: RayCluster, tmp_path: Path) -> None:
    def kill_other(run: Trained) -> None:
        cluster.kill_node()
        run.wait_for("was lost")

    try:
        found = Trained(tmp_path / "ray", {**ON_RAY, **LONG}, kill_other)
    finally:
        cluster.add_node()
    assert found.bits == Trained(tmp_path / "alone", {**LONG, "runtime.scheme": "sp"}).bits
    check_nothing_is_left(cluster, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("executors", [4, 0])
def test_as_many_executors_as_there_is_room_for(
    executors: int, reference: bytes, cluster: RayCluster, tmp_path: Path
) -> None:
    run = Trained(tmp_path, {**ON_RAY, "runtime.executors": executors, "runtime.ray.cpus": 0.5})
    assert run.bits == reference
    log = (tmp_path / "run" / AGENTS_LOG).read_text()
    assert all(f"executor-{number}: in the fleet as executor-{number}" in log for number in range(4))


@pytest.mark.long
def test_a_run_goes_on_from_its_store_with_the_states_of_its_clients(
    reference: bytes, cluster: RayCluster, tmp_path: Path
) -> None:
    stored = {**ON_RAY, "store.url": f"file://{tmp_path}/store"}
    isthmus.federate(job(tmp_path, {**stored, "federated.rounds": 2}), run=tmp_path / "begun", quiet=True)
    shutil.rmtree(tmp_path / "begun")
    isthmus.federate(job(tmp_path, stored), run=tmp_path / "on", resume=True, quiet=True)
    assert model(tmp_path / "on") == reference


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ({"runtime.scheme": "sp"}, "runtime.scheme: got 'sp' beside runtime.backend 'ray'"),
        ({"fleet": "parrot-a"}, "fleet: got 'parrot-a' beside runtime.backend 'ray'"),
        ({"runtime.device": "cuda:1"}, "runtime.device: got 'cuda:1' beside runtime.backend 'ray', expected"),
        ({"runtime.ray.cpus": 0}, "runtime.ray.cpus: "),
        ({"runtime.backend": "processes", "runtime.ray.cpus": 2}, "runtime.ray: got options for backend"),
    ],
)
def test_a_job_that_no_cluster_can_run(overrides: Overrides, reason: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=re.escape(reason)):
        job(tmp_path, {**ON_RAY, **overrides})


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ({"runtime.scheme": "sd"}, "runtime.scheme: got 'sd' with executors on devices that join"),
        ({"runtime.noise": 0.5}, "runtime.noise: got 0.5 with executors on devices that join"),
    ],
)
def test_executors_of_a_cluster_are_no_emulation(overrides: Overrides, reason: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=re.escape(reason)):
        Trained(tmp_path, {**ON_RAY, **overrides})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("", "no Ray cluster was started on this machine: start one with `ray start --head`, or name one with"),
        ("here", "address: got 'here', expected HOST:PORT"),
        ("127.0.0.1:9", "no Ray cluster at 127.0.0.1:9: Connection refused: start one with"),
    ],
)
def test_a_cluster_that_is_not_there(
    address: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(UserError, match=re.escape(f"runtime.backend: {reason}")):
        Trained(tmp_path, {**ON_RAY, "runtime.ray.address": address})
    assert not (tmp_path / "run").exists()


def test_a_ray_that_is_missing_or_too_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "__version__", "2.9.3")
    with pytest.raises(UserError, match=r"runtime\.backend: Ray 2\.9\.3 is too old, expected 2\.60 or newer"):
        Trained(tmp_path, ON_RAY)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"runtime\.backend needs ray: pip install '.\[ray\]'"):
        Trained(tmp_path, ON_RAY)
