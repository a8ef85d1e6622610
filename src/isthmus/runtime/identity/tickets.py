"""A ticket: what somebody is given to let one device join. A text of one line that can be pasted anywhere."""

from __future__ import annotations

import base64
import binascii
import zlib
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from isthmus.errors import UserError
from isthmus.reading import parse_msgpack
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
