"""What every engine does for a fleet, on this machine."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from isthmus.runtime.launchers.launcher import AgentSpec, AgentState, open_launcher
from isthmus.runtime.service import fleet_coordinator
from tests.fleet_service.parties import Fleet, serving, soon
from tests.tiers import represented_by

from .agents import command_lines, kill_agent, processes_with
from .ssh_program import put_in_path

WITHIN_S = 300.0


class Case(NamedTuple):
    """How an engine is tried."""

    options: Callable[[Path], Mapping[str, object]] = lambda folder: {}
    """Of the engine; they may prepare something in the folder."""
    kill: Callable[[str], None] = kill_agent
    """Ends the agent of this name by force."""
    prepare: Callable[[Path, pytest.MonkeyPatch], None] = lambda folder, patch: None
    """What the engine needs of the environment."""


def _ssh_here(folder: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("PATH", put_in_path(folder / "bin", os.environ["PATH"]))
    remote = folder / "remote"
    remote.mkdir()
    patch.setenv("TMPDIR", str(remote))


def _ssh_options(folder: Path) -> Mapping[str, object]:
    return {"hosts": "127.0.0.1,localhost", "python": sys.executable, "folder": str(folder)}


ENGINES = {
    "local": Case(),
    "ssh": Case(_ssh_options, prepare=_ssh_here),
    "slurm": Case(lambda _: {"cluster": "local"}),
}


def _spec(fleet: Fleet, name: str) -> AgentSpec:
    arguments = ("--device", "cpu", "--timeout", "30 s")
    return AgentSpec(name=name, arguments=arguments, ticket=fleet.state.ticket())


@pytest.mark.parametrize("engine", represented_by(ENGINES, "ssh"))
def test_agents_start_are_watched_start_again_and_end(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_coordinator, "WATCH_S", 0.2)
    ENGINES[engine].prepare(tmp_path, monkeypatch)
    check_engine(engine, ENGINES[engine], tmp_path)


def check_engine(engine: str, case: Case, tmp_path: Path) -> list[str]:
    """Of an engine that is there: what its agents printed."""
    token = secrets.token_hex(4)
    first, second = f"{token}-0", f"{token}-1"
    folder, said = tmp_path / "private", list[tuple[str, str]]()
    folder.mkdir(mode=0o700)
    with serving(tmp_path / "fleet", timeout_s=30.0) as fleet:
        launcher = open_launcher(engine, case.options(tmp_path))
        launcher.check()
        specs = [_spec(fleet, name) for name in (first, second)]
        try:
            launcher.start(specs, folder, lambda name, line: said.append((name, line)))
            assert set(launcher.states()) == {first, second}
            soon(lambda: fleet.service.present == {first, second}, WITHIN_S)
            soon(lambda: set(launcher.states().values()) == {AgentState.RUNNING}, WITHIN_S)

            case.kill(first)
            soon(lambda: launcher.states()[first] is AgentState.LOST, WITHIN_S)
            assert launcher.states()[second] is AgentState.RUNNING
            if launcher.restarts:
                specs.append(_spec(fleet, first))
                soon(lambda: first not in fleet.service.present, WITHIN_S)
                fleet.service.revoke(first)
                launcher.restart(specs[-1])
                soon(lambda: fleet.service.present == {first, second}, WITHIN_S)
                soon(lambda: launcher.states()[first] is AgentState.RUNNING, WITHIN_S)

            for name in (first, second):
                soon(lambda name=name: any(n == name and "in the fleet as" in line for n, line in list(said)), WITHIN_S)
            _check_secret(specs, tmp_path, said)
        finally:
            launcher.stop()
        soon(lambda: not processes_with(token), WITHIN_S)
        assert list(folder.iterdir()) == [], "what the launcher kept is removed"
        left = [path for path in tmp_path.rglob("*.pem") if tmp_path / "fleet" not in path.parents]
        assert left == [], "agents leave no key"
        launcher.stop()  # again is no error
        soon(lambda: fleet.service.present == frozenset(), WITHIN_S)
    return [line for _, line in said]


def _check_secret(specs: list[AgentSpec], folder: Path, said: list[tuple[str, str]]) -> None:
    """No ticket is in a command line, in what was printed, in a file, or in how an agent is shown."""
    texts = [" ".join(line) for line in command_lines().values()] + [line for _, line in list(said)]
    texts += [path.read_bytes().decode(errors="replace") for path in folder.rglob("*") if path.is_file()]
    for spec in specs:
        assert spec.ticket not in repr(spec)
        assert [text for text in texts if spec.ticket in text] == []


def test_an_agent_that_cannot_join_is_lost_and_says_why(tmp_path: Path) -> None:
    launcher, said = open_launcher("local", {}), list[str]()
    spec = AgentSpec(name="n0", arguments=("--device", "cpu"), ticket="isthmus1-none")
    launcher.start([spec], tmp_path, lambda name, line: said.append(line))
    try:
        soon(lambda: launcher.states()["n0"] is AgentState.LOST, WITHIN_S)
        soon(lambda: any(line.startswith("error: ticket: ") for line in said), WITHIN_S)
    finally:
        launcher.stop()
