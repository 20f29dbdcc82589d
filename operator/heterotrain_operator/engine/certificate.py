"""The key pair of an encrypted job, made once and shared by its workers."""

from __future__ import annotations

from datetime import UTC, datetime

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

_BEGIN = datetime(1970, 1, 1, tzinfo=UTC)
_END = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)
"""RFC 5280, section 4.1.2.5: the value for certificates without an end.

Only the job's own ranks trust the certificate, and they trust no other. So its Secret ends it, with the job, and a node
with a wrong clock does not.
"""


def make_certificate(name: str) -> tuple[bytes, bytes]:
    """Return a new certificate, signed by itself, and its private key (P-256), both as PEM.

    Args:
        name: whom the certificate names; at most 64 characters count.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name[:64])])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_BEGIN)
        .not_valid_after(_END)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)  # it signs no other
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return certificate.public_bytes(serialization.Encoding.PEM), private
