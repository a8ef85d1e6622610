"""Texts signed with a device's key, and checked with the fleet's certificates."""

from __future__ import annotations

import datetime

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding

from isthmus.errors import PeerError
from isthmus.runtime.identity.keys import REJOIN, Identity, load_certificate, load_key, party_of


class DeviceSigner:
    """Signs as one device. Its certificate is read anew each time: it is renewed while processes run."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity

    def sign(self, text: bytes) -> tuple[bytes, bytes]:
        """(certificate, signature), DER."""
        key = load_key(self._identity.key_path, REJOIN)
        certificate = load_certificate(self._identity.certificate_path, REJOIN)
        return certificate.public_bytes(Encoding.DER), key.sign(text, ec.ECDSA(SHA256()))

    def check(self, certificate: bytes, signature: bytes, text: bytes) -> str:
        """The id of the device that signed. PeerError unless the fleet's authority certified it, and it did."""
        try:
            found = x509.load_der_x509_certificate(certificate)
            found.verify_directly_issued_by(load_certificate(self._identity.authority_path, REJOIN))
            key = found.public_key()
            if not isinstance(key, ec.EllipticCurvePublicKey):
                raise PeerError(f"got {type(key).__name__}")
            key.verify(signature, text, ec.ECDSA(SHA256()))
        except Exception as e:  # what the library raises for bad signatures and bad bytes has no common base
            raise PeerError(f"keys of a site are not signed by a device of this fleet: {type(e).__name__}") from None
        now = datetime.datetime.now(datetime.UTC)
        if not found.not_valid_before_utc <= now <= found.not_valid_after_utc:
            raise PeerError("keys of a site are signed with a certificate that is not valid now")
        party = party_of(certificate)
        if party.role != "device":
            raise PeerError(f"keys of a site are signed by a {party.role}, expected a device")
        return party.id
