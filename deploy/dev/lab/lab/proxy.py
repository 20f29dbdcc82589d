"""The API server through ``kubectl proxy``: a request takes no new process, for measurements in milliseconds."""

from __future__ import annotations

import contextlib
import http.client
import json
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lab.cluster import ClusterError
from lab.spot_node import SPOT_NOTICE

CONDITION = "VMEventScheduled"


class Api:
    """The API server."""

    def __init__(self, address: str) -> None:
        """Use the proxy at this address, such as 127.0.0.1:8001."""
        self._address = address

    def send(self, verb: str, path: str, body: dict[str, Any]) -> None:
        """Send a strategic merge patch, or another request with a body."""
        kind = "application/strategic-merge-patch+json" if verb == "PATCH" else "application/json"
        self._ask(verb, path, json.dumps(body), {"Content-Type": kind}).read()

    def lines(self, path: str) -> Iterator[bytes]:
        """Yield the lines of an endless answer."""
        yield from self._ask("GET", path, None, {})

    def _ask(self, verb: str, path: str, body: str | None, headers: dict[str, str]) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection(self._address, timeout=300)
        connection.request(verb, path, body, headers)
        answer = connection.getresponse()
        if answer.status >= http.HTTPStatus.BAD_REQUEST:
            raise ClusterError(f"{verb} {path}: {answer.read().decode(errors='replace')}")
        return answer


@contextlib.contextmanager
def api(kubectl: str | Path, environment: Mapping[str, str]) -> Iterator[Api]:
    """Yield the API server of ``KUBECONFIG`` in the environment."""
    command = [str(kubectl), "proxy", "--port=0"]
    proxy = subprocess.Popen(command, env=dict(environment), stdout=subprocess.PIPE, text=True)
    try:
        assert proxy.stdout is not None  # noqa: S101  # it is a pipe
        address = proxy.stdout.readline().rpartition(" ")[2].strip()
        yield Api(address)
    finally:
        proxy.terminate()
        proxy.wait()


def warn(server: Api, node: str, how: str, *, is_over: bool = False) -> None:
    """Announce a node's end, or take the announcement back."""
    path = f"/api/v1/nodes/{node}"
    if how == "taint":
        key, _, rest = SPOT_NOTICE.partition("=")
        value, _, effect = rest.partition(":")
        taint = {"key": key, "value": value, "effect": effect}  # of a node that has no others
        server.send("PATCH", path, {"spec": {"taints": [] if is_over else [taint]}})
    else:
        found = {"type": CONDITION, "status": "False" if is_over else "True", "reason": "PreemptScheduled"}
        server.send("PATCH", f"{path}/status", {"status": {"conditions": [found]}})
