"""Broken set-ups: the hop that is named is the one that is broken."""

from __future__ import annotations

import contextlib
import io
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import msgspec
import pytest
from rich.console import Console

from isthmus.accelerators import accelerator_names
from isthmus.api.doctor import examine
from isthmus.runtime.identity import Authority, Identity
from isthmus.runtime.identity.files import write_private
from isthmus.runtime.messages.versions import versions_here
from isthmus.runtime.service import doctor
from isthmus.runtime.service.agent import JOINED, Membership, join_fleet
from isthmus.runtime.service.doctor import examine_device, examine_ticket
from isthmus.runtime.service.machine import Finding, examine_machine

from .parties import Fleet, certified


def _moved(folder: Path, host: str, port: int) -> None:
    write_private(folder / "membership.json", msgspec.json.encode(Membership("desk", ((host, port),))))


def _no_state(fleet: Fleet, folder: Path) -> None:
    (folder / "certificate.pem").unlink()


def _readable_key(fleet: Fleet, folder: Path) -> None:
    (folder / "key.pem").chmod(0o644)


def _damaged(fleet: Fleet, folder: Path) -> None:
    (folder / "membership.json").write_bytes(b"{")


def _damaged_certificate(fleet: Fleet, folder: Path) -> None:
    (folder / "certificate.pem").write_bytes(b"?")


def _damaged_authority(fleet: Fleet, folder: Path) -> None:
    (folder / "authority.pem").write_bytes(b"?")


def _key_of_another(fleet: Fleet, folder: Path) -> None:
    certified(fleet.state.authority, folder.with_name("other"))
    (folder.with_name("other") / "key.pem").replace(folder / "key.pem")


def _authority_of_another(fleet: Fleet, folder: Path) -> None:
    Authority(folder.with_name("other"))
    (folder.with_name("other") / "authority.pem").replace(folder / "authority.pem")


def _no_address(fleet: Fleet, folder: Path) -> None:
    write_private(folder / "membership.json", msgspec.json.encode(Membership("desk", ())))


def _unknown_name(fleet: Fleet, folder: Path) -> None:
    _moved(folder, "coordinator.invalid", 7433)


def _closed_port(fleet: Fleet, folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        _moved(folder, *free.getsockname())


def _no_tls(fleet: Fleet, folder: Path) -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        with listener:
            for _ in range(2):
                connection, _ = listener.accept()
                with connection, contextlib.suppress(ConnectionError):
                    connection.sendall(b"220 mail.example.org ESMTP\r\n")
                    connection.recv(1000)

    threading.Thread(target=answer, daemon=True).start()
    _moved(folder, *listener.getsockname())


def _other_fleet(fleet: Fleet, folder: Path) -> None:
    identity, other = Identity(folder), Authority(folder / "other")
    identity.keep(other.certify(identity.request(), "device")[1], other.der())
    _moved(folder, "127.0.0.1", fleet.service.port)


def _expired(fleet: Fleet, folder: Path) -> None:
    identity, authority = Identity(folder), fleet.state.authority
    identity.keep(authority.certify(identity.request(), "device", -60.0)[1], authority.der())


def _coordinators_clock(fleet: Fleet, folder: Path) -> None:
    """To us it is in the past, as our certificate is not."""
    certified(fleet.state.authority, fleet.state.identity.folder, "coordinator", -60.0)


def _revoked(fleet: Fleet, folder: Path) -> None:
    fleet.state.roster.revoke("desk", time.time())


@pytest.mark.parametrize(
    ("breaks", "hop"),
    [
        (_no_state, "state"),
        (_readable_key, "state"),
        (_damaged, "state"),
        (_damaged_certificate, "state"),
        (_damaged_authority, "state"),
        (_key_of_another, "state"),
        (_authority_of_another, "state"),
        (_no_address, "state"),
        (_unknown_name, "name"),
        (_closed_port, "port"),
        (_no_tls, "TLS"),
        (_other_fleet, "fleet"),
        (_expired, "clock"),
        (_coordinators_clock, "clock"),
        (_revoked, "membership"),
    ],
)
def test_the_broken_hop_is_named(fleet: Fleet, tmp_path: Path, breaks: Callable[[Fleet, Path], None], hop: str) -> None:
    join_fleet(fleet.ticket(), {"desk": tmp_path / "desk"}, 5.0)
    with mock.patch.object(type(fleet.state), "renew"):  # what is broken stays so
        breaks(fleet, tmp_path / "desk")
        code, rows = _printed(tmp_path / "desk")
    *before, (last, verdict, found, remedy) = rows
    assert code == 1
    assert all(row[1] == "ok" for row in before)
    assert (last, verdict) == (hop, "BROKEN") and found and remedy, rows


def _printed(folder: Path) -> tuple[int, list[list[str]]]:
    """The exit code of `isthmus doctor`, and the cells of its table."""
    console = Console(width=1000, record=True, file=io.StringIO())
    found = examine(folder, None)
    console.print(found.table())
    lines = [line for line in console.export_text().splitlines() if line.startswith("│")]
    return 0 if found.good else 1, [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


def test_another_version_is_named(fleet: Fleet, tmp_path: Path) -> None:
    join_fleet(fleet.ticket(), {"desk": tmp_path / "desk"}, 5.0)
    old = msgspec.structs.replace(versions_here(), protocol=1)
    with mock.patch.object(doctor, "versions_here", return_value=old):
        last = examine_device(tmp_path / "desk")[-1]
    assert last.hop == "version" and "'1'" in last.detail and "same isthmus" in last.remedy


def test_nothing_is_wrong(fleet: Fleet, tmp_path: Path) -> None:
    ticket = fleet.ticket()
    assert [f.hop for f in examine_ticket(ticket) if f.good] == ["ticket", "name", "port", "TLS"]
    join_fleet(ticket, {"desk": tmp_path / "desk"}, 5.0)  # it was not used up
    findings = examine_device(tmp_path / "desk")
    assert [f.hop for f in findings if f.good] == ["state", "clock", "name", "port", "TLS", "membership"]


def test_a_device_that_is_connected_is_left_alone(fleet: Fleet, tmp_path: Path) -> None:
    """The coordinator keeps a device's newest connection: a question under its name would close that of `join`."""
    join_fleet(fleet.ticket(), {"desk": tmp_path / "desk"}, 5.0)
    holds = "import sys; from pathlib import Path; from isthmus.locking import hold; hold(Path(sys.argv[1]), 'taken')"
    claim = tmp_path / "desk" / JOINED
    with subprocess.Popen(
        [sys.executable, "-c", f"{holds}; print('held', flush=True); input()", claim], stdin=-1, stdout=-1
    ) as join:
        assert join.stdin is not None and join.stdout is not None and join.stdout.readline() == b"held\n"
        findings = examine_device(tmp_path / "desk")
        join.stdin.write(b"\n")
    assert findings[-1].good and "`isthmus join` runs" in findings[-1].detail
    assert "desk is here" not in fleet.said
    examine_device(tmp_path / "desk")
    assert "desk is here" in fleet.said, "it has ended"


def test_tickets(fleet: Fleet) -> None:
    ticket = fleet.ticket()

    def last(**changed: object) -> Finding:
        return examine_ticket(msgspec.structs.replace(ticket, **changed))[-1]

    assert (last(expires_s=0.0).hop, last(expires_s=0.0).good) == ("ticket", False)
    assert (last(fingerprint=bytes(32)).hop, last(fingerprint=bytes(32)).good) == ("fleet", False)


def test_a_machine_that_has_joined_nothing(tmp_path: Path) -> None:
    code, rows = _printed(tmp_path / "new" / "device")
    assert code == 0 and all(row[1] == "ok" for row in rows), rows
    found = {row[0]: row[2] for row in rows}
    assert {"Python", "torch", "cryptography", "accelerators", "port", "folder"} <= found.keys()
    assert ("stages compute on the CPU" in found["accelerators"]) == (accelerator_names() == ())
    assert not (tmp_path / "new").exists(), "nothing is left behind"


def test_what_stands_in_a_machines_way_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        findings = examine_machine({"keys": tmp_path / "file" / "device"}, taken.getsockname()[1])
    broken = {finding.hop: finding.remedy for finding in findings if not finding.good}
    assert broken.keys() == {"safetensors", "folder"} and "pip install '.[train]'" in broken["safetensors"]
    assert any("in use" in finding.detail and "--port" in finding.detail for finding in findings)
