"""Identities of a fleet: keys, certificates of a private authority, tickets to join with, and the roster."""

from isthmus.runtime.identity.keys import CERTIFICATE_LIFE_S, Authority, Identity, Party, Role, party_of
from isthmus.runtime.identity.roster import (
    TICKET_LIFE_S,
    Member,
    Roster,
    Ticket,
    decode_ticket,
    encode_ticket,
    read_ticket,
    read_ticket_of,
)

__all__ = [
    "CERTIFICATE_LIFE_S",
    "TICKET_LIFE_S",
    "Authority",
    "Identity",
    "Member",
    "Party",
    "Role",
    "Roster",
    "Ticket",
    "decode_ticket",
    "encode_ticket",
    "party_of",
    "read_ticket",
    "read_ticket_of",
]
