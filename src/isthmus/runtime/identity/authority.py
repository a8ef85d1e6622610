"""The fleet's private authority: made once, certifies the coordinator and the devices that joined."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from isthmus.errors import PeerError, UserError
from isthmus.runtime.identity.files import private_folder, write_private
from isthmus.runtime.identity.keys import Role, id_of, load_certificate, load_key, pem_of, role_uri, utc
from isthmus.runtime.identity.roster import ROSTER

AUTHORITY_LIFE_S = 10 * 365 * 86400.0
CERTIFICATE_LIFE_S = 86400.0
"""Seconds that a device's certificate is valid: a stolen key is of use for a day at most. Devices renew at half of
it."""
SKEW_S = 2 * 3600.0  # certificates begin earlier by this much: clocks of other machines may be behind
_KEY, _CERTIFICATE = "authority.key", "authority.pem"
_REMEDY = "put back a copy of both files, or begin a new fleet in another --state folder, which all devices join anew"


class Authority:
    """Key and certificate in a folder of the coordinator's machine; the key never leaves it."""

    def __init__(self, folder: Path) -> None:
        """Open the authority in this folder; make it where there is none. UserError when that cannot be done."""
        private_folder(folder)
        if not (folder / _CERTIFICATE).exists():
            if (folder / ROSTER).exists():  # made after both: devices trust an authority that is gone
                raise UserError(f"certificate {folder / _CERTIFICATE}: not found: {_REMEDY}")
            if not (folder / _KEY).exists():
                write_private(folder / _KEY, pem_of(ec.generate_private_key(ec.SECP256R1())))
            signed = _self_signed(load_key(folder / _KEY, _REMEDY))
            write_private(folder / _CERTIFICATE, signed.public_bytes(serialization.Encoding.PEM))
        self._key = load_key(folder / _KEY, _REMEDY)
        self._certificate = load_certificate(folder / _CERTIFICATE, _REMEDY)
        if id_of(self._certificate.public_key()) != id_of(self._key.public_key()):
            raise UserError(f"certificate {folder / _CERTIFICATE}: is of another key than {folder / _KEY}: {_REMEDY}")

    def der(self) -> bytes:
        return self._certificate.public_bytes(serialization.Encoding.DER)

    @property
    def fingerprint(self) -> bytes:
        """SHA-256 of the certificate: 32 bytes."""
        return hashlib.sha256(self.der()).digest()

    def certify(self, request_der: bytes, role: Role, life_s: float = CERTIFICATE_LIFE_S) -> tuple[str, bytes]:
        """The id and the certificate (DER) for the key that signed the request. PeerError for an invalid request.

        Only the request's key is used: the authority sets the names and extensions.
        """
        key = requested_key(request_der)
        name = id_of(key)
        now_s = time.time()
        usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH])
        builder = (
            _named(name, self._certificate.subject, key, now_s - SKEW_S, now_s + life_s)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(usage, critical=False)
            .add_extension(_key_usage(ca=False), critical=True)
            .add_extension(
                x509.SubjectAlternativeName([x509.UniformResourceIdentifier(role_uri(role))]), critical=False
            )
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        )
        return name, builder.sign(self._key, SHA256()).public_bytes(serialization.Encoding.DER)


def fingerprint_in(folder: Path) -> bytes:
    """The fingerprint of the authority in this folder; b"" without one. UserError for one that is damaged."""
    path = folder / _CERTIFICATE
    if not path.exists():
        return b""
    return hashlib.sha256(load_certificate(path, _REMEDY).public_bytes(serialization.Encoding.DER)).digest()


def requested_key(request_der: bytes) -> CertificatePublicKeyTypes:
    """The key of a signing request whose signature shows that the sender holds it. PeerError otherwise."""
    try:
        request = x509.load_der_x509_csr(request_der)
        key, signed = request.public_key(), request.is_signature_valid
    except Exception as e:  # bad bytes raise ValueError, unknown algorithms UnsupportedAlgorithm
        raise PeerError(f"its signing request cannot be read: {type(e).__name__}") from None
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1) or not signed:
        raise PeerError("its signing request is not signed by a P-256 key of its own")
    return key


def _self_signed(key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    now_s = time.time()
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"isthmus fleet {id_of(key.public_key())}")])
    builder = (
        _named(None, name, key.public_key(), now_s - SKEW_S, now_s + AUTHORITY_LIFE_S)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(ca=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    return builder.sign(key, SHA256())


def _named(
    name: str | None, issuer: x509.Name, key: CertificatePublicKeyTypes, from_s: float, until_s: float
) -> x509.CertificateBuilder:
    """`name` None: the issuer's own."""
    subject = issuer if name is None else x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(utc(from_s))
        .not_valid_after(utc(until_s))
    )


def _key_usage(*, ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not ca,
        key_cert_sign=ca,
        crl_sign=ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
