"""Certificates of jobs, made as the operator makes them."""

from __future__ import annotations

from pathlib import Path

from heterotrain.network.encryption import Tls
from heterotrain_core.contract import keys
from heterotrain_operator.engine.certificate import make_certificate


def put_certificate(folder: Path, name: str = "job") -> Tls:
    """Write a new certificate with its key as they are mounted in a worker; return them as a rank uses them."""
    certificate, private_key = make_certificate(name)
    (folder / keys.TLS_CERTIFICATE_KEY).write_bytes(certificate)
    (folder / keys.TLS_PRIVATE_KEY).write_bytes(private_key)
    return Tls.mounted(str(folder))
