"""Every file that a coordinator and a device keep, damaged in every way: one line that names it, and exit code 2."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from isthmus.api import serve
from isthmus.api.join import JoinOptions, join_as
from isthmus.api.observer import Silent
from isthmus.api.serve import Serving
from isthmus.errors import IsthmusError, UserError
from isthmus.runtime.identity import Identity
from isthmus.runtime.service.agent import Agent, join_fleet, membership_in
from isthmus.runtime.service.job_queue import JobQueue

from .parties import Fleet, serving

SERVING = Serving(host="127.0.0.1", port=0, addresses=(), tickets=1, timeout="5 s")
STATE = (
    "authority.key",
    "authority.pem",
    "roster.sqlite",
    "jobs.sqlite",
    "coordinator/key.pem",
    "coordinator/certificate.pem",
    "coordinator/authority.pem",
    "addresses.json",
    "serving.claim",
    "jobs.claim",
    "status.json",
)
DEVICE = ("key.pem", "certificate.pem", "authority.pem", "membership.json")
WRITTEN_ANEW = {"addresses.json", "serving.claim", "jobs.claim", "status.json"}
"""By each coordinator that starts: what was in them is of no use, and only what is no file is in the way."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What a coordinator and one device of each of two fleets have on their disks."""
    made = tmp_path_factory.mktemp("fleets")
    for name in ("ours", "theirs"):
        with serving(made / name / "fleet") as fleet:
            join_fleet(fleet.ticket(), {"desk": made / name / "device"}, 5.0)
            queue = JobQueue(fleet.state.folder)
            queue.submit("small", "pipeline", b"{}", made)
            with fleet.state.served(), queue.served():
                pass
            queue.close()
            status_file = (fleet.state.folder / "status.json").read_bytes()
        (made / name / "fleet" / "status.json").write_bytes(status_file)  # as of one that was killed
    return {name: made / name for name in ("ours", "theirs")}


def _empty(path: Path, theirs: Path) -> None:
    path.write_bytes(b"")


def _torn(path: Path, theirs: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _random(path: Path, theirs: Path) -> None:
    path.write_bytes(bytes((7 * n * n + 3 * n + 1) % 251 for n in range(max(64, path.stat().st_size))))


def _zeros(path: Path, theirs: Path) -> None:
    path.write_bytes(bytes(max(64, path.stat().st_size)))


def _another_fleets(path: Path, theirs: Path) -> None:
    shutil.copy(theirs, path)


def _directory(path: Path, theirs: Path) -> None:
    path.unlink()
    path.mkdir()


def _unreadable(path: Path, theirs: Path) -> None:
    """As a file of mode 000 is, for root too."""
    path.unlink()
    path.symlink_to(path.name)


Damage = Callable[[Path, Path], None]
DAMAGES: tuple[Damage, ...] = (_empty, _torn, _random, _zeros, _another_fleets, _directory, _unreadable)


def _serve(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`isthmus serve`, ended at once."""
    monkeypatch.setattr(serve, "run_queue", _look_into_queue)
    serve.serve_submitted(msgspec.structs.replace(SERVING, state=folder), Silent(), lambda _: Silent())


def _look_into_queue(service: object, queue: JobQueue, *_: object) -> int:
    with queue.served():
        return len(queue.jobs())


def _join(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`isthmus join`, ended at once."""
    monkeypatch.setattr(Agent, "run", lambda _: None)
    join_as(JoinOptions(state=folder, timeout="5 s"), lambda _: None, lambda: "")


def _check_refused(act: Callable[[], None], name: str) -> None:
    with pytest.raises(IsthmusError) as found:
        act()
    text = str(found.value)
    assert isinstance(found.value, UserError) and found.value.exit_code == 2
    assert Path(name).name in text and "\n" not in text and len(text) < 600, text
    assert any(remedy in text for remedy in ("put back", "remove", "join again")), f"what to do: {text}"


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", STATE)
def test_a_coordinators(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, damage: Damage
) -> None:
    shutil.copytree(folders["ours"] / "fleet", tmp_path / "fleet")
    damage(tmp_path / "fleet" / name, folders["theirs"] / "fleet" / name)
    if name in WRITTEN_ANEW and damage not in (_directory, _unreadable):
        _serve(tmp_path / "fleet", monkeypatch)
    elif name in ("addresses.json", "status.json") and damage is _unreadable:
        _serve(tmp_path / "fleet", monkeypatch)  # a new file takes the place of the link
    else:
        _check_refused(lambda: _serve(tmp_path / "fleet", monkeypatch), name)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", DEVICE)
def test_a_devices(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, damage: Damage
) -> None:
    shutil.copytree(folders["ours"] / "device", tmp_path / "device")
    damage(tmp_path / "device" / name, folders["theirs"] / "device" / name)
    _check_refused(lambda: _join(tmp_path / "device", monkeypatch), name)


@pytest.mark.parametrize("names", [("authority.pem",), ("authority.key",), ("authority.pem", "authority.key")])
def test_an_authority_that_is_gone_is_not_made_anew(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]
) -> None:
    kept = shutil.copytree(folders["ours"] / "fleet", tmp_path / "fleet")
    for name in names:
        (kept / name).unlink()
    before = {path.name: path.read_bytes() for path in kept.glob("authority.*")}
    _check_refused(lambda: _serve(kept, monkeypatch), names[0])
    assert {path.name: path.read_bytes() for path in kept.glob("authority.*")} == before
    for name in names:
        shutil.copy2(folders["ours"] / "fleet" / name, kept / name)
    _serve(kept, monkeypatch)


@pytest.mark.parametrize("name", ["roster.sqlite", "jobs.sqlite"])
def test_somebody_elses_database(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    kept = shutil.copytree(folders["ours"] / "fleet", tmp_path / "fleet")
    (kept / name).unlink()
    with contextlib.closing(sqlite3.connect(kept / name)) as database:
        database.execute("CREATE TABLE other (number)")
    _check_refused(lambda: _serve(kept, monkeypatch), name)


def test_what_is_whole_is_taken(folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {path.relative_to(folders["ours"] / "fleet").as_posix() for path in folders["ours"].glob("fleet/**/*.*")}
    assert {name for name in files if not name.startswith("roster.sqlite-")} == set(STATE), "all of them are damaged"
    shutil.copytree(folders["ours"], tmp_path / "ours")
    _serve(tmp_path / "ours" / "fleet", monkeypatch)
    _join(tmp_path / "ours" / "device", monkeypatch)
    found = membership_in(tmp_path / "ours" / "device")
    assert found is not None and Identity(tmp_path / "ours" / "device").complete


@pytest.mark.parametrize("damage", [_empty, _torn, _random, _directory])
def test_the_addresses_that_tickets_name(fleet: Fleet, tmp_path: Path, damage: Damage) -> None:
    damage(fleet.state.folder / "addresses.json", tmp_path)
    with pytest.raises(UserError, match=r"addresses\.json: cannot be read: .*remove it and start"):
        fleet.ticket()
