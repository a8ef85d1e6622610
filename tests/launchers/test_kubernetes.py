"""Kubernetes: manifests by their published schemas, and a JobSet's life on a small API server on loopback."""

from __future__ import annotations

import copy
import socket
import sys
from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import msgspec
import pytest
import yaml

from isthmus.errors import PeerError, UserError
from isthmus.runtime.launchers.kubernetes import KubernetesLauncher, Pod
from isthmus.runtime.launchers.launcher import AgentSpec, AgentState, open_launcher
from tests.fleet_service.parties import soon

from .api_server import JOBSETS, PODS, SECRETS, ApiServer, serving_api
from .schemas import check_manifest
from .test_contract import Case, check_engine

IMAGE = "registry.example.org/isthmus:1"


def _launcher(**options: object) -> KubernetesLauncher:
    found = open_launcher("kubernetes", {"image": IMAGE, **options})
    assert isinstance(found, KubernetesLauncher)
    return found


def _specs(*names: str, island: bool = False) -> list[AgentSpec]:
    return [AgentSpec(name=name, arguments=("--relayed",), island=island, ticket=f"isthmus1-{name}") for name in names]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[ApiServer]:
    with serving_api(tmp_path) as (server, config):
        monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(config))
        yield server


def _manifests(launcher: KubernetesLauncher, specs: list[AgentSpec]) -> list[Any]:
    return list(yaml.safe_load_all(launcher.render(specs, Path())))


EVERY_OPTION = {
    "namespace": "lab",
    "gpus_per_node": 8,
    "cpu": "4",
    "memory": "16Gi",
    "volume": "claim",
    "bucket": "my-bucket",
}


@pytest.mark.parametrize("options", [{}, EVERY_OPTION], ids=["plain", "every option"])
def test_manifests_are_as_their_schemas_demand(options: dict[str, object]) -> None:
    specs = _specs("desk", "rack/1", island=True)
    launcher = _launcher(**options)
    secret, jobset = _manifests(launcher, specs)
    check_manifest(secret)
    check_manifest(jobset)
    assert "isthmus1-" not in launcher.render(specs, Path()), "no ticket is shown"
    assert set(secret["stringData"]) == {"0", "1"}
    (job,) = jobset["spec"]["replicatedJobs"]
    assert (job["template"]["spec"]["completions"], job["template"]["spec"]["completionMode"]) == (2, "Indexed")
    pod = job["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert "1) exec python3 -m torch.distributed.run" in container["command"][2]
    if options:
        assert container["resources"] == {
            "requests": {"cpu": "4", "memory": "16Gi"},
            "limits": {"memory": "16Gi", "nvidia.com/gpu": "8"},
        }
        assert {"name": "state", "persistentVolumeClaim": {"claimName": "claim"}} in pod["volumes"]


@pytest.mark.parametrize(
    ("at", "value"),
    [
        (("spec", "replicatedJobs", 0, "template", "spec", "paralelism"), 2),
        (("spec", "replicatedJobs", 0, "replicas"), "1"),
        (("spec", "replicatedJobs", 0, "template", "spec", "template", "spec", "volumes", 0, "secret"), "tickets"),
        (("spec", "network", "enableDNSHostnames"), "yes"),
    ],
    ids=lambda value: str(value[-1]) if isinstance(value, tuple) else "",
)
def test_the_schemas_refuse_what_is_wrong(at: tuple[str | int, ...], value: object) -> None:
    _, jobset = _manifests(_launcher(), _specs("desk"))
    wrong: Any = copy.deepcopy(jobset)
    inner = wrong
    for key in at[:-1]:
        inner = inner[key]
    inner[at[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        check_manifest(wrong)


def test_requests_and_what_is_left(server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for bound in ("LOOK_S", "ASK_S"):
        monkeypatch.setattr(f"isthmus.runtime.launchers.kubernetes.{bound}", 0.05)
    launcher, specs = _launcher(python=_words(tmp_path)), _specs("desk", "rack/1")
    launcher.check()
    assert launcher.head == "127.0.0.1"
    said: list[tuple[str, str]] = []
    launcher.start(specs, tmp_path, lambda name, line: said.append((name, line)))
    (name,) = server.jobsets
    assert server.secrets[name]["stringData"] == {"0": "isthmus1-desk", "1": "isthmus1-rack/1"}
    for pod in list(server.pods.values()):
        assert pod.process.wait(30) == 0
    assert launcher.states() == {"desk": AgentState.ENDED, "rack/1": AgentState.ENDED}

    soon(lambda: {name for name, _ in said} == {"desk", "rack/1"})

    replaced = next(pod.name for pod in server.pods.values() if pod.number == 1)
    launcher.restart(AgentSpec(name="rack/1", ticket="isthmus1-new"))
    assert replaced not in server.pods and server.secrets[name]["stringData"]["1"] == "isthmus1-new"
    for pod in list(server.pods.values()):
        assert pod.process.wait(30) == 0
    soon(lambda: len({_state(line) for name, line in list(said) if name == "rack/1"}) == 2)

    launcher.stop()
    launcher.stop()
    assert not (server.jobsets or server.secrets or server.pods)
    made = [request for request in server.requests if request[0] != "GET"]
    assert made == [
        ("POST", SECRETS),
        ("POST", JOBSETS),
        ("PATCH", f"{SECRETS}/{name}"),
        ("DELETE", f"{PODS}/{replaced}"),
        ("DELETE", f"{JOBSETS}/{name}"),
        ("DELETE", f"{SECRETS}/{name}"),
    ]


def _state(line: str) -> str:
    """The state folder in an agent's command line."""
    words = line.split()
    return words[words.index("--state") + 1]


def _words(folder: Path) -> str:
    """A program in place of Python, which prints its arguments and nothing of its input."""
    path = folder / "words"
    path.write_text('#!/bin/sh\necho "$@"\n')
    path.chmod(0o755)
    return str(path)


def test_a_refusal_leaves_nothing(server: ApiServer, tmp_path: Path) -> None:
    server.refuse["POST", JOBSETS] = 403
    launcher = _launcher()
    with pytest.raises(PeerError, match="the API server refused jobset: 403"):
        launcher.start(_specs("desk"), tmp_path, lambda *_: None)
    launcher.stop()
    assert not server.secrets, "no ticket is left"


def test_a_jobset_that_failed_has_lost_its_agents(server: ApiServer, tmp_path: Path) -> None:
    launcher = _launcher(python=_words(tmp_path))
    launcher.start(_specs("desk"), tmp_path, lambda *_: None)
    for jobset in server.jobsets.values():
        jobset["status"] = {"conditions": [{"type": "Failed", "status": "True"}]}
    assert launcher.states() == {"desk": AgentState.LOST}
    launcher.stop()


@pytest.mark.parametrize(
    ("phase", "container", "expected"),
    [
        ("Pending", None, AgentState.QUEUED),
        ("Pending", {"waiting": {"reason": "ContainerCreating"}}, AgentState.STARTING),
        ("Running", {"running": {}}, AgentState.RUNNING),
        ("Running", {"terminated": {"exitCode": 2}}, AgentState.STARTING),
        ("Running", {"waiting": {"reason": "CrashLoopBackOff"}}, AgentState.LOST),
        ("Succeeded", {"terminated": {"exitCode": 0}}, AgentState.ENDED),
        ("Failed", {"terminated": {"exitCode": 137}}, AgentState.LOST),
        ("Unknown", {"running": {}}, AgentState.STARTING),
    ],
)
def test_states_of_pods(phase: str, container: dict[str, Any] | None, expected: AgentState) -> None:
    status = {"phase": phase, "containerStatuses": [{"state": container}] if container else []}
    assert msgspec.convert({"metadata": {"name": "p"}, "status": status}, Pod).state is expected


def test_what_is_missing_is_said_in_one_line(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="up --on kubernetes: option image: got none, expected a container image"):
        _launcher(image="").check()
    with pytest.raises(
        UserError, match=r"up --on kubernetes: no cluster is configured \(.*nowhere.*\): set KUBECONFIG"
    ):
        _launcher(context="nowhere").check()
    server.refuse["GET", JOBSETS] = 404
    with pytest.raises(UserError, match=r"404 .*: install JobSet: kubectl apply --server-side -f https://"):
        _launcher().check()
    server.refuse["GET", JOBSETS] = 401
    with pytest.raises(UserError, match=r"401 .*: the cluster does not know this context's credentials: log in again"):
        _launcher().check()
    server.refuse["GET", JOBSETS] = 403
    with pytest.raises(UserError, match=r"refused jobsets: 403 .*: ask for a role with jobsets"):
        _launcher().check()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    config = Path(tmp_path / "kubeconfig")
    config.write_text(config.read_text().replace("http://127.0.0.1:", f"http://127.0.0.1:{port}/?"))
    with pytest.raises(UserError, match=r"up --on kubernetes: the API server at 127.0.0.1 does not answer .*start the"):
        _launcher().check()
    monkeypatch.setitem(sys.modules, "kubernetes", SimpleNamespace(__version__="27.2.0"))
    with pytest.raises(UserError, match=r"needs kubernetes 28, got 27.2.0: pip install '.\[kubernetes\]'"):
        _launcher().check()
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(UserError, match=r"up --on kubernetes needs kubernetes: pip install '.\[kubernetes\]'"):
        _launcher().check()


@pytest.mark.long
def test_agents_in_pods_are_as_of_every_engine(server: ApiServer, tmp_path: Path) -> None:
    check_engine("kubernetes", Case(lambda _: {"image": IMAGE, "python": sys.executable}), tmp_path)
    assert not (server.jobsets or server.secrets or server.pods)
