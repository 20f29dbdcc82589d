"""Mutual authentication of the ranks of one job, before anything else is read from a connection.

Both sides prove that they know the job's secret, by a challenge and response in three messages (three-pass mutual
authentication with a keyed check function, ISO/IEC 9798-4)::

    listener -> caller     GREETING, nonce_L
    caller   -> listener   nonce_C, HMAC(secret, "caller",   role, nonce_L, nonce_C)
    listener -> caller              HMAC(secret, "listener", role, nonce_L, nonce_C)

Each side's nonce is new, so a recorded conversation is useless. The words "caller" and "listener" keep a proof from
being sent back to its author. The role names the purpose and the process that is called. So a proof that was meant for
another process, or for another purpose, is worthless. All messages have a fixed length.

This authenticates connections, not every byte on them: who can change packets on the way between two pods can still
take over a connection, and read it. Encryption is the network's (SECURITY.md). A listener computes nothing for a caller
that has not proved itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import secrets
import socket
import threading
import time
from collections.abc import Generator
from dataclasses import dataclass, field

_log = logging.getLogger(__name__)

GREETING = b"heterotrain rank 1\n"
"""First bytes of a listener, with the version of this exchange."""
NONCE_BYTES = 32
PROOF_BYTES = hashlib.sha256().digest_size
HANDSHAKE_S = 10.0
"""Limit for a caller's proof. Python may be blocked for seconds while a rank loads; a stranger costs a descriptor."""
MOST_HALF_OPEN = 256
"""Callers of one listener that may be without a proof at the same time; beyond, the oldest is cut off."""
LOG_INTERVAL_S = 60.0
"""Least time between two log lines about refused connections."""

Handshake = Generator[tuple[bytes, int], bytes, None]
"""Yields bytes to send and the number of bytes to receive after them; is sent what was received."""


class NotAuthenticatedError(ConnectionError):
    """The other side of a connection did not prove that it is the expected rank of this job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """What the ranks of one job have in common, and nobody else has.

    Attributes:
        secret: authenticates them.
    """

    secret: bytes = field(repr=False)


class Refusals:
    """Counts connections that were not authenticated; logs them at a limited rate. Safe to use from any thread.

    Attributes:
        count: connections refused so far.
    """

    def __init__(self) -> None:
        self.count = 0
        self._logged_s: float | None = None
        self._lock = threading.Lock()

    def add(self, where: str, address: object, why: str) -> None:
        """Count one refused connection; ``where`` names the listener."""
        with self._lock:
            self.count += 1
            now_s = time.monotonic()
            if self._logged_s is not None and now_s - self._logged_s < LOG_INTERVAL_S:
                return
            self._logged_s = now_s
        _log.warning(
            "refused a connection from %s to %s: %s (%d refused so far; the next %g s are not logged)",
            address, where, why, self.count, LOG_INTERVAL_S,
        )  # fmt: skip


REFUSALS = Refusals()
"""Of this process."""


def authenticate(
    connection: socket.socket, credentials: Credentials, *, role: str, listens: bool, end_s: float
) -> None:
    """Authenticate both sides of a connected, blocking socket; it has no time-out then, and is closed if that fails.

    Args:
        connection: the socket.
        credentials: of the job.
        role: purpose and called process; the same on both sides.
        listens: whether this side accepted the connection.
        end_s: limit, by the monotonic clock.

    Raises:
        NotAuthenticatedError: the other side did not prove that it belongs to the job.
        OSError: the connection broke, or (``TimeoutError``) the time is over.
    """
    try:
        _exchange_proofs(connection, credentials.secret, role=role, listens=listens, end_s=end_s)
    except BaseException:
        connection.close()
        raise
    connection.settimeout(None)


def _exchange_proofs(connection: socket.socket, secret: bytes, *, role: str, listens: bool, end_s: float) -> None:
    steps = _listener(secret, role) if listens else _caller(secret, role)
    received: bytes | None = None
    while True:
        try:
            data, size = steps.send(received) if received is not None else next(steps)
        except StopIteration:
            return
        connection.settimeout(seconds_left(end_s))
        if data:
            connection.sendall(data)
        received = receive(connection, size, end_s=end_s)


async def authenticate_streams(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, credentials: Credentials, *, role: str, listens: bool
) -> None:
    """Authenticate both sides of a connection, as ``authenticate`` does; the caller of this function limits the time.

    Raises:
        NotAuthenticatedError: the other side did not prove that it belongs to the job.
        OSError, asyncio.IncompleteReadError: the connection broke.
    """
    steps = _listener(credentials.secret, role) if listens else _caller(credentials.secret, role)
    received: bytes | None = None
    while True:
        try:
            data, size = steps.send(received) if received is not None else next(steps)
        except StopIteration:
            return
        if data:
            writer.write(data)
            await writer.drain()
        received = await reader.readexactly(size)


def receive(connection: socket.socket, size: int, *, end_s: float) -> bytes:
    """Return exactly ``size`` bytes from a blocking socket; leaves its time-out changed.

    Raises:
        OSError: the connection ended, or (``TimeoutError``) the time is over.
    """
    received = bytearray()
    while len(received) < size:
        connection.settimeout(seconds_left(end_s))
        part = connection.recv(size - len(received))
        if not part:
            raise ConnectionResetError("the other side ended the connection")
        received += part
    return bytes(received)


def shut_down(connection: socket.socket) -> None:
    """End a connection in both directions, and wake the threads that wait for it; safe from any thread."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def seconds_left(end_s: float) -> float:
    """Return the seconds until ``end_s`` by the monotonic clock.

    Raises:
        TimeoutError: there are none.
    """
    left_s = end_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("the time is over")
    return left_s


def peer_role(worker_uid: str, local_rank: int) -> str:
    """Return the role of a rank's peer port."""
    return f"peer {worker_uid}/{local_rank}"


def _listener(secret: bytes, role: str) -> Handshake:
    own = secrets.token_bytes(NONCE_BYTES)
    answer = yield GREETING + own, NONCE_BYTES + PROOF_BYTES
    theirs, proof = answer[:NONCE_BYTES], answer[NONCE_BYTES:]
    if not hmac.compare_digest(proof, _proof(secret, "caller", role, own, theirs)):
        raise NotAuthenticatedError("the caller does not know the job's secret, or means another process")
    yield _proof(secret, "listener", role, own, theirs), 0


def _caller(secret: bytes, role: str) -> Handshake:
    greeting = yield b"", len(GREETING)
    if greeting != GREETING:
        raise NotAuthenticatedError("the listener is not a rank of this version")
    theirs = yield b"", NONCE_BYTES
    own = secrets.token_bytes(NONCE_BYTES)
    proof = yield own + _proof(secret, "caller", role, theirs, own), PROOF_BYTES
    if not hmac.compare_digest(proof, _proof(secret, "listener", role, theirs, own)):
        raise NotAuthenticatedError("the listener does not know the job's secret")


def _proof(secret: bytes, side: str, role: str, listener_nonce: bytes, caller_nonce: bytes) -> bytes:
    """Return one side's proof; the role is hashed first, so that every part of the message has a fixed length."""
    about = hashlib.sha256(f"heterotrain connection 1 {side} {role}".encode()).digest()
    return hmac.digest(secret, about + listener_nonce + caller_nonce, "sha256")
