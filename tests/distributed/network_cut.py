"""A cut cable without a second machine: the kernel drops whatever arrives at this process's TCP connections.

Nothing is acknowledged any more, and neither side is told; that is what peers see of a node whose network went away. What
this process still sends does arrive, so peers may complete an exchange that this process never sees completed.

Where only connections to one peer's port are cut, that peer can still call here, but gets no answer when it is called.
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
    """Cut connections now, and those that come later, until a file appears.

    Args:
        until: the file.
        to_port: cut those to this port of a peer only; ``None`` cuts all but those to this process's metrics.
    """
    _set(ATTACH_FILTER, to_port)
    threading.Thread(target=_hold, args=(until, to_port), daemon=True).start()


def refuse(port: int) -> None:
    """Let this process make no connection to this port of a peer any more, not even for the moment before it is cut."""
    connect = asyncio.open_connection

    async def refusing(host: str, to_port: int, **options: Any) -> Any:
        if to_port == port:
            raise TimeoutError("as if nobody answered")
        return await connect(host, to_port, **options)

    asyncio.open_connection = refusing  # type: ignore[assignment]  # put around it on purpose


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
