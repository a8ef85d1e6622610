"""What the commands of a fleet's folder refuse, and say."""

from __future__ import annotations

import contextlib
import io
import re
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from threading import Timer
from unittest import mock

import msgspec
import pytest

from isthmus.api import serve as serving
from isthmus.errors import PeerError, UserError
from isthmus.locking import hold
from isthmus.protocol import fleet_membership
from isthmus.runtime.identity.database import StoreError
from isthmus.runtime.messages.fleet import DevicePresent
from isthmus.runtime.messages.versions import versions_here
from isthmus.runtime.service import fleet_coordinator
from isthmus.runtime.service.enrollment import check_name
from isthmus.runtime.service.fleet_state import FleetState
from isthmus.runtime.service.job_queue import JobQueue
from isthmus.runtime.service.status_file import CoordinatorStatus, DeviceStatus, LinkStatus, write_status
from tests.runtime.commands import isthmus

from .parties import Fleet, in_background, soon


def test_one_coordinator_serves_a_folder(tmp_path: Path) -> None:
    first, second = FleetState(tmp_path), FleetState(tmp_path)
    with first.served(), pytest.raises(UserError, match="another coordinator serves this fleet"), second.served():
        pass
    with second.served():
        pass
    first.close()
    second.close()


def test_what_others_say_is_no_markup(tmp_path: Path) -> None:
    FleetState(tmp_path).close()
    queue = JobQueue(tmp_path)
    number = queue.submit("[red]small", "pipeline", b"{}", tmp_path)
    queue.begin()
    queue.end(number, "failed", "[data]: [/tmp/x] is not there")
    queue.close()
    done = isthmus("jobs", "--state", str(tmp_path))
    assert done.code == 0 and "[red]small" in done.out
    assert "[data]: [/tmp/x]" in " ".join(done.out.replace("│", " ").split())


@pytest.mark.parametrize("command", [["devices"], ["devices", "--revoke", "bob"], ["ticket"], ["drain", "bob"]])
def test_a_folder_that_was_mistyped_does_not_become_a_fleet(tmp_path: Path, command: list[str]) -> None:
    done = isthmus(*command, "--state", str(tmp_path / "typo"))
    assert done.code == 2 and "no fleet was served from it: start `isthmus serve`" in done.err
    assert not (tmp_path / "typo").exists()


def test_a_device_is_not_drained_before_it_works(tmp_path: Path) -> None:
    state = FleetState(tmp_path)

    def drained() -> str:
        done = isthmus("drain", "bob", "--state", str(tmp_path))
        assert done.code == 2 and state.take_leaving() == []
        return done.err

    assert "no device has joined" in drained()
    state.roster.redeem(state.roster.invite(time.time())[0], {"b" * 32: "bob"}, time.time())
    assert "no coordinator serves this fleet now" in drained()
    bob = DeviceStatus(name="bob", id="b" * 32, working=False)
    write_status(tmp_path, CoordinatorStatus(at_s=time.time(), port=1, devices=(bob,)))
    assert "works for no run" in drained()
    link = LinkStatus(devices=("bob", "eve"), relayed=False, latency_s=0.05, streams=4, bbr=True)
    working = (msgspec.structs.replace(bob, working=True),)
    write_status(tmp_path, CoordinatorStatus(at_s=time.time(), port=1, devices=working, links=(link,)))
    JobQueue(tmp_path).close()
    status = isthmus("status", "--state", str(tmp_path)).out
    assert re.search(r"bob - eve *│ direct *│ 50 ms each way *│ 4, BBR", status)
    assert isthmus("drain", "bob", "--state", str(tmp_path)).code == 0
    assert state.take_leaving() == ["bob"]
    state.close()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["serve", "--host", ""], "--host '': tickets need an address"),
        (["serve", "--host", "0"], "--host '0': tickets need an address"),
        (["serve", "--address", ""], "--address: got '', expected HOST"),
        (["serve", "--timeout", "0 s"], "--timeout: got '0 s', expected 0.1 s to 1 day"),
        (["join", "--timeout", "1e30 s"], "--timeout: got '1e30 s', expected 0.1 s to 1 day"),
    ],
)
def test_what_could_only_fail_later_is_refused(tmp_path: Path, words: list[str], told: str) -> None:
    port = ["--port", "0"] if words[0] == "serve" else []
    done = isthmus(*words, *port, "--state", str(tmp_path))
    assert (done.code, done.out) == (2, "") and told in done.err


@pytest.mark.parametrize(("pasted", "told"), [(b"\n\r\nisthmus1-AAAA\r\n", "cut or changed"), (b"\xff\xfe\n", "got 2")])
def test_a_ticket_on_standard_input_may_be_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pasted: bytes, told: str
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(pasted), encoding="utf-8"))
    done = isthmus("join", "--state", str(tmp_path))
    assert done.code == 2 and f"ticket: {'it is ' if 'cut' in told else ''}{told}" in done.err


def test_one_process_joins_with_a_folder(tmp_path: Path) -> None:
    holds = "import sys; from pathlib import Path; from isthmus.locking import hold; hold(Path(sys.argv[1]), 'taken')"
    holder = subprocess.Popen(
        [sys.executable, "-c", f"{holds}; print('held', flush=True); input()", tmp_path / "joined.claim"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdin is not None and holder.stdout is not None and holder.stdout.readline() == b"held\n"
    done = isthmus("join", "--state", str(tmp_path))
    assert done.code == 2 and "another process has joined with it" in done.err
    holder.communicate(b"\n", timeout=30)
    hold(tmp_path / "joined.claim", "it ended")


def test_a_store_of_another_version_or_a_broken_one_is_named(tmp_path: Path) -> None:
    state = FleetState(tmp_path)
    state.close()
    with contextlib.closing(sqlite3.connect(tmp_path / "jobs.sqlite")) as database:
        database.execute("CREATE TABLE jobs (number INTEGER PRIMARY KEY, what TEXT)")
    done = isthmus("jobs", "--state", str(tmp_path))
    assert done.code == 2 and re.search(r"jobs\.sqlite: is not of isthmus, or of another version", done.err)
    (tmp_path / "jobs.sqlite").write_bytes(bytes(5000))
    done = isthmus("jobs", "--state", str(tmp_path))
    assert done.code == 2 and re.search(r"jobs\.sqlite: .*put back a copy", done.err)


def test_a_full_disk_does_not_end_the_coordinator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queue, said = JobQueue(tmp_path), list[str]()
    number = queue.submit("small", "pipeline", b"x" * 100_000, tmp_path)
    with contextlib.closing(sqlite3.connect(tmp_path / "jobs.sqlite")) as database:
        pages = database.execute("PRAGMA page_count").fetchone()[0]
    full = queue._database._connection  # pyright: ignore[reportPrivateUsage]  # only SQLite can tell it the disk is full
    full.execute(f"PRAGMA max_page_count={pages}")
    with pytest.raises(StoreError, match="full: make room on that disk"):
        queue.submit("large", "pipeline", b"x" * 100_000, tmp_path)
    assert not full.in_transaction
    monkeypatch.setattr(serving, "LOOK_S", 0.01)
    Timer(0.2, lambda: full.execute(f"PRAGMA max_page_count={10 * pages}")).start()
    waited = serving._stored(  # pyright: ignore[reportPrivateUsage]
        lambda: queue.submit("large", "pipeline", b"x" * 100_000, tmp_path), said.append
    )
    assert waited > number and len(said) == 1 and "trying again" in said[0]
    queue.close()


def test_who_is_waited_for_is_said(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_membership, "REMIND_S", 0.2)
    monkeypatch.setattr(fleet_coordinator, "LOOK_S", 0.05)
    monkeypatch.setattr(fleet.state.roster, "here", lambda: {"id of bob", "id of eve"})
    here = contextlib.ExitStack()

    def end(name: str = "bob") -> None:
        with fleet.service.deciding() as membership:
            membership.identify(f"id of {name}", name)
        present = DevicePresent(run="", versions=versions_here())
        here.enter_context(fleet.service.connection(mock.Mock(), mock.Mock(), name, f"id of {name}", present))

    with in_background(lambda: fleet.service.wait_for(["bob"]), end):
        soon(lambda: len(fleet.said) > 1)
        soon(lambda: fleet.service.current_status().awaited == ("bob",))
        write_status(fleet.state.folder, fleet.service.current_status())
        JobQueue(fleet.state.folder).close()
        assert "waiting for bob to join" in isthmus("status", "--state", str(fleet.state.folder)).out
    assert fleet.service.current_status().awaited == ()
    assert fleet.said[0] == "waiting for bob to join (0 of 1 are here)"
    assert re.fullmatch(r"waiting for bob to join \(0 of 1 are here\), for \d+(\.\d+)? m?s", fleet.said[1])
    fleet.state.roster.redeem(fleet.state.roster.invite(time.time())[0], {"1" * 32: "eve"}, time.time())
    fleet.state.roster.revoke("eve", time.time())
    said = "waiting for eve (it was revoked: a new key and a ticket bring it back) to join"
    with in_background(lambda: fleet.service.wait_for(["eve"]), lambda: end("eve")):
        soon(lambda: any(line.startswith(said) for line in fleet.said))  # bob's last line may come late
    here.close()


def test_a_ticket_on_the_command_line_is_not_repeated(tmp_path: Path) -> None:
    done = isthmus("join", "isthmus1-lJGSqTEy_NwM-4", "--state", str(tmp_path))
    assert done.code == 2 and "isthmus1-..." in done.err and "lJGSqTEy" not in done.err


@pytest.mark.parametrize("name", ["..", ".hidden", "-rf", "../../x", "", "a\tb", "x" * 65, "/0", "m/", "m/..", "m/0/1"])
def test_names_that_are_refused(name: str) -> None:
    with pytest.raises(PeerError, match="device name"):
        check_name(name)
