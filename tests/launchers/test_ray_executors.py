"""`[runtime] backend = "ray"` on Ray's own test cluster, whose nodes are processes of this machine.

What `make test` tries on a cluster is in `test_ray.py`, which has one.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from isthmus.errors import UserError
from isthmus.federated.history import RoundLine
from isthmus.federated.job import FederatedJob, load_federated_job
from isthmus.runtime.federated.run import FederatedRun
from isthmus.units import format_size
from tests.federated.test_federated_runs import model, write
from tests.fleet_service.parties import soon

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")

from .ray_cluster import RayCluster  # noqa: E402

NODE = "ISTHMUS_TEST_NODE"
ON_RAY = {"runtime.backend": "ray"}
APART = {**ON_RAY, "runtime.ray.states": f"${NODE}/states"}
SLOW = {"runtime.slow_down": [40.0, 40.0]}
WITHIN_S = 120.0
Overrides = Mapping[str, object]
NOTHING: Overrides = {}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    """Two nodes. Each has a folder of its own in an environment variable."""
    folder = tmp_path_factory.mktemp("nodes")
    os.environ[NODE] = str(folder / "head")
    with RayCluster(1) as made:
        os.environ[NODE] = str(folder / "other")
        made.add_node()
        yield made
        del os.environ[NODE]


def job(folder: Path, overrides: Overrides) -> FederatedJob:
    folder.mkdir(parents=True, exist_ok=True)
    return load_federated_job(write(folder), overrides)


class Trained:
    """A run of the small job to its end; `first` is called once its first round is over, and may wait."""

    def __init__(
        self, folder: Path, overrides: Overrides = NOTHING, first: Callable[[Trained], None] = lambda _: None
    ) -> None:
        self.notes: list[str] = []
        self.lines: list[RoundLine] = []
        self._first = first
        self.run = FederatedRun(job(folder, overrides), folder / "run", resume=False, watch=self._watch)
        self.run.run(self.notes.append)
        self.bits = model(folder / "run")

    def _watch(self, line: RoundLine) -> None:
        self.lines.append(line)
        if len(self.lines) == 1:
            self._first(self)

    def wait_for(self, text: str) -> None:
        soon(lambda: any(text in note for note in self.notes), WITHIN_S)


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
    assert len({name for line in found.lines for name in line.record.trained}) == 2


@pytest.mark.long
def test_a_killed_node_costs_nothing_but_time(reference: bytes, cluster: RayCluster, tmp_path: Path) -> None:
    """Where others see its folder."""

    def kill_other(run: Trained) -> None:
        cluster.kill_node()
        run.wait_for("was lost: its node was lost")

    try:
        assert Trained(tmp_path, {**ON_RAY, **SLOW}, kill_other).bits == reference
    finally:
        cluster.add_node()
    assert not cluster.actors() and not cluster.groups()


@pytest.mark.long
def test_states_that_lie_on_their_nodes_are_fetched(reference: bytes, cluster: RayCluster, tmp_path: Path) -> None:
    """With `fa` a client goes to whoever is free."""
    run = Trained(tmp_path, {**APART, "runtime.scheme": "fa", "runtime.slow_down": [0.0, 20.0]})
    assert run.bits == reference
    assert run.run.moved_bytes > 0
    assert run.notes[-1] == f"{format_size(run.run.moved_bytes)} of clients' states moved from node to node"


@pytest.mark.long
def test_states_that_were_on_a_lost_node_end_the_run_with_one_line(cluster: RayCluster, tmp_path: Path) -> None:
    def kill_other(run: Trained) -> None:
        cluster.kill_node()
        run.wait_for("was lost: its node was lost")

    try:
        with pytest.raises(UserError, match=r"missing: .*the algorithm cannot go on without it"):
            Trained(tmp_path, {**APART, **SLOW, "federated.rounds": 20}, kill_other)
    finally:
        cluster.add_node()


@pytest.mark.long
@pytest.mark.parametrize("executors", [4, 0])
def test_as_many_executors_as_there_is_room_for(
    executors: int, reference: bytes, cluster: RayCluster, tmp_path: Path
) -> None:
    run = Trained(tmp_path, {**ON_RAY, "runtime.executors": executors, "runtime.ray.cpus": 0.5})
    assert run.bits == reference
    assert len({name for line in run.lines for name in line.record.trained}) == 4


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ({"runtime.scheme": "sp"}, "runtime.scheme: got 'sp' beside runtime.backend 'ray'"),
        ({"fleet": "parrot-a"}, "fleet: got 'parrot-a' beside runtime.backend 'ray'"),
        (
            {"runtime.device": "cuda:1"},
            "runtime.device: got 'cuda:1' beside runtime.backend 'ray', expected",
        ),
        ({"runtime.ray.bandwidth": "fast"}, "runtime.ray.bandwidth: "),
        (
            {"runtime.backend": "processes", "runtime.ray.cpus": 2},
            "runtime.ray: got options for backend",
        ),
    ],
)
def test_a_job_that_no_cluster_can_run(overrides: Overrides, reason: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=re.escape(reason)):
        job(tmp_path, {**ON_RAY, **overrides})


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
