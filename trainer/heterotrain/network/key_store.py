"""A store of a formation's addresses, hosted by one rank and reached over authenticated connections.

torch's own ``TCPStore`` listens on a port of its own and answers anybody. Here a store is a table in the memory of the
rank that hosts it, and the others reach it through that rank's peer port. Groups only ever set keys that nobody has
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
    """Keys and values of one formation, on the rank that hosts them. Safe to use from any thread."""

    def __init__(self) -> None:
        self._log: list[tuple[bytes, bytes]] = []
        self._keys: set[bytes] = set()
        self._changed = threading.Condition()
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
        self.is_closed = False

    def set(self, key: bytes, value: bytes) -> None:
        """Append an entry and wake everybody who waits for one."""
        with self._changed:
            self._log.append((key, value))
            self._keys.add(key)
            self._wake()

    def close(self) -> None:
        """Make all waits fail, now and later."""
        with self._changed:
            self.is_closed = True
            self._wake()

    def read(self, key: bytes, *, since: int, end_s: float) -> list[tuple[bytes, bytes]]:
        """Wait for a key; return all entries from number ``since`` on.

        Raises:
            OSError: the table was closed, or (``TimeoutError``) the time is over.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.is_closed or key in self._keys, max(0.0, end_s - time.monotonic()))
            self._check()
            if key not in self._keys:
                raise TimeoutError(f"no rank has set {key.decode(errors='replace')}")
            return self._log[since:]

    async def read_async(self, key: bytes, *, since: int) -> list[tuple[bytes, bytes]]:
        """Do the same without blocking the loop and without a limit.

        Raises:
            OSError: the table was closed.
        """
        entry = (asyncio.get_running_loop(), asyncio.Event())
        with self._changed:
            self._waiting.append(entry)
        try:
            while True:
                with self._changed:
                    self._check()
                    if key in self._keys:
                        return self._log[since:]
                    entry[1].clear()
                await entry[1].wait()
        finally:
            with self._changed:
                self._waiting.remove(entry)

    def _check(self) -> None:
        if self.is_closed:
            raise ConnectionResetError("the formation was given up")

    def _wake(self) -> None:
        self._changed.notify_all()
        for loop, event in self._waiting:
            with contextlib.suppress(RuntimeError):  # that loop is closed
                loop.call_soon_threadsafe(event.set)


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
            entries = await table.read_async(key, since=sent)
            sent += len(entries)
            writer.write(_COUNT.pack(len(entries)))
            writer.writelines(_ENTRY.pack(len(k), len(v)) + k + v for k, v in entries)
        await writer.drain()


class _KeyStore(_Store):  # type: ignore[misc]  # as above
    """What groups need of a store; gloo and NCCL call it from threads of their own."""

    def __init__(self, *, limit_s: float) -> None:
        """Make a store whose reads wait for at most ``limit_s`` seconds."""
        super().__init__()
        self._limit_s = limit_s
        self._known: dict[bytes, bytes] = {}
        self._lock = threading.Lock()

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key that no rank has set before.

        Raises:
            OSError: the store is not reached.
        """
        self._put(key.encode(), value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        """Return a key's value as soon as a rank has set it.

        Raises:
            OSError: the store is not reached, or no rank set the key in time.
        """
        name = key.encode()
        with self._lock:
            if name not in self._known:
                self._known.update(self._fetch(name, time.monotonic() + self._limit_s))
            return self._known[name]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:  # noqa: ARG002  # torch's signature
        """Return when all these keys are set.

        Raises:
            OSError: the store is not reached, or no rank set a key in time.
        """
        for key in keys:
            self.get(key)

    def cut(self) -> None:
        """Make all waits fail, now and later; safe from any thread."""
        raise NotImplementedError

    def _put(self, key: bytes, value: bytes) -> None:
        raise NotImplementedError

    def _fetch(self, key: bytes, end_s: float) -> list[tuple[bytes, bytes]]:
        raise NotImplementedError


class HostedKeyStore(_KeyStore):
    """The store as the rank sees it that hosts the table."""

    def __init__(self, table: KeyTable, *, limit_s: float) -> None:
        super().__init__(limit_s=limit_s)
        self._table = table
        self._read = 0

    def cut(self) -> None:
        """Make all waits fail, also those of other ranks."""
        self._table.close()

    def _put(self, key: bytes, value: bytes) -> None:
        self._table.set(key, value)

    def _fetch(self, key: bytes, end_s: float) -> list[tuple[bytes, bytes]]:
        entries = self._table.read(key, since=self._read, end_s=end_s)
        self._read += len(entries)
        return entries


class RemoteKeyStore(_KeyStore):
    """The store as other ranks see it."""

    def __init__(self, connection: socket.socket, *, limit_s: float) -> None:
        """Use a connection that the hosting rank answers with ``serve``."""
        super().__init__(limit_s=limit_s)
        self._connection = connection
        self._requests = threading.Lock()

    def cut(self) -> None:
        """Make all waits of this rank fail."""
        shut_down(self._connection)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _put(self, key: bytes, value: bytes) -> None:
        self._ask(_SET, key, value, time.monotonic() + self._limit_s)

    def _fetch(self, key: bytes, end_s: float) -> list[tuple[bytes, bytes]]:
        return self._ask(_READ, key, b"", end_s)

    def _ask(self, operation: bytes, key: bytes, value: bytes, end_s: float) -> list[tuple[bytes, bytes]]:
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
    if isinstance(store, _KeyStore):
        store.cut()
    if isinstance(store, RemoteKeyStore):
        store.close()
