"""What the launchers of a job ask each other after a failure: was a worker lost, or did the script fail by itself?

A lost or leaving worker breaks the connections of all others, so their processes fail, too. Such a failure ends with
the next plan. Where every other launcher is there, no plan will come, and the script's own failure is the reason.
"""

from __future__ import annotations

import logging
import socketserver
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from heterotrain_core.contract.plan import Rank

from heterotrain.errors import UsageError

_log = logging.getLogger(__name__)

STATE_PATH = "/launcher"
FINISHED_PATH = "/launcher/finished"
_LONGEST_STATE = 32
_TELLS = 3
_MOST_QUESTIONS_AT_ONCE = 32
_OK = 200


class LauncherState(StrEnum):
    """What a launcher answers."""

    THERE = "there"
    """It runs its processes, or waits for a plan, or one of its processes has failed."""
    LEAVING = "leaving"
    """Its pod was asked to end, so that a plan without it follows."""


def serve_state(
    port: int, state: Callable[[], LauncherState], *, on_finished: Callable[[], None]
) -> ThreadingHTTPServer:
    """Answer questions about this launcher's state on a port, in the background.

    Args:
        port: where to listen.
        state: returns the answer.
        on_finished: called when the script has ended with exit code 0 on another worker.

    Raises:
        UsageError: the port cannot be used.
    """

    class Handler(BaseHTTPRequestHandler):
        timeout = 5.0

        def do_GET(self) -> None:
            if self.path == FINISHED_PATH:
                on_finished()
            text = state().value.encode()
            self.send_response(_OK)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the base class names it
            """Do not log requests."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: object, client_address: object) -> None:  # base class's names
            """Ignore clients that disconnect."""

        def server_bind(self) -> None:
            """Bind without the base class's look-up of the host name, which may wait for a name server."""
            socketserver.TCPServer.server_bind(self)
            self.server_name, self.server_port = "launcher", port

    try:
        server = Server(("", port), Handler)
    except OSError as error:
        raise UsageError(f"the port {port} cannot be used ({error}): stop the process that listens there") from error
    threading.Thread(target=server.serve_forever, name="heterotrain-launcher", daemon=True).start()
    return server


def absent(others: Sequence[Rank], *, timeout_s: float) -> tuple[str, ...]:
    """Return the workers whose launcher is leaving or does not answer in time."""
    there = _asked(others, STATE_PATH, timeout_s)
    return tuple(rank.worker for rank, answer in zip(others, there, strict=True) if not answer)


def tell_finished(others: Sequence[Rank], *, timeout_s: float) -> None:
    """Tell the other launchers that the script has ended with exit code 0 here.

    This launcher is about to end. Its silence must not look like the loss of a worker, so a busy one is told again.
    """
    left = list(others)
    for _ in range(_TELLS):
        answers = _asked(left, FINISHED_PATH, timeout_s)
        left = [rank for rank, answer in zip(left, answers, strict=True) if not answer]


def _asked(others: Sequence[Rank], path: str, timeout_s: float) -> list[bool]:
    """Return for each launcher whether it answers that it is there."""
    if not others:
        return []
    with ThreadPoolExecutor(max_workers=min(len(others), _MOST_QUESTIONS_AT_ONCE)) as pool:
        return list(pool.map(lambda rank: _is_there(rank, path, timeout_s), others))


def _is_there(rank: Rank, path: str, timeout_s: float) -> bool:
    host = f"[{rank.address}]" if ":" in rank.address else rank.address
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # pods are never behind the user's proxy
    try:
        with opener.open(f"http://{host}:{rank.peer_port}{path}", timeout=timeout_s) as reply:
            return bool(reply.read(_LONGEST_STATE) == LauncherState.THERE.value.encode())
    except (urllib.error.URLError, OSError, ValueError):
        return False
