"""Sockets of this process by number and inode."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from heterotrain.network.gloo.abort import OpenSocket, is_open, open_sockets


def test_a_socket_is_open_until_it_is_closed(tmp_path: Path) -> None:
    """Also where its number is another socket's, or a file's, afterwards."""
    before = open_sockets()
    with socket.socket() as own:
        number = own.fileno()
        (found,) = open_sockets() - before
        assert is_open(found)
        assert not is_open(OpenSocket(number, found.inode + 1))
    assert not is_open(found)
    with socket.socket() as other:
        os.dup2(other.fileno(), number)
        assert not is_open(found)
        os.close(number) if number != other.fileno() else None
    with (tmp_path / "file").open("w") as file:
        status = os.fstat(file.fileno())
        assert not is_open(OpenSocket(file.fileno(), status.st_ino))
