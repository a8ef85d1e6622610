"""`isthmus up --on local`: a run from beginning to end, with a lost agent, and by Ctrl-C."""

from __future__ import annotations

import inspect
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

import isthmus
from isthmus.api.serving_fleet import UpChoices, agent_names, agent_specs, check_not_public, numbered_names
from isthmus.cli.fleet_commands import UpOptions
from isthmus.errors import UserError
from isthmus.fleet import load_fleet
from isthmus.runtime.launchers import launcher, ray_connection
from tests.federated.test_federated_runs import model, write
from tests.fleet_service.parties import soon
from tests.runtime.test_lora_runs import lora_job

from .agents import kill_agent, processes_with
from .ssh_program import put_in_path

WITHIN_S = 300.0
JOB = """
name = "digits"
fleet = "fleet.toml"
planner = "even"

[model]
name = "mlp"

[data]
kind = "digits"

[plan]
data_holder = "NAME-LAST"

[training]
steps = 100
"""
DEVICE = """
[[device]]
name = "NAME"
region = "here"
compute = "10 GFLOPS"
memory = "1 GiB"
"""


def _job(folder: Path, devices: int = 3) -> Path:
    """The names of its devices are the folder's own, for processes to be found by."""
    names = [f"{folder.name}-{n}" for n in range(devices)]
    links = '[links]\ndefault = { latency = "1 ms", bandwidth = "1 Gbit/s" }\n'
    (folder / "fleet.toml").write_text('name = "here"\n' + "".join(DEVICE.replace("NAME", n) for n in names) + links)
    job = folder / "job.toml"
    job.write_text(JOB.replace("NAME-LAST", names[-1]))
    return job


class _Up:
    """The command, in a process of its own."""

    def __init__(self, folder: Path, devices: int, *options: str) -> None:
        self.printed = folder / "printed"
        command = [sys.executable, "-m", "isthmus", "up", str(_job(folder, devices)), "--on", "local", *options]
        with self.printed.open("wb") as file:
            self.process = subprocess.Popen(command, cwd=folder, stdout=file, stderr=file)

    def has(self, text: str) -> bool:
        assert self.process.poll() is None, self.printed.read_text()
        return text in self.printed.read_text()

    def ended(self) -> int:
        return self.process.wait(WITHIN_S)


def _check_nothing_left(folder: Path) -> None:
    soon(lambda: not processes_with(f"{folder.name}-"), 30.0)
    assert list(folder.rglob("*.pem")) == [] and list(folder.rglob("*.sqlite")) == []
    assert not [p for p in folder.rglob("*") if p.is_file() and b"isthmus1-" in p.read_bytes()]
    found = re.search(r"listening on 127.0.0.1:(\d+)", (folder / "printed").read_text())
    assert found is not None
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(found[1])), timeout=60)


def test_a_run_goes_on_with_the_replacement_of_a_lost_agent(tmp_path: Path) -> None:
    """The lost one alone may read the data: without its replacement there is no plan."""
    up = _Up(tmp_path, 2, "--nodes", "2", "--run", "run")
    lost = f"{tmp_path.name}-1"
    soon(lambda: up.process.poll() is not None or (tmp_path / "run" / "losses.jsonl").is_file(), WITHIN_S)
    kill_agent(lost)
    assert up.ended() == 0, up.printed.read_text()
    printed = up.printed.read_text()
    assert f"{lost} was lost" in printed and f"{lost} has joined again" in printed
    # A copy of its state may be newer than the last report of the lost one, and then a step's loss is lost with it.
    steps = [point.step for point in isthmus.Run(tmp_path / "run").losses]
    assert len(steps) >= 99 and steps[-1] == 100 and steps == sorted(set(steps)), steps
    log = (tmp_path / "run" / "agents.log").read_text()
    assert log.count(f"{lost}: in the fleet as {lost}") == 2, log
    _check_nothing_left(tmp_path)


def test_ctrl_c_while_agents_join_leaves_nothing(tmp_path: Path) -> None:
    up = _Up(tmp_path, 1)
    soon(lambda: up.has("listening on"), WITHIN_S)
    soon(lambda: processes_with(f"{tmp_path.name}-"), WITHIN_S)
    up.process.send_signal(signal.SIGINT)
    assert up.ended() == 130, up.printed.read_text()
    _check_nothing_left(tmp_path)
    assert not (tmp_path / "runs").exists(), "nothing was run"


@pytest.mark.long
def test_agents_end_with_a_command_that_is_killed_and_it_can_be_given_again(tmp_path: Path) -> None:
    up = _Up(tmp_path, 1, "--run", "run")
    soon(lambda: up.has("is here"), WITHIN_S)
    up.process.kill()
    assert up.ended() == -signal.SIGKILL
    soon(lambda: not processes_with(f"{tmp_path.name}-"), 60.0)
    again = _Up(tmp_path, 1, "--run", "run", "--set", "training.steps=3")
    assert again.ended() == 0, again.printed.read_text()
    _check_nothing_left(tmp_path)


@pytest.mark.parametrize(
    ("on", "how", "reason"),
    [
        ("lokal", {}, "unknown --on 'lokal': did you mean 'local'"),
        ("local", {"options": {"hosts": "a"}}, "unknown --on local: option 'hosts'"),
        ("local", {"nodes": 2}, "--nodes: got 2, but fleet 'here' names 3 machines"),
        ("local", {"measure": True}, "--nodes: got none"),
        ("local", {"nodes": 0, "measure": True}, "--nodes: got 0, expected 1 or more"),
        ("local", {"devices_per_node": "few"}, "--devices-per-node: got 'few', expected auto, island or a number"),
        ("local", {"timeout": "0 s"}, "--timeout: got '0 s', expected"),
        ("local", {"nodez": 2}, "unknown up argument 'nodez': did you mean 'nodes'"),
        ("ssh", {}, "--on ssh: hosts: got no host"),
        ("ssh", {"options": {"hosts": "-oProxyCommand=x"}}, "expected HOST or USER@HOST"),
        ("ssh", {"options": {"host_file": "none"}}, "--on ssh: host_file none: cannot be read: No such file"),
        ("ssh", {"options": {"hosts": "a", "host_file": "b"}}, "got hosts and host_file, expected one of the two"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(on: str, how: dict[str, object], reason: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as raised:
        isthmus.up(_job(tmp_path), on, overrides={"fleet": str(tmp_path / "fleet.toml")}, run=tmp_path / "run", **how)
    assert reason in str(raised.value) and "\n" not in str(raised.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_a_federated_job_gives_the_bits_of_this_machine(tmp_path: Path) -> None:
    """Its clients keep states."""
    job = write(tmp_path)
    run = isthmus.up(job, "local", nodes=2, run=tmp_path / "up")
    assert run.outcome == "done"
    isthmus.federate(job, run=tmp_path / "here")
    assert model(tmp_path / "up") == model(tmp_path / "here")
    assert not list((tmp_path / "up").rglob("*.pem"))


@pytest.mark.long
def test_agents_of_this_machine_have_the_modules_and_the_data_of_the_job(tmp_path: Path) -> None:
    """Beside the job's file, wherever the command is called: an algorithm, a model and a data file of one's own."""
    command = [sys.executable, "-m", "isthmus"]
    folder, options = tmp_path / "own", ["--on", "local", "--nodes", "2", "--set", "federated.rounds=1"]
    subprocess.run([*command, "init", str(folder), "--task", "federated"], check=True, timeout=WITHIN_S)
    np.savez(folder / "own.npz", pixel_values=np.ones((600, 1, 8, 8), np.float32), labels=np.arange(600) % 10)
    text = (folder / "job.toml").read_text().replace('"digits"', '"npz"')
    (folder / "job.toml").write_text(text.replace("{ holdout = 0.2 }", '{ path = "own.npz", holdout = 0.2 }'))
    for where, job in ((folder, "job.toml"), (tmp_path, "own/job.toml")):
        up = [*command, "up", job, *options]
        subprocess.run([*up, "--run", str(tmp_path / f"run-{where.name}")], cwd=where, check=True, timeout=WITHIN_S)
    assert model(tmp_path / f"run-{folder.name}") == model(tmp_path / f"run-{tmp_path.name}")


@pytest.mark.long
@pytest.mark.parametrize("kind", ["a pipeline", "devices", "averaged"])
def test_replicas_train_on_agents(kind: str, tmp_path: Path) -> None:
    """One that is a pipeline and merges alone; each device alone, which merge; two that sum their gradients, as the
    fleet file says that devices are slow."""
    file, names = _job(tmp_path, 2), [f"{tmp_path.name}-{n}" for n in range(2)]
    file.write_text(file.read_text().replace("[plan]", "").replace(f'data_holder = "{names[-1]}"', ""))
    fleet = tmp_path / "fleet.toml"
    fleet.write_text(fleet.read_text().replace("10 GFLOPS", "1 MFLOPS"))
    groups = [names] if kind == "a pipeline" else "devices"
    sync = {"sync.mode": "decoupled", "sync.decoupled": {"fragments": 2, "replicas": groups}}
    averaged = {"planner": "auto", "training.steps": 4}
    overrides = {"fleet": str(fleet), "runtime.emulate": False, **(averaged if kind == "averaged" else sync)}
    run = isthmus.up(file, "local", nodes=2, run=tmp_path / "run", overrides=overrides)
    assert run.outcome == "done"
    if kind == "averaged":
        assert len(run.plan.replicas) == 2
        alone = isthmus.train(file, run=tmp_path / "alone", overrides=overrides, quiet=True)
        assert [p.loss for p in run.losses] == pytest.approx([p.loss for p in alone.losses])
        return
    assert run.losses[-1].step == 100
    merged = {c.replica for line in run.merges for f in line.merge.fragments for c in f.contributions}
    assert merged and merged <= ({"+".join(names)} if kind == "a pipeline" else set(names))


@pytest.mark.long
def test_agents_read_weights_from_where_the_job_says(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """They are the caller's own, so that no owner has to name the URL."""
    job = lora_job(tmp_path, "llama")
    options = {**job.model.options, "path": f"file://{tmp_path / 'base'}"}
    isthmus.up(
        msgspec.structs.replace(job, model=msgspec.structs.replace(job.model, options=options)),
        on="local",
        run=tmp_path / "run",
    )
    assert "come from the coordinator" not in capfd.readouterr().err


def test_an_unreachable_host_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", put_in_path(tmp_path / "bin", os.environ["PATH"]))
    options = {"hosts": "unreachable,127.0.0.1", "python": sys.executable}
    with pytest.raises(UserError, match=r"--on ssh: unreachable: ssh: connect to host .* Connection refused; expected"):
        isthmus.up(_job(tmp_path), "ssh", options=options, measure=True)


def test_agents_of_a_fleet_have_the_names_of_its_machines(tmp_path: Path) -> None:
    _job(tmp_path, 2)
    fleet = load_fleet(tmp_path / "fleet.toml")
    asked = UpChoices(engine="local")
    names = agent_names(asked, fleet, None)
    assert names == fleet.names
    (spec, _) = agent_specs(names, asked, fleet, Path())
    assert "--devices" not in spec.arguments, "each machine is one device there"
    (spec,) = agent_specs(agent_names(asked, None, 1), asked, None)
    assert (spec.name, spec.arguments[-2:]) == (*numbered_names(1), ("--devices", "auto"))


@pytest.mark.parametrize(("address", "refused"), [("8.8.8.8", True), ("10.0.0.1", False), ("node.example", False)])
def test_no_public_address_is_taken_by_default(address: str, refused: bool) -> None:
    if refused:
        with pytest.raises(UserError, match=r"--host: .* a public"):
            check_not_public(address)
    else:
        check_not_public(address)


def test_the_help_names_every_engine() -> None:
    said = inspect.signature(UpOptions, eval_str=True).parameters["engine"].annotation.__metadata__[0].help
    for name in launcher._OURS:
        assert name in said, name


@pytest.mark.parametrize("mode", ["", "token"])
def test_a_ray_cluster_that_lets_nobody_in_says_how_to_give_a_token(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray", reason="ray is not installed")
    monkeypatch.setenv("RAY_AUTH_MODE", mode)

    def init(*_: object, **__: object) -> None:
        raise ConnectionError("no answer")

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(UserError, match="cannot be used: no answer") as refused:
        ray_connection._connect(ray, "192.0.2.1:6379", ray_connection.LAUNCHER)
    assert ("RAY_AUTH_TOKEN_PATH" in str(refused.value)) is (mode != "token")
