"""An API server that serves fixed objects over HTTP on loopback, for tests of its clients.

It knows paths, merge patches and the form of errors, not Kubernetes: what it accepts is not proof that a real API
server does.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import yaml

from support.chaos.api_server import merged


@dataclass
class ApiStub:
    """The server's objects, and the requests that it got.

    Attributes:
        objects: by path.
        lists: lists of objects, by path.
        logs: by the pod's name.
        refusals: status and message for requests, by (method, path); popped one after the other.
        requests: (method, path, query, body), in order.
        headers: headers of every answer, besides the server's own.
    """

    objects: dict[str, dict[str, Any]] = field(default_factory=dict)
    lists: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    logs: dict[str, str] = field(default_factory=dict)
    refusals: dict[tuple[str, str], list[tuple[int, str]]] = field(default_factory=dict)
    requests: list[tuple[str, str, dict[str, str], Any]] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)

    def answer(self, method: str, path: str, query: dict[str, str], body: Any) -> tuple[int, Any]:
        """Return status and document."""
        self.requests.append((method, path, query, body))
        if refusals := self.refusals.get((method, path)):
            status, message = refusals.pop(0)
            return status, {"kind": "Status", "message": message, "code": status}
        if method == "GET" and path in self.lists:
            return 200, {"items": self.lists[path], "metadata": {}}
        if method == "GET" and path.endswith("/log"):
            return 200, self.logs[path.split("/")[-2]]
        if method == "POST":
            name, namespace = body["metadata"]["name"], path.split("/")[-2]
            made = {**body, "metadata": {"namespace": namespace, "uid": f"uid-{name}", **body["metadata"]}}
            if "dryRun" not in query:
                self.objects[f"{path}/{name}"] = made
            return 201, made
        if path not in self.objects:
            return 404, {"kind": "Status", "message": f'"{path}" not found', "code": 404}
        if method == "PATCH":
            self.objects[path] = merged(self.objects[path], body)
        found = self.objects[path]
        if method == "DELETE":
            del self.objects[path]
        return 200, found


@contextmanager
def serve(stub: ApiStub, folder: Path, *, namespace: str = "default") -> Iterator[Path]:
    """Serve the stub inside the ``with`` block; yields the path of a kubeconfig for it."""

    class Handler(BaseHTTPRequestHandler):
        def _do(self) -> None:
            parts = urlsplit(self.path)
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            status, found = stub.answer(self.command, parts.path, dict(parse_qsl(parts.query)), body)
            raw = (found if isinstance(found, str) else json.dumps(found)).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(raw)))
            for name, value in stub.headers.items():
                self.send_header(name, value)
            with contextlib.suppress(ConnectionError):  # whoever asked does not wait any longer
                self.end_headers()
                self.wfile.write(raw)

        do_GET = do_POST = do_PATCH = do_DELETE = _do  # noqa: N815  # the library's names

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the library's name
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    kubeconfig = folder / "kubeconfig"
    write_kubeconfig(kubeconfig, f"http://127.0.0.1:{server.server_port}", namespace=namespace)
    try:
        yield kubeconfig
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def write_kubeconfig(path: Path, address: str, *, namespace: str) -> None:
    """Write a kubeconfig without credentials."""
    path.write_text(
        yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "lab",
                "clusters": [{"name": "lab", "cluster": {"server": address}}],
                "users": [{"name": "nobody", "user": {}}],
                "contexts": [{"name": "lab", "context": {"cluster": "lab", "user": "nobody", "namespace": namespace}}],
            }
        ),
        encoding="utf-8",
    )
