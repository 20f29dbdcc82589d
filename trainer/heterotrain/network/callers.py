"""Callers of a listener: each proves that it belongs to the job, and all that cannot cost a bounded amount together."""

from __future__ import annotations

import asyncio

from heterotrain.network.authentication import (
    HANDSHAKE_S,
    MOST_HALF_OPEN,
    REFUSALS,
    Credentials,
    NotAuthenticatedError,
    authenticate_streams,
)


class Callers:
    """Authenticates the callers of one asyncio listener.

    Args:
        credentials: of the job.
        role: purpose and called process; see ``network.authentication``.
        where: names the listener in the log.
        handshake_s: limit for a caller's proof.
    """

    def __init__(self, credentials: Credentials, *, role: str, where: str, handshake_s: float = HANDSHAKE_S) -> None:
        self._credentials = credentials
        self._role = role
        self._where = where
        self._handshake_s = handshake_s
        self._half_open: dict[asyncio.StreamWriter, None] = {}

    @property
    def half_open(self) -> int:
        """Number of callers without a proof; at most ``MOST_HALF_OPEN``."""
        return len(self._half_open)

    async def authenticate(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Return whether a caller belongs to the job; the connection of one that does not is cut off and counted."""
        if len(self._half_open) >= MOST_HALF_OPEN:
            oldest = next(iter(self._half_open))
            del self._half_open[oldest]
            oldest.transport.abort()  # its own handshake counts it
        self._half_open[writer] = None
        why = ""
        try:
            async with asyncio.timeout(self._handshake_s):
                await authenticate_streams(reader, writer, self._credentials, role=self._role, listens=True)
        except NotAuthenticatedError as error:
            why = str(error)
        except TimeoutError:
            why = f"it sent no proof within {self._handshake_s:g} s"
        except (OSError, asyncio.IncompleteReadError):
            why = "it ended without a proof"
        finally:
            self._half_open.pop(writer, None)
        if why:
            REFUSALS.add(self._where, writer.get_extra_info("peername"), why)
            writer.transport.abort()
        return not why
