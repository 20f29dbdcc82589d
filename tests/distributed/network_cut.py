"""A network cut on one machine: the kernel drops all data that arrives at this process's TCP connections.

No packet is acknowledged any more, and neither side gets an error, as with a node that has lost its network. Data that
this process sends still arrives, so peers may complete an exchange that is never complete for this process.

The cut can be limited to connections to one peer's port. That peer can then still connect to this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import socket
import struct
import threading
import time
from pathlib import Path
from typing import Any

from heterotrain.network.gloo.abort import open_sockets
from heterotrain_core.contract import env

ATTACH_FILTER, DETACH_FILTER = 26, 27
"""``SO_ATTACH_FILTER`` and ``SO_DETACH_FILTER`` of Linux, which Python does not name."""
_DROP = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # one instruction: return 0 bytes
_PROGRAM = struct.pack("H6xQ", 1, ctypes.addressof(_DROP))


def cut(until: Path, *, to_port: int | None = None) -> None:
    """Cut existing and new connections until a file appears.

    Args:
        until: the file.
        to_port: cut only connections to this port of a peer; ``None`` cuts all except those to this process's metrics.
    """
    if to_port is None:
        _cut_from_creation(until)
    _set(ATTACH_FILTER, to_port)
    threading.Thread(target=_hold, args=(until, to_port), daemon=True).start()


def refuse(port: int) -> None:
    """Make every new connection from this process to this port fail, even before the cut applies to it."""
    connect = asyncio.open_connection

    async def refusing(host: str, to_port: int, **options: Any) -> Any:
        if to_port == port:
            raise TimeoutError("injected fault: no answer")
        return await connect(host, to_port, **options)

    asyncio.open_connection = refusing  # type: ignore[assignment]  # a deliberate wrapper


def _cut_from_creation(until: Path) -> None:
    """Cut Python's new connections before they are made: on loopback, a vote can pass before ``_hold`` finds them.

    An accepted connection has the filter of its listening socket.
    """
    create = socket.socket.__init__

    def created(self: socket.socket, *arguments: Any, **options: Any) -> None:
        create(self, *arguments, **options)
        connects = options.get("fileno") is None and len(arguments) < 4
        if connects and self.family in (socket.AF_INET, socket.AF_INET6) and not until.exists():
            self.setsockopt(socket.SOL_SOCKET, ATTACH_FILTER, _PROGRAM)

    socket.socket.__init__ = created  # type: ignore[method-assign]  # a deliberate wrapper


def _hold(until: Path, to_port: int | None) -> None:
    while not until.exists():
        time.sleep(0.005)
        _set(ATTACH_FILTER, to_port)
    _set(DETACH_FILTER, to_port)


def _set(option: int, to_port: int | None) -> None:
    spared = int(os.environ[env.METRICS_PORT])
    for found in open_sockets():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(found.descriptor)) as copy:
            if copy.family not in (socket.AF_INET, socket.AF_INET6):
                continue
            if copy.getsockname()[1] != spared if to_port is None else copy.getpeername()[1] == to_port:
                copy.setsockopt(socket.SOL_SOCKET, option, _PROGRAM if option == ATTACH_FILTER else 0)
