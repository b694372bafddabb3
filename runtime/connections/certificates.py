"""A certificate for all processes of a deployment, and one for its administrators.

The authority's key is never written to disk.
"""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

PEER_NAME = "peer.decant.internal"
"""Checked by peers instead of the address."""

ADMIN_NAME = "admin.decant.internal"
"""In the certificate of administrators, where processes have it as ``admin_name``."""

_VALID_FOR = datetime.timedelta(days=3650)
"""The deployment deletes the files at its end."""
_CLOCK_SKEW = datetime.timedelta(hours=1)
_LOOPBACK = ("127.0.0.1", "::1")


@dataclass(frozen=True)
class PeerFiles:
    ca: Path
    certificate: Path
    key: Path
    admin_certificate: Path
    admin_key: Path


def make(folder: Path) -> PeerFiles:
    """Write keys and certificates that only this user can read into a new folder. Raises FileExistsError."""
    folder.mkdir(mode=0o700)
    ca_key, key, admin_key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(3))
    ca = _authority(ca_key)
    certificate = _certificate(PEER_NAME, key, ca, ca_key)
    admin = _certificate(ADMIN_NAME, admin_key, ca, ca_key)
    return PeerFiles(
        ca=_write(folder / "ca.crt", ca.public_bytes(serialization.Encoding.PEM)),
        certificate=_write(folder / "tls.crt", certificate.public_bytes(serialization.Encoding.PEM)),
        key=_write(folder / "tls.key", _private(key)),
        admin_certificate=_write(folder / "admin.crt", admin.public_bytes(serialization.Encoding.PEM)),
        admin_key=_write(folder / "admin.key", _private(admin_key)),
    )


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _authority(key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    name = _name("decant authority")
    usage = x509.KeyUsage(
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )
    return (
        _builder(name, name, key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .sign(key, hashes.SHA256())
    )


def _certificate(
    name: str, key: ec.EllipticCurvePrivateKey, ca: x509.Certificate, ca_key: ec.EllipticCurvePrivateKey
) -> x509.Certificate:
    names: list[x509.GeneralName] = [x509.DNSName(name)]
    if name == PEER_NAME:
        names += [x509.IPAddress(ip_address(address)) for address in _LOOPBACK]
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    return (
        _builder(_name(name), ca.subject, key)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA256())
    )


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + _VALID_FOR)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _write(path: Path, content: bytes) -> Path:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with open(descriptor, "wb") as file:
        file.write(content)
    return path
