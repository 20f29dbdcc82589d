"""Closes gloo's listening ports to newcomers as soon as a group is connected.

Gloo listens for as long as a group lives, although all its connections are made when the group is. It authenticates
nobody, keeps a descriptor for every stray connection, and aborts the process when there are none left. It cannot be
told to stop, and its threads fail when the listener is shut down under them. So the kernel is told to drop whatever
arrives at the listening socket; connections that exist are not affected.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
import threading
from typing import Any

import torch.distributed as dist

from heterotrain.network.gloo.abort import OpenSocket, is_open, open_sockets

_SO_ATTACH_FILTER = 26
"""Linux, ``asm-generic/socket.h``; the socket module has no name for it."""
_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)
"""The classic BPF program ``return 0``: no byte of a packet is kept. It needs no privilege."""

_CREATING = threading.Lock()
"""One at a time, so that each finds its own listeners."""

_gloo: Any = dist


class GuardedDevices:
    """Gloo's devices for one group, each with a listener; use it as a context in which the group is connected."""

    def __init__(self, *, address: str = "") -> None:
        """Make the devices: one at ``address``, by default one for each interface that the environment names."""
        names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
        make = _gloo.ProcessGroupGloo
        with _CREATING:
            before = open_sockets()
            if address:
                self._devices = [make.create_device(hostname=address)]
            else:
                self._devices = [make.create_device(interface=each) for each in names] or [make.create_default_device()]
            self._listeners = [found for found in open_sockets() - before if _listens(found)]

    def __enter__(self) -> list[Any]:
        """Return the devices."""
        return self._devices

    def __exit__(self, *_error: object) -> None:
        """Refuse all further connections."""
        for listener in self._listeners:
            refuse_connections(listener)


def refuse_connections(listener: OpenSocket) -> bool:
    """Make the kernel drop everything that arrives at a listening socket; return whether it does.

    Connections that were accepted before are not affected. Kernels other than Linux cannot do it.
    """
    if not is_open(listener):
        return False
    program = ctypes.create_string_buffer(_DROP_ALL)
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(listener.descriptor)) as duplicate:
        duplicate.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(program)))
        return True
    return False


def _listens(candidate: OpenSocket) -> bool:
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(candidate.descriptor)) as duplicate:
        return bool(duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    return False
