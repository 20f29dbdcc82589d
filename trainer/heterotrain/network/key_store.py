"""A store of a formation's addresses, hosted by one rank and reached over authenticated connections.

torch's own ``TCPStore`` listens on a port of its own and answers anybody. Here a store is a table in the memory of the
rank that hosts it, and all ranks reach it through that rank's peer port. Groups only ever set keys that nobody has
set before, and read the keys of all ranks. So a reader gets, with each answer, everything set since its last one:
whatever the order in which it asks, each value travels to it once.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from heterotrain.network.authentication import receive, shut_down

_REQUEST = struct.Struct("!cII")
"""Operation, length of the key, length of the value."""
_ENTRY = struct.Struct("!II")
_COUNT = struct.Struct("!I")
_SET, _READ = b"S", b"R"
_Store: Any = dist.Store  # type: ignore[attr-defined]  # not in torch's type information
_MOST_BYTES = 64 * 1024 * 1024
"""Limit for one key or value, against a peer of another version that counts otherwise."""
_MOST_ENTRIES = 1 << 22


class KeyTable:
    """Keys and values of one formation, in the event loop of the rank that hosts them."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Make an empty table; all but ``close`` is called in the loop."""
        self._loop = loop
        self._log: list[tuple[bytes, bytes]] = []
        self._is_set: dict[bytes, asyncio.Event] = {}
        self.is_closed = False

    def set(self, key: bytes, value: bytes) -> None:
        """Append an entry and wake everybody who waits for it."""
        self._log.append((key, value))
        self._event(key).set()

    async def read(self, key: bytes, *, since: int) -> list[tuple[bytes, bytes]]:
        """Wait for a key, without a limit; return all entries from number ``since`` on.

        Raises:
            OSError: the table was closed.
        """
        if not self.is_closed:
            await self._event(key).wait()
        if self.is_closed:
            raise ConnectionResetError("the formation was given up")
        return self._log[since:]

    def close(self) -> None:
        """Make all waits fail, now and later; safe from any thread."""
        self.is_closed = True
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._wake)

    def _event(self, key: bytes) -> asyncio.Event:
        return self._is_set.setdefault(key, asyncio.Event())

    def _wake(self) -> None:
        for event in self._is_set.values():
            event.set()


async def serve(table: KeyTable, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer one authenticated peer until its connection ends.

    Raises:
        OSError, asyncio.IncompleteReadError: the connection ended, or the table was closed.
        ValueError: the peer sent something else than a request.
    """
    sent = 0
    while True:
        operation, key_bytes, value_bytes = _REQUEST.unpack(await reader.readexactly(_REQUEST.size))
        if max(key_bytes, value_bytes) > _MOST_BYTES or operation not in (_SET, _READ):
            raise ValueError("not a request to a store")
        key = await reader.readexactly(key_bytes)
        if operation == _SET:
            table.set(key, await reader.readexactly(value_bytes))
            writer.write(_COUNT.pack(0))
        else:
            entries = await table.read(key, since=sent)
            sent += len(entries)
            writer.write(_COUNT.pack(len(entries)))
            writer.writelines(_ENTRY.pack(len(k), len(v)) + k + v for k, v in entries)
        await writer.drain()


class KeyStore(_Store):  # type: ignore[misc]  # as above
    """What groups need of a store, as each rank sees it; gloo and NCCL call it from threads of their own."""

    def __init__(self, connection: socket.socket, *, limit_s: float) -> None:
        """Use a connection that the hosting rank answers with ``serve``; reads wait for at most ``limit_s`` seconds."""
        super().__init__()
        self._connection = connection
        self._limit_s = limit_s
        self._known: dict[bytes, bytes] = {}
        self._lock = threading.Lock()
        self._requests = threading.Lock()

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key that no rank has set before.

        Raises:
            OSError: the store is not reached.
        """
        content = value.encode() if isinstance(value, str) else bytes(value)
        self._ask(_SET, key.encode(), content)

    def get(self, key: str) -> bytes:
        """Return a key's value as soon as a rank has set it.

        Raises:
            OSError: the store is not reached, or no rank set the key in time.
        """
        name = key.encode()
        with self._lock:
            if name not in self._known:
                self._known.update(self._ask(_READ, name))
            return self._known[name]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:  # noqa: ARG002  # torch's signature
        """Return when all these keys are set.

        Raises:
            OSError: the store is not reached, or no rank set a key in time.
        """
        for key in keys:
            self.get(key)

    def cut(self) -> None:
        """Make all waits of this rank fail, now and later; safe from any thread."""
        shut_down(self._connection)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _ask(self, operation: bytes, key: bytes, value: bytes = b"") -> list[tuple[bytes, bytes]]:
        end_s = time.monotonic() + self._limit_s
        with self._requests:
            self._connection.settimeout(self._limit_s)
            self._connection.sendall(_REQUEST.pack(operation, len(key), len(value)) + key + value)
            (count,) = _COUNT.unpack(receive(self._connection, _COUNT.size, end_s=end_s))
            if count > _MOST_ENTRIES:
                raise ConnectionAbortedError(f"a store sends {count} entries")
            entries = []
            for _ in range(count):
                key_bytes, value_bytes = _ENTRY.unpack(receive(self._connection, _ENTRY.size, end_s=end_s))
                if max(key_bytes, value_bytes) > _MOST_BYTES:
                    raise ConnectionAbortedError("a store sends an entry that is too long")
                name = receive(self._connection, key_bytes, end_s=end_s)
                entries.append((name, receive(self._connection, value_bytes, end_s=end_s)))
            return entries


def close_store(store: Any) -> None:
    """End a formation's store; does nothing to other kinds, such as torchrun's."""
    if isinstance(store, KeyStore):
        store.cut()
        store.close()
