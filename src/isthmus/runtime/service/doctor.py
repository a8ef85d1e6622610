"""Diagnoses why a device cannot reach its coordinator: each hop in order, until one fails."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

from isthmus.errors import IsthmusError, PeerError
from isthmus.listening import shown_address
from isthmus.locking import is_held
from isthmus.runtime.identity import Identity, Party, Ticket
from isthmus.runtime.messages.fleet import DevicePresent, Rejected
from isthmus.runtime.messages.run import Heartbeat
from isthmus.runtime.messages.versions import versions_here
from isthmus.runtime.service.agent import JOINED, Membership, membership_in
from isthmus.runtime.service.enrollment import fetch_authority
from isthmus.runtime.service.machine import Finding
from isthmus.runtime.transport.channel import SocketChannel, connected
from isthmus.runtime.transport.secure import secure_dialled, secure_unknown

TIMEOUT_S = 10.0


class _Trouble(Exception):
    def __init__(self, hop: str, detail: object, remedy: str) -> None:
        self.finding = Finding(hop, False, str(detail), remedy)


def examine_device(folder: Path) -> list[Finding]:
    """Examine a device that has joined: return a finding at each hop, up to the first that fails."""
    return _collected(_device(folder))


def examine_ticket(ticket: Ticket) -> list[Finding]:
    """Examine the way for a ticket, before the device has joined. The ticket is not used."""
    return _collected(_ticket(ticket))


def _collected(findings: Iterator[Finding]) -> list[Finding]:
    found: list[Finding] = []
    try:
        for finding in findings:
            found.append(finding)
    except _Trouble as trouble:
        found.append(trouble.finding)
    return found


def _device(folder: Path) -> Iterator[Finding]:
    identity = Identity(folder)
    membership = _membership(identity)
    yield Finding("state", True, f"{membership.name} ({identity.id})")
    left_s = identity.expires_s() - time.time()
    if left_s <= 0:
        raise _Trouble(
            "clock",
            f"by this machine's clock the certificate ended {-left_s / 3600:.1f} hours ago",
            "compare the clock (`date`) with the coordinator's; if it is right, join again with a new ticket",
        )
    yield Finding("clock", True, f"the certificate is good for {left_s / 3600:.1f} hours")
    host, port, findings = _reached(membership.coordinators)
    yield from findings
    try:
        connection = connected(host, port, "coordinator", TIMEOUT_S)
        secured = secure_dialled(connection, identity, Party("coordinator", ""))
    except PeerError as e:
        raise _tls_trouble(e) from None
    channel = SocketChannel(secured, "coordinator", TIMEOUT_S)
    try:
        yield Finding("TLS", True, "both sides are of the same fleet")
        if is_held(folder / JOINED):
            yield Finding(
                "membership", True, "`isthmus join` runs with this folder: it prints whether it is in the fleet"
            )
        else:
            yield _welcome(channel)
    finally:
        channel.close()


def _membership(identity: Identity) -> Membership:
    try:
        membership = membership_in(identity.folder)
        if membership is not None:
            identity.check()
            return membership
    except IsthmusError as e:
        raise _Trouble("state", e, "repair the folder, or join again with another --state folder") from None
    raise _Trouble("state", f"{identity.folder}: no device has joined from this folder", "`isthmus join` with a ticket")


def _ticket(ticket: Ticket) -> Iterator[Finding]:
    left_s = ticket.expires_s - time.time()
    if left_s <= 0:
        detail = f"by this machine's clock it expired {-left_s / 3600:.1f} hours ago"
        remedy = "`isthmus ticket` on the coordinator's machine prints another; check the clock"
        raise _Trouble("ticket", detail, remedy)
    yield Finding("ticket", True, f"in date for {left_s / 3600:.1f} hours (whether it was used is not asked)")
    host, port, findings = _reached(ticket.addresses)
    yield from findings
    try:
        authority = fetch_authority(connected(host, port, "coordinator", TIMEOUT_S), ticket, TIMEOUT_S)
        secure_unknown(connected(host, port, "coordinator", TIMEOUT_S), ssl.DER_cert_to_PEM_cert(authority)).close()
    except (OSError, PeerError) as e:
        raise _tls_trouble(e) from None
    yield Finding("TLS", True, "the coordinator is of the ticket's fleet")


def _reached(addresses: tuple[tuple[str, int], ...]) -> tuple[str, int, list[Finding]]:
    """The first address that answers."""
    trouble: _Trouble | None = None
    for host, port in addresses:
        try:
            found = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)})
        except (OSError, UnicodeError) as e:
            trouble = _Trouble("name", f"{host}: {e}", "check the name and this machine's DNS, or give an address")
            continue
        try:
            connected(host, port, "coordinator", TIMEOUT_S).close()
        except PeerError as e:
            remedy = "is `isthmus serve` running there, does it listen on that address (--host), is the port open?"
            trouble = _Trouble("port", e, remedy)
            continue
        return (
            host,
            port,
            [Finding("name", True, ", ".join(found)), Finding("port", True, f"{shown_address(host, port)} answers")],
        )
    assert trouble is not None, "there is an address"
    raise trouble


def _tls_trouble(error: Exception) -> _Trouble:
    text = str(error)
    if "another fleet" in text or "self-signed" in text or "unable to get" in text or "UNKNOWN_CA" in text.upper():
        return _Trouble("fleet", text, "the coordinator there has another authority: ask for a new ticket, join again")
    if "not yet valid" in text or "expired" in text:
        return _Trouble("clock", text, "the clocks of the two machines differ by hours: set them")
    return _Trouble("TLS", text, "something else listens on that port, or a proxy breaks TLS: ask for the right port")


def _welcome(channel: SocketChannel) -> Finding:
    """Return whether the coordinator takes this device. Not for one that is connected: the newest connection counts, so
    this one would close that of `isthmus join`."""
    try:
        channel.send(DevicePresent(run="", versions=versions_here()))
        while (received := channel.receive(idle_s=TIMEOUT_S)) is not None and isinstance(received[0], Heartbeat):
            pass
    except PeerError as e:
        raise _tls_trouble(e) from None
    answer = received[0] if received is not None else None
    if isinstance(answer, Rejected):
        remedies = {
            "version": "install the same isthmus on both machines",
            "membership": "join again: a new ticket and another --state folder",
        }
        raise _Trouble(answer.about, answer.reason, remedies[answer.about])
    return Finding("membership", True, "the coordinator takes this device")
