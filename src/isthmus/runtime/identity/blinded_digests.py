"""Digests of data that only devices can compare: Diffie and Hellman's commuting keys, on Curve25519.

A device with key `a` says of data with fingerprint `x` no more than a * H(x), where H maps to points of the curve. Who
lacks `a` can test no guess of `x` with it. Another device, with key `b` and data `y`, multiplies that by `b`, and the
first one b * H(y) by `a`: both have the same point if and only if x = y (Meadows, 1986; Huberman, Franklin and Hogg,
1999). They show each other a hash of the point, one after the other, so a device that guesses is noticed: after a wrong
guess the comparison fails, or the other device does not answer.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from isthmus.errors import PeerError

KEY_BYTES = 32
_PRIME = 2**255 - 19
_COEFFICIENT = 486662
_TAG = b"isthmus data 1\0"


ONE_OWNER = hashlib.sha256(_TAG + b"one owner").digest()
"""The key of devices without identity: they run on the coordinator's own machine, where nobody is to learn less."""


def blinded(fingerprint: str, key: bytes) -> str:
    """The fingerprint under a device's key, 64 hexadecimal digits."""
    return _times(key, _point(fingerprint)).hex()


def proof(key: bytes, sender: str, receiver: str, sent: str, received: str) -> str:
    """Return the proof of the sender, whose key this is and who gave `sent`, for the receiver, who gave `received`.

    PeerError for a digest that is no point of the curve.
    """
    return _hash(_times(key, bytes.fromhex(received)), sender, receiver, sent, received)


def proves(shown: str, key: bytes, sender: str, receiver: str, sent: str, received: str) -> bool:
    """Return whether what the sender showed says that its data are equal to those of the receiver, whose key this
    is."""
    expected = _hash(_times(key, bytes.fromhex(sent)), sender, receiver, sent, received)
    return hmac.compare_digest(shown.encode(), expected.encode())


def _hash(shared: bytes, *about: str) -> str:
    encoded = b"".join(len(text.encode()).to_bytes(4, "big") + text.encode() for text in about)
    return hashlib.sha256(_TAG + shared + encoded).hexdigest()


def _point(fingerprint: str) -> bytes:
    """The first of a series of hashes that is the u coordinate of a point of the curve itself: whether one lies on the
    curve or on its twist would outlive every key, and tell a bit of the fingerprint."""
    for count in itertools.count():
        digest = hashlib.sha256(_TAG + count.to_bytes(4, "big") + fingerprint.encode()).digest()
        u = int.from_bytes(digest, "little") & ((1 << 255) - 1)
        square = (u**3 + _COEFFICIENT * u**2 + u) % _PRIME
        if u < _PRIME and pow(square, (_PRIME - 1) // 2, _PRIME) == 1:
            return u.to_bytes(KEY_BYTES, "little")
    raise AssertionError("half of all numbers do")


def _times(key: bytes, point: bytes) -> bytes:
    try:
        return X25519PrivateKey.from_private_bytes(key).exchange(X25519PublicKey.from_public_bytes(point))
    except ValueError as e:  # one of the few points of small order, or not 32 bytes
        raise PeerError(f"digest of data: {e}") from None
