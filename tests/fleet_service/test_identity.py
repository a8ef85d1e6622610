"""Keys, certificates, tickets and the roster, without a connection."""

from __future__ import annotations

import stat
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.errors import PeerError, UserError
from isthmus.runtime.identity import (
    Authority,
    Identity,
    Roster,
    Ticket,
    decode_ticket,
    encode_ticket,
    read_ticket,
)
from isthmus.runtime.identity.files import private_folder, write_private

from .parties import certified

HOUR_S = 3600.0


def test_an_authority_is_made_once(tmp_path: Path) -> None:
    first, second = Authority(tmp_path / "a"), Authority(tmp_path / "a")
    assert first.fingerprint == second.fingerprint
    assert Authority(tmp_path / "b").fingerprint != first.fingerprint


def test_files_are_their_owners_alone(authority: Authority, tmp_path: Path) -> None:
    Roster(tmp_path / "state").close()
    identity = certified(authority, tmp_path / "state" / "device")
    for path in (tmp_path / "state").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
    identity.key_path.chmod(0o644)
    with pytest.raises(UserError, match=r"key .*key\.pem: got mode 0644, expected 0600"):
        identity.request()
    (tmp_path / "state").chmod(0o755)
    with pytest.raises(UserError, match=r"state folder .*: got mode 0755, expected 0700"):
        private_folder(tmp_path / "state")


def test_a_certificate_is_due_for_renewal_at_half_of_its_life(authority: Authority, tmp_path: Path) -> None:
    identity = certified(authority, tmp_path, life_s=10 * HOUR_S)
    now_s = time.time()
    assert abs(identity.expires_s() - now_s - 10 * HOUR_S) < 60
    assert not identity.is_due(now_s) and not identity.is_due(now_s + 3.9 * HOUR_S)
    assert identity.is_due(now_s + 4.1 * HOUR_S), "it counts from two hours ago"


def test_an_identity_keeps_only_a_certificate_of_its_own_key(
    authority: Authority, device: Identity, tmp_path: Path
) -> None:
    mine = Identity.made(tmp_path / "mine")
    theirs = authority.certify(device.request(), "device")[1]
    with pytest.raises(PeerError, match="of another key"):
        mine.keep(theirs, authority.der())
    good = authority.certify(mine.request(), "device")[1]
    with pytest.raises(PeerError, match="cannot be used"):
        mine.keep(good, Authority(tmp_path / "other").der())
    with pytest.raises(PeerError, match="cannot be used"):
        mine.keep(b"no certificate", authority.der())
    assert not mine.complete


@pytest.mark.parametrize("request_der", [b"", b"junk", b"\x30\x82\xff\xff" + bytes(100)])
def test_a_request_that_is_none_is_refused(authority: Authority, request_der: bytes) -> None:
    with pytest.raises(PeerError, match="signing request"):
        authority.certify(request_der, "device")


def test_a_request_with_a_broken_signature_is_refused(authority: Authority, device: Identity) -> None:
    request = bytearray(device.request())
    request[-1] ^= 1
    with pytest.raises(PeerError, match="signing request"):
        authority.certify(bytes(request), "device")


TICKETS = st.builds(
    Ticket,
    st.lists(st.tuples(st.text(min_size=1, max_size=60), st.integers(1, 65535)), min_size=1, max_size=4).map(tuple),
    st.binary(min_size=32, max_size=32),
    st.binary(min_size=16, max_size=16),
    st.floats(0, 1e10),
)


@given(TICKETS, st.data())
def test_a_ticket_survives_pasting_and_no_altered_one_passes(ticket: Ticket, data: st.DataObject) -> None:
    text = encode_ticket(ticket)
    assert text.isascii() and text.isprintable() and " " not in text
    at = data.draw(st.integers(0, len(text)))
    assert decode_ticket(f"  {text[:at]}\n {text[at:]}\r\n") == ticket
    cut = data.draw(st.integers(0, len(text) - 1))
    with pytest.raises(UserError, match=r"^ticket: "):
        decode_ticket(text[:cut])
    place = data.draw(st.integers(0, len(text) - 2))  # of the last character some bits mean nothing
    other = data.draw(st.characters(codec="ascii", categories=("L", "N")).filter(lambda c: c != text[place]))
    with pytest.raises(UserError, match=r"^ticket: ") as refused:
        decode_ticket(text[:place] + other + text[place + 1 :])
    assert text[-20:] not in str(refused.value), "an error must not repeat a secret"


def test_a_tickets_file_must_be_private(tmp_path: Path) -> None:
    ticket = Ticket((("here", 1),), bytes(32), bytes(16), 0.0)
    write_private(tmp_path / "ticket", encode_ticket(ticket).encode())
    assert read_ticket(tmp_path / "ticket") == ticket
    (tmp_path / "ticket").chmod(0o640)
    with pytest.raises(UserError, match="got mode 0640, expected 0600"):
        read_ticket(tmp_path / "ticket")


class TestRoster:
    def test_a_ticket_is_good_once(self, tmp_path: Path) -> None:
        roster = Roster(tmp_path / "r")
        secret, expires_s = roster.invite(1000.0)
        assert expires_s == 1000.0 + 24 * HOUR_S
        roster.redeem(secret, {"a" * 32: "desk"}, 1001.0)
        roster.redeem(secret, {"a" * 32: "desk"}, 1002.0)  # the answer was lost on its way
        with pytest.raises(PeerError, match="used already"):
            roster.redeem(secret, {"b" * 32: "laptop"}, 1003.0)
        assert roster.name_of("a" * 32) == "desk" and roster.name_of("b" * 32) is None

    def test_expired_and_foreign_tickets(self, tmp_path: Path) -> None:
        roster, other = Roster(tmp_path / "r"), Roster(tmp_path / "other")
        secret, expires_s = roster.invite(0.0)
        with pytest.raises(PeerError, match=r"expired 1\.0 hours ago"):
            roster.redeem(secret, {"a" * 32: "desk"}, expires_s + HOUR_S)
        with pytest.raises(PeerError, match="not of this fleet"):
            other.redeem(secret, {"a" * 32: "desk"}, 1.0)

    def test_names_are_unique_among_those_who_are_not_revoked(self, tmp_path: Path) -> None:
        roster = Roster(tmp_path / "r")
        for device in ("a" * 32, "b" * 32):
            secret, _ = roster.invite(0.0)
            if device[0] == "b":
                with pytest.raises(PeerError, match=f"'desk' is taken by device {'a' * 32}"):
                    roster.redeem(secret, {device: "desk"}, 1.0)
                roster.revoke("desk", 2.0)
            roster.redeem(secret, {device: "desk"}, 3.0)
        assert roster.name_of("a" * 32) is None and roster.name_of("b" * 32) == "desk"
        with pytest.raises(PeerError, match="was revoked"):
            roster.redeem(roster.invite(0.0)[0], {"a" * 32: "other"}, 4.0)

    def test_a_revocation_must_name_one_device(self, tmp_path: Path) -> None:
        roster = Roster(tmp_path / "r")
        for name, device in (("desk", "a" * 32), ("laptop", "a" * 31 + "b")):
            roster.redeem(roster.invite(0.0)[0], {device: name}, 1.0)
        for named, words in (("nobody", "no device"), ("a", "no device"), ("a" * 10, "2 devices")):
            with pytest.raises(UserError, match=words):
                roster.revoke(named, 2.0)
        assert roster.revoke("a" * 32, 2.0).name == "desk"
        assert [m.revoked_s for m in roster.members()] == [2.0, None]

    def test_another_process_sees_it_and_no_secret_is_in_the_file(self, tmp_path: Path) -> None:
        roster, other = Roster(tmp_path / "r"), Roster(tmp_path / "r")
        secret, _ = other.invite(0.0)
        roster.redeem(secret, {"a" * 32: "desk"}, 1.0)
        other.revoke("desk", 2.0)
        assert roster.name_of("a" * 32) is None
        roster.close()
        other.close()
        assert all(secret not in path.read_bytes() for path in (tmp_path / "r").iterdir())
