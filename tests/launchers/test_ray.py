"""`isthmus up --on ray` on Ray's own test cluster: two or three nodes, which are processes of this machine.

In `make test` executors of federated jobs are tried on it too: a cluster takes longer to start than they do.
"""

from __future__ import annotations

import json
import os
import random
import re
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from isthmus.api.folder import RunFolder
from isthmus.errors import PeerError, UserError
from isthmus.runtime.launchers.launcher import AgentSpec, open_launcher
from isthmus.runtime.launchers.ray import RayLauncher, RayOptions
from tests.fleet_service.parties import soon
from tests.runtime.commands import COMMAND, edited, write_job

from .agents import kill_agent, processes_with

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")

from tests.tiers import THOROUGH  # noqa: E402

from .ray_cluster import RayCluster  # noqa: E402
from .test_contract import Case, check_engine  # noqa: E402
from .test_ray_executors import LONG, ON_RAY, Trained  # noqa: E402
from .test_ray_executors import check_nothing_is_left as executors_left_nothing  # noqa: E402

pytestmark = pytest.mark.thorough

NODES = 3 if THOROUGH else 2
WITHIN_S = 300.0
MANY = 100_000
"""Steps of a run that is ended before it has done them."""
DEVICE = """
[[device]]
name = "{name}"
region = "here"
compute = "1 GFLOPS"
memory = "1 GiB"
"""
LINKS = """
[links]
default = { latency = "0.1 ms", bandwidth = "1 Gbit/s" }
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    """Each test leaves its nodes, with GPUs as Ray counts them: there need be none."""
    with RayCluster(NODES, num_gpus=2) as made:
        yield made


class Up:
    """`isthmus up --on ray`, as a person starts it, of a job on three devices."""

    def __init__(self, folder: Path, steps: int, *options: str) -> None:
        self.token = secrets.token_hex(4)
        fleet = folder / "fleet.toml"
        devices = [DEVICE.format(name=f"{self.token}-{number}") for number in range(3)]
        fleet.write_text("\n".join(['name = "three"', *devices, LINKS]))
        job = edited(write_job(folder, steps=steps, fleet=str(fleet)), ("layers = 2", "layers = 4"))
        self.run = RunFolder(folder / "run")
        self._err = folder / "up.err"
        words = ["up", str(job), "--on", "ray", "--run", str(self.run.path), "--timeout", "10 s", *options]
        with self._err.open("w") as err:
            self.process = subprocess.Popen(
                [*COMMAND, *words], stdout=subprocess.DEVNULL, stderr=err, env={**os.environ, "NO_COLOR": "1"}
            )

    @property
    def notes(self) -> str:
        return self._err.read_text()

    def wait_for(self, text: str) -> None:
        soon(lambda: text in self.notes or self.process.poll() is not None, WITHIN_S)
        assert text in self.notes, self.notes

    def steps(self) -> int:
        return max((p.step for p in self.run.losses()), default=0)

    def wait_for_steps(self, more: int) -> None:
        until = self.steps() + more
        soon(lambda: self.steps() >= until or self.process.poll() is not None, WITHIN_S)
        assert self.steps() >= until, self.notes

    def check_nothing_is_left(self, cluster: RayCluster) -> None:
        """No process, actor, placement group, key, ticket or port."""
        check_nothing_is_left(cluster, self.token)
        assert not (self.run.path / "coordinator").exists()
        (listening,) = [line for line in self.notes.splitlines() if "listening on " in line]
        host, _, port = listening.partition("listening on ")[2].split()[0].rpartition(":")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, int(port)), 5.0)


def check_nothing_is_left(cluster: RayCluster, token: str) -> None:
    """Of agents whose names have the token."""
    soon(lambda: not processes_with(token), 60.0)
    soon(lambda: not cluster.groups() and not cluster.actors(), 60.0)
    soon(lambda: not cluster.folders() and not processes_with(f"{cluster.folder}/isthmus-agent-"), 60.0)


def _kill_one_with_the_gpus_of_its_node(name: str) -> None:
    environments = [Path(f"/proc/{pid}/environ").read_bytes() for pid in processes_with(name)]
    assert environments and all(b"\0CUDA_VISIBLE_DEVICES=0,1\0" in found for found in environments)
    kill_agent(name)


@pytest.mark.long
def test_agents_start_are_watched_start_again_and_end(cluster: RayCluster, tmp_path: Path) -> None:
    said = check_engine("ray", Case(kill=_kill_one_with_the_gpus_of_its_node), tmp_path)
    assert "on node 127.0.0.1" in said
    assert not cluster.groups()
    written = (path.read_bytes() for path in cluster.folder.rglob("*") if path.is_file())
    assert not any(b"isthmus1-" in text for text in written), "Ray wrote a ticket down"


@pytest.mark.long
def test_a_job_trains_on_three_nodes(cluster: RayCluster, tmp_path: Path) -> None:
    up = Up(tmp_path, 12)
    assert up.process.wait(WITHIN_S) == 0, up.notes
    assert up.steps() == 12
    up.check_nothing_is_left(cluster)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_a_killed_node_is_replaced(seed: int, cluster: RayCluster, tmp_path: Path) -> None:
    """At a moment that the seed draws. `make test` replaces an agent of the local engine (`test_up.py`)."""
    draw = random.Random(seed)
    up = Up(tmp_path, MANY)
    try:
        up.wait_for_steps(draw.randrange(1, 60))
        cluster.kill_node(draw.randrange(2))
        up.wait_for("starting it again")
        up.wait_for_steps(10)
        assert "has joined again" not in up.notes
        cluster.add_node()
        up.wait_for("has joined again")
        up.wait_for_steps(10)
        up.process.send_signal(signal.SIGINT)
        assert up.process.wait(WITHIN_S) == 130, up.notes
    finally:
        up.process.kill()
    up.check_nothing_is_left(cluster)


@pytest.mark.long
def test_agents_end_where_the_command_is_killed(cluster: RayCluster, tmp_path: Path) -> None:
    up = Up(tmp_path, MANY)
    up.wait_for_steps(5)
    up.process.kill()
    assert up.process.wait(WITHIN_S) == -signal.SIGKILL
    check_nothing_is_left(cluster, up.token)


@pytest.mark.long
def test_more_agents_than_nodes_are_refused(cluster: RayCluster, tmp_path: Path) -> None:
    launcher = RayLauncher(RayOptions())
    launcher.check()
    agent = AgentSpec(name=secrets.token_hex(4), arguments=("--device", "cpu"), ticket="isthmus1-none")
    with pytest.raises(PeerError, match=f"Ray has {NODES} nodes with 1 or more CPUs, expected {NODES + 1}"):
        launcher.start([agent] * (NODES + 1), tmp_path, lambda name, line: None)
    launcher.stop()
    check_nothing_is_left(cluster, agent.name)


@pytest.mark.long
def test_a_killed_executor_costs_nothing_but_time(cluster: RayCluster, tmp_path: Path) -> None:
    """Each sees half of one GPU of its node. A lost one is started again."""

    def kill_one(run: Trained) -> None:
        for name in ("executor-0", "executor-1"):
            seen = [Path(f"/proc/{pid}/environ").read_bytes() for pid in processes_with(f"--name {name}")]
            assert seen and all(re.search(rb"\0CUDA_VISIBLE_DEVICES=[01]\0", found) for found in seen)
        kill_agent("executor-0")
        run.wait_for("executor-0 was lost")

    run = Trained(tmp_path / "ray", {**ON_RAY, **LONG, "runtime.ray.gpus": 0.5}, kill_one)
    assert run.bits == Trained(tmp_path / "alone", {**LONG, "runtime.scheme": "sp"}).bits
    assert any("starting it again" in note for note in run.notes)
    executors_left_nothing(cluster, tmp_path)


def test_there_must_be_room_for_executors(cluster: RayCluster, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"runtime\.executors: got 5, expected at most {NODES}: so many with"):
        Trained(tmp_path, {**ON_RAY, "runtime.executors": 5})
    with pytest.raises(UserError, match=r"runtime\.ray: got cpus = 1, gpus = 3 for each executor: no node"):
        Trained(tmp_path, {**ON_RAY, "runtime.ray.gpus": 3})
    assert not cluster.groups() and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("", "no Ray cluster was started on this machine: start one with `ray start --head`"),
        ("http://127.0.0.1:8265", "address: got 'http://127.0.0.1:8265', expected HOST:PORT"),
        ("127.0.0.1:9", "no Ray cluster at 127.0.0.1:9: Connection refused: start one with"),
    ],
)
def test_a_cluster_that_is_not_there(
    address: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(UserError, match=re.escape(f"--on ray: {reason}")):
        open_launcher("ray", {"address": address}).check()


TOKEN = "0123456789abcdef0123456789abcdef0123"
CHECK = """
import sys
from isthmus.errors import UserError
from isthmus.runtime.launchers.launcher import open_launcher
try:
    open_launcher("ray", {"address": sys.argv[1]}).check()
except UserError as e:
    print(e)
else:
    print("connected")
"""
WITH_A_TOKEN = """
import json, os, subprocess, sys
from tests.launchers.ray_cluster import RayCluster
with RayCluster(1) as cluster:
    plain = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH_")}
    words = [sys.executable, "-c", sys.argv[1], cluster.address]
    for given in json.loads(sys.argv[2]):
        print(subprocess.run(words, env=plain | given, capture_output=True, text=True).stdout.splitlines()[-1])
"""


@pytest.mark.long
def test_a_cluster_that_wants_a_token_says_so() -> None:
    """Ray reads once in a process how it authenticates. Ray itself tries for 20 s and says "Failed to connect"."""
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
    given = json.dumps([{}, token | {"RAY_AUTH_TOKEN": TOKEN[::-1]}, token])
    words = [sys.executable, "-c", WITH_A_TOKEN, CHECK, given]
    done = subprocess.run(words, env={**os.environ, **token}, capture_output=True, text=True)
    without, another, with_it = done.stdout.splitlines()
    said = (
        r"--on ray: the cluster at \S+ wants its token: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN to what `ray get-"
    )
    assert re.match(said, without) and re.match(said, another) and with_it == "connected"


def test_a_ray_that_is_missing_or_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "__version__", "2.9.3")
    with pytest.raises(UserError, match=r"Ray 2\.9\.3 is too old, expected 2\.60 or newer: pip install"):
        open_launcher("ray", {}).check()
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"--on ray needs ray: pip install '.\[ray\]'"):
        open_launcher("ray", {}).check()
