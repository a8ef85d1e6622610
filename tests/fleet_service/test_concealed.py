"""Digests that only devices can compare."""

from __future__ import annotations

import hashlib
import secrets

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from isthmus.errors import PeerError
from isthmus.runtime.identity import Identity
from isthmus.runtime.identity.blinded_digests import KEY_BYTES, blinded, proof, proves

A, B = hashlib.sha256(b"a").digest(), hashlib.sha256(b"b").digest()


@pytest.mark.parametrize("fingerprint", ["", "f" * 64, *(hashlib.sha256(bytes([n])).hexdigest() for n in range(8))])
def test_two_keys_agree_exactly_on_equal_data(fingerprint: str) -> None:
    ours, theirs = blinded(fingerprint, A), blinded(fingerprint, B)
    assert ours != theirs, "the same data look different under another key"
    assert ours == blinded(fingerprint, A), "and the same under the same"
    shown = proof(A, "a", "b", ours, theirs)
    assert proves(shown, B, "a", "b", ours, theirs)
    assert shown != proof(B, "b", "a", theirs, ours), "a proof that was shown cannot be shown back"
    other = blinded(fingerprint + "x", B)
    assert not proves(proof(A, "a", "b", ours, other), B, "a", "b", ours, other)
    assert not proves(proof(B, "b", "a", other, ours), A, "b", "a", other, ours)


def test_who_has_neither_key_can_show_nothing() -> None:
    ours, theirs = blinded("data", A), blinded("data", B)
    assert not proves(proof(secrets.token_bytes(KEY_BYTES), "a", "b", ours, theirs), B, "a", "b", ours, theirs)


def test_points_lie_on_the_curve_itself() -> None:
    """On the twist or not: that would be a bit of the fingerprint which no key conceals."""
    prime = 2**255 - 19
    for n in range(64):
        u = int.from_bytes(bytes.fromhex(blinded(str(n), A)), "little")
        assert pow((u**3 + 486662 * u**2 + u) % prime, (prime - 1) // 2, prime) == 1


@pytest.mark.parametrize("point", [bytes(32), b"\1" + bytes(31)])
def test_points_of_small_order_are_refused(point: bytes) -> None:
    """They would make everybody's proof the same."""
    with pytest.raises(PeerError, match="digest of data"):
        proof(A, "a", "b", blinded("data", A), point.hex())


def test_it_is_diffie_and_hellmans_own_arithmetic() -> None:
    def times(key: bytes, point: str) -> bytes:
        public = X25519PublicKey.from_public_bytes(bytes.fromhex(point))
        return X25519PrivateKey.from_private_bytes(key).exchange(public)

    assert times(B, blinded("data", A)) == times(A, blinded("data", B)) != times(A, blinded("other", B))


def test_a_devices_data_key_follows_from_its_key(device: Identity, coordinator: Identity) -> None:
    assert device.data_key() == device.data_key() != coordinator.data_key()
    assert len(device.data_key()) == KEY_BYTES
