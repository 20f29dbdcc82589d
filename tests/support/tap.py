"""A reader of the network between two processes."""

from __future__ import annotations

import contextlib
import socket
import threading


class Tap:
    """Passes connections on to a listener, and keeps all bytes that pass: what a reader of the network sees."""

    def __init__(self) -> None:
        self.seen = bytearray()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.target = 0
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def port(self) -> int:
        """Where to call."""
        return int(self._server.getsockname()[1])

    def close(self) -> None:
        """Take no more connections."""
        self._server.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                here, _ = self._server.accept()
                there = socket.create_connection(("127.0.0.1", self.target))
                for source, sink in ((here, there), (there, here)):
                    threading.Thread(target=self._copy, args=(source, sink), daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self.seen += data
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)
