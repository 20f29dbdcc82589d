"""Serves a rank's metrics and readiness over HTTP."""

from __future__ import annotations

import logging
import socket
import socketserver
import sys
import threading
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from heterotrain_core.contract import env, keys
from prometheus_client import generate_latest

from heterotrain.errors import UsageError
from heterotrain.identity import Identity
from heterotrain.telemetry.report import RankMetrics

_log = logging.getLogger(__name__)

REQUEST_S = 10.0
"""Time limit for a client to send its request or to read the response; Prometheus's own limit is ten seconds too."""
SIBLING_S = 1.0
"""Limit for the answer of another local rank about its readiness."""


class _Server(ThreadingHTTPServer):
    """Listens on IPv4 and IPv6, and waits for nobody."""

    daemon_threads = True
    address_family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET

    def server_bind(self) -> None:
        """Bind for IPv4 and IPv6, without the base class's question to a name server, which may be away."""
        if self.address_family is socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "worker", self.server_address[1]

    def handle_error(self, request: object, client_address: object) -> None:  # noqa: ARG002  # base class's names
        """Ignore clients that disconnect or time out; log any other error, which is a defect."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            _log.exception("the request for metrics from %s failed", client_address)


def serve(report: RankMetrics, identity: Identity) -> ThreadingHTTPServer | None:
    """Serve metrics and readiness on the rank's port; return ``None`` if it has no port.

    ``prometheus_client.start_http_server`` is not enough here: it has no readiness path, answers every path with
    metrics, and waits for a silent client without a time limit.

    Raises:
        UsageError: the port cannot be used.
    """
    if identity.metrics_port is None:
        return None
    siblings = range(1, identity.num_proc_per_worker) if identity.local_rank == 0 else range(0)
    awaited = {identity.metrics_port + local_rank for local_rank in siblings}

    def all_ready() -> bool:
        """Return whether all ranks of this worker are ready; ranks that were ready once are not asked again."""
        for port in sorted(awaited):
            if not _sibling_ready(port):
                return False
            awaited.discard(port)
        return report.ready

    class Handler(BaseHTTPRequestHandler):
        timeout = REQUEST_S

        def do_GET(self) -> None:
            if self.path == keys.METRICS_PATH:
                self._reply(200, generate_latest(report.registry), "text/plain; version=0.0.4; charset=utf-8")
            elif self.path == keys.READY_PATH:
                ready = all_ready()
                spare = f", as a spare: {report.spare}" if report.spare else ""
                text = f"ready{spare}\n" if ready else "not at job.steps yet\n"
                self._reply(200 if ready else 503, text.encode(), "text/plain")
            else:
                self._reply(404, b"there is /metrics and /ready\n", "text/plain")

        def _reply(self, status: int, body: bytes, kind: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the base class names it
            """Do not log requests."""

    try:
        server = _Server(("", identity.metrics_port), Handler)
    except OSError as error:
        raise UsageError(
            f"the metrics port {identity.metrics_port} cannot be used ({error}). Stop the process that listens there, "
            f"or set another port in {env.METRICS_PORT}."
        ) from error
    threading.Thread(target=server.serve_forever, name="heterotrain-metrics", daemon=True).start()
    return server


def _sibling_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{keys.READY_PATH}", timeout=SIBLING_S) as reply:
            return bool(reply.status == 200)  # noqa: PLR2004  # HTTP OK
    except (urllib.error.URLError, OSError):
        return False
