"""A party's key and certificate, and the id that follows from its key."""

from __future__ import annotations

import datetime
import hashlib
import time
from pathlib import Path
from typing import Literal, cast, get_args

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from isthmus.errors import PeerError, UserError
from isthmus.runtime.identity.blinded_digests import ONE_OWNER
from isthmus.runtime.identity.files import private_folder, read_private, write_private
from isthmus.runtime.identity.roster import ROSTER

Role = Literal["coordinator", "device"]
ID_DIGITS = 32  # hexadecimal: 128 bits, so nobody finds a second key with the id of another's
_URI = "isthmus:"
REJOIN = "join again with a new ticket (--ticket-file) in another --state folder"
PRIVATE_BYTES = 32  # bytes of the number that a private key is
KEY, CERTIFICATE, AUTHORITY = "key.pem", "certificate.pem", "authority.pem"
_SHARED = "one-owner"


class Party(msgspec.Struct, frozen=True):
    """The other end of an authenticated connection."""

    role: Role
    id: str  # the id of the peer's key, see `id_of`


def id_of(key: CertificatePublicKeyTypes) -> str:
    """The first `ID_DIGITS` hexadecimal digits of the SHA-256 of the key's SubjectPublicKeyInfo (DER)."""
    spki = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(spki).hexdigest()[:ID_DIGITS]


def role_uri(role: Role) -> str:
    """Return how a certificate says what its holder may be: a device's must not do for a coordinator's."""
    return f"{_URI}{role}"


def party_of(certificate_der: bytes) -> Party:
    """The holder of a certificate that has been verified. PeerError when it names no role that we know."""
    certificate = x509.load_der_x509_certificate(certificate_der)
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    except x509.ExtensionNotFound:
        uris = []
    roles = [uri.removeprefix(_URI) for uri in uris]
    if len(roles) != 1 or roles[0] not in get_args(Role):
        raise PeerError(f"its certificate names {uris}, expected one of: {', '.join(map(role_uri, get_args(Role)))}")
    return Party(cast(Role, roles[0]), id_of(certificate.public_key()))


class Identity:
    """A folder with a party's key (0600), its certificate, and the authority that both sides are verified against.

    Read anew wherever it is used: a certificate is renewed while processes run.
    """

    def __init__(self, folder: Path, remedy: str = REJOIN) -> None:
        """`remedy` is what a person can do about a file that is damaged."""
        self.folder = folder
        self._remedy = remedy
        self.key_path = folder / KEY
        self.certificate_path = folder / CERTIFICATE
        self.authority_path = folder / AUTHORITY

    @classmethod
    def made(cls, folder: Path, remedy: str = REJOIN) -> Identity:
        """The identity in this folder, with a new key where there is none. UserError when it cannot be kept there."""
        identity = cls(private_folder(folder), remedy)
        if not identity.key_path.exists():
            key = ec.generate_private_key(ec.SECP256R1())
            write_private(identity.key_path, pem_of(key))
        return identity

    @property
    def complete(self) -> bool:
        """Return whether an authority has certified the key."""
        return all(path.is_file() for path in (self.key_path, self.certificate_path, self.authority_path))

    @property
    def begun(self) -> bool:
        """Return whether there is anything that an authority has sent, be it damaged."""
        return any(path.exists() for path in (self.certificate_path, self.authority_path))

    @property
    def id(self) -> str:
        return id_of(self._key().public_key())

    def data_key(self) -> bytes:
        """Under which this device conceals what its data are: 32 bytes that follow from its key, and tell nothing of
        it. `ONE_OWNER` after `share_data`."""
        if (self.folder / _SHARED).exists():
            return ONE_OWNER
        secret = self._key().private_numbers().private_value
        return hashlib.sha256(b"isthmus data key 1\0" + secret.to_bytes(PRIVATE_BYTES, "big")).digest()

    def share_data(self) -> None:
        """The coordinator and all devices are of this device's owner: nothing of its data needs to be concealed from
        them. So a device that takes another's place has the same digests."""
        write_private(self.folder / _SHARED, b"")

    def expires_s(self) -> float:
        """Return when the certificate ends: seconds since 1970."""
        return self._certificate().not_valid_after_utc.timestamp()

    def is_due(self, now_s: float) -> bool:
        """Return whether half of the certificate's life is over: time to renew it."""
        certificate = self._certificate()
        middle_s = (certificate.not_valid_before_utc.timestamp() + certificate.not_valid_after_utc.timestamp()) / 2
        return now_s >= middle_s

    def request(self) -> bytes:
        """A signing request (DER): proves that we hold the key. The authority decides what the certificate says."""
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, self.id)])
        builder = x509.CertificateSigningRequestBuilder(name)
        return builder.sign(self._key(), SHA256()).public_bytes(serialization.Encoding.DER)

    def keep(self, certificate_der: bytes, authority_der: bytes) -> None:
        """Store what an authority issued. PeerError unless it is a certificate of our key by this authority."""
        try:
            certificate = x509.load_der_x509_certificate(certificate_der)
            authority = x509.load_der_x509_certificate(authority_der)
            certificate.verify_directly_issued_by(authority)
        except Exception as e:  # what the library raises for bad signatures and bad bytes has no common base
            raise PeerError(f"the certificate that was issued cannot be used: {type(e).__name__}: {e}") from None
        if id_of(certificate.public_key()) != self.id:
            raise PeerError("the certificate that was issued is of another key")
        write_private(self.authority_path, authority.public_bytes(serialization.Encoding.PEM))
        write_private(self.certificate_path, certificate.public_bytes(serialization.Encoding.PEM))

    def check(self, authority_der: bytes | None = None) -> None:
        """UserError unless key, certificate and authority can be read and belong together, and the authority is the
        expected one, if one is."""
        certificate, authority = self._certificate(), load_certificate(self.authority_path, self._remedy)
        if id_of(certificate.public_key()) != self.id:
            raise UserError(
                f"certificate {self.certificate_path}: is of another key than {self.key_path}: {self._remedy}"
            )
        try:
            certificate.verify_directly_issued_by(authority)
        except Exception:  # what the library raises has no common base
            other = f"was issued by another authority than {self.authority_path}"
            raise UserError(f"certificate {self.certificate_path}: {other}: {self._remedy}") from None
        if authority_der not in (None, self.authority_der()):
            raise UserError(f"certificate {self.authority_path}: is of another fleet: {self._remedy}")

    def authority_der(self) -> bytes:
        return load_certificate(self.authority_path, self._remedy).public_bytes(serialization.Encoding.DER)

    def _key(self) -> ec.EllipticCurvePrivateKey:
        return load_key(self.key_path, self._remedy)

    def _certificate(self) -> x509.Certificate:
        return load_certificate(self.certificate_path, self._remedy)


def pem_of(key: ec.EllipticCurvePrivateKey) -> bytes:
    """Without a passphrase, as services start unattended: the file's mode protects it."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def load_key(path: Path, remedy: str) -> ec.EllipticCurvePrivateKey:
    """UserError for a file that holds no such key, or that others may read; it ends with the remedy."""
    data = read_private(path, "key", remedy)
    try:
        key = serialization.load_pem_private_key(data, password=None)
    except Exception:  # what the library raises for bad bytes has no common base
        raise UserError(f"key {path}: is not a key, or is damaged: {remedy}") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise UserError(f"key {path}: got {type(key).__name__}, expected one on an elliptic curve: {remedy}")
    return key


def load_certificate(path: Path, remedy: str) -> x509.Certificate:
    """UserError for a file that holds none; it ends with the remedy."""
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except OSError as e:
        raise UserError(f"certificate {path}: cannot be read: {e.strerror or e}: {remedy}") from None
    except Exception:  # what the library raises for bad bytes has no common base
        raise UserError(f"certificate {path}: is not a certificate, or is damaged: {remedy}") from None


def utc(time_s: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(time_s, datetime.UTC)


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
