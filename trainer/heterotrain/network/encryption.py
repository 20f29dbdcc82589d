"""Optional TLS 1.3 below the authentication of ranks: a key pair and a certificate that all ranks of one job share.

Each side shows the certificate and accepts this one only, so a connection is private to the job's ranks, and nobody on
the way can take it over. The key pair comes from the job's Secret with the certificate
(``HeteroTrainJob`` field ``training.communication.encryption``).

Sockets of ``ssl`` differ from plain ones in two points that matter here. A call that would block raises errors of its
own (``WOULD_BLOCK``). And ``SSLSocket.shutdown`` first goes back to plain text: a thread that is about to write would
send its bytes in the clear. ``shut_down`` ends the connection below TLS instead, from any thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import time
from pathlib import Path
from typing import Self

from heterotrain_core.contract import keys

from heterotrain.errors import UsageError

WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
"""What a non-blocking socket raises when it has nothing to read, or no room to write."""


class Tls:
    """The settings of both sides of a connection between ranks of one job."""

    def __init__(self, certificate: Path, private_key: Path) -> None:
        """Read the files.

        Raises:
            OSError: they cannot be read, or (``ssl.SSLError``) are not a certificate with its key.
        """
        self._listens = _context(ssl.PROTOCOL_TLS_SERVER, certificate, private_key)
        self._listens.num_tickets = 0  # sessions are not resumed; a caller that never reads would find them unread
        self._calls = _context(ssl.PROTOCOL_TLS_CLIENT, certificate, private_key)

    @classmethod
    def mounted(cls, folder: str | None) -> Self:
        """Read the key pair that the operator mounts.

        Raises:
            UsageError: there is none.
        """
        if folder is None:
            raise UsageError(
                "the job asks for encryption, but this worker has no secret: an older operator started it. Suspend and "
                "resume the job"
            )
        try:
            return cls(Path(folder) / keys.TLS_CERTIFICATE_KEY, Path(folder) / keys.TLS_PRIVATE_KEY)
        except OSError as error:
            raise UsageError(
                f"the job asks for encryption, but its certificate cannot be used ({error}): suspend the job, delete "
                "its Secret …-workers-tls, and resume it"
            ) from error

    def over(self, connection: socket.socket, *, listens: bool, end_s: float) -> ssl.SSLSocket:
        """Take over a connected, blocking socket and encrypt it; it is closed if that fails.

        Raises:
            OSError: the other side has another certificate, or the connection broke, or (``TimeoutError``) the time is
                over.
        """
        left_s = end_s - time.monotonic()
        if left_s <= 0:
            connection.close()
            raise TimeoutError("the time is over")
        connection.settimeout(left_s)
        context = self._listens if listens else self._calls
        return context.wrap_socket(connection, server_side=listens)

    async def over_streams(self, writer: asyncio.StreamWriter, *, listens: bool) -> None:
        """Encrypt a connection of asyncio; the caller limits the time. The side was chosen when it was opened.

        Raises:
            OSError: the other side has another certificate, or the connection broke.
        """
        await writer.start_tls(self._listens if listens else self._calls)


def shut_down(connection: socket.socket) -> None:
    """End a connection in both directions, encrypted or not, and wake whoever waits for it; safe from any thread."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


def holds_more(connection: socket.socket) -> bool:
    """Return whether decrypted bytes wait in the process, of which ``poll`` does not know."""
    return isinstance(connection, ssl.SSLSocket) and connection.pending() > 0


def _context(protocol: ssl._SSLMethod, certificate: Path, private_key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # one certificate for all ranks; the proof that follows names the called process
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(certificate, private_key)
    context.load_verify_locations(cafile=certificate)
    return context
