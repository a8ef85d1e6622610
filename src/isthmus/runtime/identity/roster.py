"""The roster says who may be in the fleet: tickets that were given out, devices that joined, devices that were revoked.

In SQLite (WAL), so that other processes of the same user (`isthmus devices --revoke`) and a coordinator that is killed
at any point find it whole. Of a ticket only the hash of its secret is kept.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import secrets
import sqlite3
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from isthmus.errors import PeerError, UserError
from isthmus.reading import parse_msgpack
from isthmus.runtime.identity.database import Database
from isthmus.runtime.identity.files import read_private
from isthmus.wire_types import Host, NotNegative, Port

TICKET_LIFE_S = 86400.0
PREFIX = "isthmus1-"
SECRET_BYTES = 16
MOST_CHARACTERS = 3000  # below the 4096 that a terminal takes as one line
MOST_ADDRESSES = 64  # the most addresses of a coordinator's machine


class Ticket(msgspec.Struct, frozen=True, array_like=True):
    """Where the coordinator is, how to know it, and the secret that it knows us by. Good for one device."""

    addresses: Annotated[tuple[tuple[Host, Port], ...], Meta(max_length=MOST_ADDRESSES)]
    """Host and port, to be tried in this order."""
    fingerprint: Annotated[bytes, Meta(min_length=32, max_length=32)]  # sHA-256 of the authority's certificate
    secret: Annotated[bytes, Meta(min_length=SECRET_BYTES, max_length=SECRET_BYTES)]
    expires_s: NotNegative  # seconds since 1970. The coordinator's clock decides; this is for explaining.


def encode_ticket(ticket: Ticket) -> str:
    data = msgspec.msgpack.encode(ticket)
    checked = data + zlib.crc32(data).to_bytes(4, "big")
    return PREFIX + base64.urlsafe_b64encode(checked).decode().rstrip("=")


def decode_ticket(text: str) -> Ticket:
    """The ticket in a pasted text, line breaks and spaces ignored. UserError for what is none; never repeats it."""
    plain = "".join(text.split())
    if not plain.startswith(PREFIX) or len(plain) > MOST_CHARACTERS:
        raise UserError(f"ticket: got {len(plain)} characters, expected a text that starts with {PREFIX!r}")
    try:
        body = plain.removeprefix(PREFIX)
        checked = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raise UserError("ticket: it has invalid characters; paste the whole ticket") from None
    data, crc = checked[:-4], checked[-4:]
    if zlib.crc32(data).to_bytes(4, "big") != crc:
        raise UserError("ticket: it is cut or changed (its checksum is wrong); paste the whole ticket")
    try:
        ticket = parse_msgpack(data, Ticket, "ticket")
    except UserError:
        raise UserError("ticket: it was made by another version of isthmus") from None
    if not ticket.addresses:
        raise UserError("ticket: it was made by another version of isthmus")
    return ticket


def read_ticket(path: Path) -> Ticket:
    """The ticket in a file, which must be 0600."""
    return decode_ticket(_text(path))


def read_ticket_of(path: Path, number: int) -> Ticket:
    """Return the ticket of this number, from 0 on, from a file with a ticket in each line. The file must be 0600."""
    lines = [line for line in _text(path).splitlines() if line.strip()]
    if number >= len(lines):
        raise UserError(
            f"--ticket-file {path}: got {len(lines)} tickets, expected a line for each rank of this machine"
        )
    return decode_ticket(lines[number])


def _text(path: Path) -> str:
    return read_private(path, "ticket").decode(errors="replace")


_SCHEMA = """
CREATE TABLE IF NOT EXISTS tickets (hash BLOB PRIMARY KEY, expires_s REAL NOT NULL, used_by TEXT);
CREATE TABLE IF NOT EXISTS devices (
    id TEXT PRIMARY KEY, name TEXT NOT NULL, joined_s REAL NOT NULL, seen_s REAL NOT NULL, revoked_s REAL
);
CREATE UNIQUE INDEX IF NOT EXISTS holder ON devices (name) WHERE revoked_s IS NULL;
"""
ROSTER = "roster.sqlite"
_COLUMNS = "id, name, joined_s, seen_s, revoked_s"


class Member(msgspec.Struct, frozen=True):
    """A device that joined. Times are seconds since 1970."""

    id: str
    name: str
    joined_s: float
    seen_s: float  # when it last connected, or got a certificate
    revoked_s: float | None = None


class Roster:
    """Safe to use from several threads and processes."""

    def __init__(self, folder: Path, fleet: bytes = b"") -> None:
        """`fleet` is the fingerprint of its authority. UserError when the folder cannot hold it, or holds another
        fleet's."""
        self._database = Database(folder / ROSTER, _SCHEMA, fleet)

    def close(self) -> None:
        self._database.close()

    def invite(self, now_s: float, life_s: float = TICKET_LIFE_S) -> tuple[bytes, float]:
        """The secret of a new ticket, and when it expires."""
        secret, expires_s = secrets.token_bytes(SECRET_BYTES), now_s + life_s
        with self._database.changing() as database:
            database.execute("INSERT INTO tickets VALUES (?, ?, NULL)", (_hash(secret), expires_s))
        return secret, expires_s

    def withdraw(self, secret: bytes) -> None:
        """Nobody can join with this ticket any more. One that was used stays as it is."""
        with self._database.changing() as database:
            database.execute("DELETE FROM tickets WHERE hash = ? AND used_by IS NULL", (_hash(secret),))

    def check(self, secret: bytes, now_s: float) -> str | None:
        """Return the ids of the devices that have used a ticket that is in date. PeerError for any other."""
        with self._database.reading() as database:
            found = database.execute("SELECT expires_s, used_by FROM tickets WHERE hash = ?", (_hash(secret),))
            expires_s, used_by = found.fetchone() or (None, None)
        if expires_s is None:
            raise PeerError("the ticket is not of this fleet: ask for one that this coordinator printed")
        if now_s > expires_s:
            raise PeerError(f"the ticket expired {(now_s - expires_s) / 3600:.1f} hours ago: ask for another")
        return used_by

    def redeem(self, secret: bytes, devices: Mapping[str, str], now_s: float) -> None:
        """Let devices join under these names, by id: one, or all of one machine. PeerError says why they may not; then
        none of them does.

        The same devices may do so again with the same ticket: the answer may have been lost on its way.
        """
        self.check(secret, now_s)
        holders = " ".join(sorted(devices))
        with self._database.changing() as database:
            (used_by,) = database.execute("SELECT used_by FROM tickets WHERE hash = ?", (_hash(secret),)).fetchone()
            if used_by not in (None, holders):
                raise PeerError("the ticket was used already: each is good for one machine, ask for another")
            for device, name in devices.items():
                _admit(database, device, name, now_s)
            database.execute("UPDATE tickets SET used_by = ? WHERE hash = ?", (holders, _hash(secret)))

    def name_of(self, device: str) -> str | None:
        """Under which name a device may take part; None for one that never joined or was revoked."""
        with self._database.reading() as database:
            found = database.execute(
                "SELECT name FROM devices WHERE id = ? AND revoked_s IS NULL", (device,)
            ).fetchone()
        return None if found is None else str(found[0])

    def here(self) -> frozenset[str]:
        """Ids of all devices that may take part."""
        with self._database.reading() as database:
            return frozenset(id for (id,) in database.execute("SELECT id FROM devices WHERE revoked_s IS NULL"))

    def revoked_names(self) -> frozenset[str]:
        """Names whose last device was revoked, and that no other has taken."""
        query = "SELECT name FROM devices GROUP BY name HAVING min(revoked_s NOT NULL)"
        with self._database.reading() as database:
            return frozenset(name for (name,) in database.execute(query))

    def returning(self, device: str, now_s: float, within_s: float) -> str:
        """The name of a device that was here within so many seconds. PeerError for any other."""
        with self._database.reading() as database:
            found = database.execute("SELECT name, seen_s, revoked_s FROM devices WHERE id = ?", (device,)).fetchone()
        name, seen_s, revoked_s = found or (None, 0.0, None)
        if name is None or revoked_s is not None:
            raise PeerError("this device is not in the fleet, or was revoked")
        if now_s - seen_s > within_s:
            away = f"it was away for {(now_s - seen_s) / 86400:.1f} days"
            limit = f"renews certificates after at most {within_s / 86400:g} days" if within_s else "renews none then"
            raise PeerError(f"{away}, and the coordinator {limit} (--renew-after-absence)")
        return str(name)

    def seen(self, device: str, now_s: float) -> None:
        with self._database.changing() as database:
            database.execute("UPDATE devices SET seen_s = ? WHERE id = ?", (now_s, device))

    def revoke(self, device: str, now_s: float) -> Member:
        """Shut out a device, named by id, by the beginning of its id, or by name. UserError when it is not one."""
        with self._database.changing() as database:
            found = database.execute(
                f"SELECT {_COLUMNS} FROM devices WHERE revoked_s IS NULL AND (name = ? OR substr(id, 1, ?) = ?)",
                (device, max(8, len(device)), device),
            ).fetchall()
            if len(found) != 1:
                fits = f"{len(found)} devices that joined" if found else "no device that joined"
                raise UserError(f"--revoke: got {device!r}, which names {fits}; see `isthmus devices`")
            member = Member(*found[0][:4], revoked_s=now_s)
            database.execute("UPDATE devices SET revoked_s = ? WHERE id = ?", (now_s, member.id))
        return member

    def members(self) -> list[Member]:
        """Everybody who ever joined, the longest here first."""
        with self._database.reading() as database:
            rows = database.execute(f"SELECT {_COLUMNS} FROM devices ORDER BY joined_s, name").fetchall()
        return [Member(*row) for row in rows]


def _admit(database: sqlite3.Connection, device: str, name: str, now_s: float) -> None:
    """PeerError."""
    if database.execute("SELECT 1 FROM devices WHERE id = ? AND revoked_s NOT NULL", (device,)).fetchone():
        raise PeerError("this device was revoked: it needs a new key (another --state folder) and a ticket")
    holder = database.execute("SELECT id FROM devices WHERE name = ? AND revoked_s IS NULL", (name,)).fetchone()
    if holder is not None and holder[0] != device:
        raise PeerError(f"the name {name!r} is taken by device {holder[0]}: choose another with --name")
    database.execute(
        "INSERT INTO devices VALUES (?, ?, ?, ?, NULL) ON CONFLICT (id) DO UPDATE SET name = excluded.name",
        (device, name, now_s, now_s),
    )


def _hash(secret: bytes) -> bytes:
    """The secret has 128 random bits: a plain hash cannot be searched. Looking up the hash takes a time that says
    nothing of the secret."""
    return hashlib.sha256(secret).digest()
