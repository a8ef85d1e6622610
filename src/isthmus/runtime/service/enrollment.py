"""How a device without a certificate gets one: a ticket's secret and a signing request against a certificate.

    joining device ── TCP, TLS without a certificate ──► coordinator     the coordinator is not verified yet
             ◄── the authority's certificate ────                  believed when its hash is the ticket's
    joining device ── TLS, verified against it ────────► coordinator     now it is known who answers
             ── join frame: secret, request ─────►                 the only frame that an unknown peer may send
             ◄── certificate, or why not ────────

A device of the fleet whose certificate ended while it was away sends the same frame: its id in place of the secret. It
has the authority's certificate already. Only who holds its key can use what is issued.

A frame here is its length (u32) and one msgpack struct, at most `MOST_FRAME_BYTES`.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import socket
import ssl
import struct
import time
from collections.abc import Mapping, Sequence
from typing import TypeVar, cast

import msgspec

from isthmus.errors import PeerError, UserError
from isthmus.listening import shown_address
from isthmus.runtime.identity import Authority, Identity, Roster, Ticket
from isthmus.runtime.identity.keys import id_of, requested_key
from isthmus.runtime.messages.fleet import MOST_REQUEST_BYTES, JoinAnswer, JoinRequest, NewDevice
from isthmus.runtime.messages.versions import mismatch, versions_here
from isthmus.runtime.transport.channel import connected
from isthmus.runtime.transport.secure import Connection, TlsConnection, secure_unknown
from isthmus.runtime.transport.tcp import HungUp, Unreached, until_reached
from isthmus.sanitize import MOST_SHOWN, sanitize

MOST_FRAME_BYTES = 1 << 14  # holds the requests or certificates of `MOST_NEW_DEVICES` devices of one machine
MOST_NAME_CHARACTERS = 64
_PART = re.compile("/[A-Za-z0-9]+$")  # which of a machine's devices
AGAIN_S = 10.0  # for so long a joining device tries again where it is hung up on
_LENGTH = struct.Struct(">I")
Frame = TypeVar("Frame", bound=msgspec.Struct)
_DECODERS: dict[type[msgspec.Struct], msgspec.msgpack.Decoder[msgspec.Struct]] = {
    kind: msgspec.msgpack.Decoder(kind) for kind in (JoinRequest, JoinAnswer)
}
"""Made on import, as the channel's: several joining devices may come at once."""


class Dismissal(PeerError):
    """The coordinator does not want this device. Trying again is of no use, as the exit code tells a supervisor: a
    person has to mend something."""

    exit_code = UserError.exit_code


def admit(connection: Connection, authority: Authority, roster: Roster, renew_within_s: float = 0.0) -> str | None:
    """The coordinator's part; returns the names of the devices that joined, None if nobody did. A device that was away
    for less than `renew_within_s` needs no ticket.

    Whatever an unknown peer sends ends in a refusal at the cost of one small frame. OSError and PeerError when it left
    or sent no join frame.
    """
    send_frame(connection, authority.der())
    asked = _decoded(receive_frame(connection), JoinRequest)
    try:
        if asked.returning:
            names, certificates = _renewed(asked, authority, roster, renew_within_s)
        else:
            names, certificates = ", ".join(d.name for d in asked.devices), _certificates(asked, authority, roster)
    except PeerError as e:
        send_frame(connection, msgspec.msgpack.encode(JoinAnswer(refused=str(e))))
        return None
    send_frame(connection, msgspec.msgpack.encode(JoinAnswer(certificates)))
    return names


def _renewed(
    asked: JoinRequest, authority: Authority, roster: Roster, within_s: float
) -> tuple[str, tuple[bytes, ...]]:
    """PeerError says why there is none. A request is read of one who knows a device's id only."""
    now_s = time.time()
    name = roster.returning(asked.returning, now_s, within_s)
    request = asked.devices[0].request
    if len(request) > MOST_REQUEST_BYTES or id_of(requested_key(request)) != asked.returning:
        raise PeerError("asked for a certificate of another key")
    certificate = authority.certify(request, "device")[1]
    roster.seen(asked.returning, now_s)
    return f"{name}, which was away", (certificate,)


def _certificates(asked: JoinRequest, authority: Authority, roster: Roster) -> tuple[bytes, ...]:
    """PeerError says why there are none. Requests are read by one who knows a ticket's secret only."""
    now_s = time.time()
    roster.check(asked.secret, now_s)
    for device in asked.devices:
        check_name(device.name)
    different = mismatch(versions_here(), asked.versions)
    if different is not None:
        raise PeerError(different)
    ids = [id_of(requested_key(device.request)) for device in asked.devices]
    if len(set(ids)) < len(ids) or len({device.name for device in asked.devices}) < len(ids):
        raise PeerError("got a name or a key twice, expected different ones")
    roster.redeem(asked.secret, {id: d.name for id, d in zip(ids, asked.devices, strict=True)}, now_s)
    return tuple(authority.certify(device.request, "device")[1] for device in asked.devices)


def check_name(name: str) -> None:
    """PeerError for a name that could not stand in a terminal, a file's name or a fleet file."""
    machine = _PART.sub("", name)
    good = name.isprintable() and name == name.strip() and not set(machine) & set("/\\\"'") and name[:1] not in ".-"
    if not (machine and len(name) <= MOST_NAME_CHARACTERS and good):
        raise PeerError(
            f"device name {name[:MOST_NAME_CHARACTERS]!r}: expected 1 to {MOST_NAME_CHARACTERS} printable characters "
            "without quotes and backslashes, no dot or hyphen first, and no slash but in front of a device's number"
        )


def join(ticket: Ticket, identities: Mapping[str, Identity], timeout_s: float) -> tuple[str, int]:
    """The part of a machine with devices of these names: afterwards all identities are complete. Returns the address
    that answered.

    PeerError when no address answers, or who answers is not of the ticket's fleet; Dismissal when it refuses.
    """
    return until_reached(lambda: _join(ticket, identities, timeout_s), min(timeout_s, AGAIN_S))


def _join(ticket: Ticket, identities: Mapping[str, Identity], timeout_s: float) -> tuple[str, int]:
    """At the first address that answers. HungUp where it may be worth another attempt."""
    failures: list[Unreached] = []
    for host, port in ticket.addresses:
        try:
            return _join_at(host, port, ticket, identities, timeout_s)
        except Unreached as e:
            failures.append(e)
    passing = any(isinstance(e, HungUp) for e in failures)
    raise (HungUp if passing else Unreached)("; ".join(map(str, failures)))


def _join_at(
    host: str, port: int, ticket: Ticket, identities: Mapping[str, Identity], timeout_s: float
) -> tuple[str, int]:
    """Unreached where another address may do better."""
    where = f"coordinator at {shown_address(host, port)}"
    with contextlib.ExitStack() as stack:
        try:
            authority = fetch_authority(_dialled(host, port, timeout_s), ticket, timeout_s)
            connection = secure_unknown(_dialled(host, port, timeout_s), ssl.DER_cert_to_PEM_cert(authority))
            stack.callback(connection.close)
            connection.settimeout(timeout_s)
            receive_frame(connection)  # the authority's certificate once more
        except (HungUp, ConnectionError) as e:  # a ticket's secret has not been told: it can be tried again
            raise HungUp(f"{where}: {e}") from None
        except (OSError, PeerError) as e:
            raise Unreached(f"{where}: {e}") from None
        new_devices = tuple(NewDevice(name, identity.request()) for name, identity in identities.items())
        asked = JoinRequest(secret=ticket.secret, devices=new_devices, versions=versions_here())
        answer = _answered(connection, asked, where)
    for identity, certificate in zip(identities.values(), answer.certificates, strict=True):
        identity.keep(certificate, authority)
    return host, port


def renew_late(identity: Identity, coordinators: Sequence[tuple[str, int]], timeout_s: float) -> None:
    """Another certificate for one that has ended, at the first of the addresses that answers. Dismissal when the
    coordinator refuses, PeerError when none answers."""
    failures: list[str] = []
    for host, port in coordinators:
        where = f"coordinator at {shown_address(host, port)}"
        authority = identity.authority_der()
        try:
            connection = secure_unknown(_dialled(host, port, timeout_s), ssl.DER_cert_to_PEM_cert(authority))
            with contextlib.closing(connection):
                connection.settimeout(timeout_s)
                receive_frame(connection)  # the authority's certificate
                device = NewDevice("", identity.request())
                asked = JoinRequest(b"", (device,), versions_here(), returning=identity.id)
                identity.keep(_answered(connection, asked, where).certificates[0], authority)
                return
        except Dismissal:
            raise
        except (OSError, PeerError) as e:
            failures.append(f"{where}: {e}")
    raise PeerError("; ".join(failures))


def _answered(connection: Connection, asked: JoinRequest, where: str) -> JoinAnswer:
    """With a certificate for each device. Dismissal when it is refused, Unreached when nothing comes."""
    try:
        send_frame(connection, msgspec.msgpack.encode(asked))
        answer = _decoded(receive_frame(connection), JoinAnswer)
    except OSError as e:
        raise Unreached(f"{where}: {e.strerror or e}") from None
    if answer.refused or len(answer.certificates) != len(asked.devices):
        raise Dismissal(f"{where} refused: {sanitize(answer.refused)[:MOST_SHOWN]}")
    return answer


def _dialled(host: str, port: int, timeout_s: float) -> socket.socket:
    return connected(host, port, "no answer", timeout_s)


def fetch_authority(connection: socket.socket, ticket: Ticket, timeout_s: float) -> bytes:
    """The authority's certificate (DER). Nothing is made of the bytes before their hash is known to be right."""
    secured: TlsConnection = secure_unknown(connection, None)
    try:
        secured.settimeout(timeout_s)
        der = receive_frame(secured)
    finally:
        secured.close()
    if hashlib.sha256(der).digest() != ticket.fingerprint:
        raise PeerError("the coordinator at this address is of another fleet than the ticket")
    return der


def send_frame(connection: Connection, data: bytes) -> None:
    connection.sendmsg([memoryview(_LENGTH.pack(len(data)) + data)])


def receive_frame(connection: Connection) -> bytes:
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    if length > MOST_FRAME_BYTES:
        raise PeerError(f"sent a frame of {length} bytes, expected at most {MOST_FRAME_BYTES}")
    return _exactly(connection, length)


def _exactly(connection: Connection, size_bytes: int) -> bytes:
    buffer = bytearray(size_bytes)
    view, at = memoryview(buffer), 0
    while at < size_bytes:
        got = connection.recv_into(view[at:])
        if not got:
            raise ConnectionError("closed the connection")
        at += got
    return bytes(buffer)


def _decoded(data: bytes, kind: type[Frame]) -> Frame:
    try:
        return cast(Frame, _DECODERS[kind].decode(data))
    except Exception as e:  # also RecursionError and UnicodeDecodeError
        raise PeerError(f"sent no {kind.__name__}: {' '.join(str(e).split())[:200]}") from None
