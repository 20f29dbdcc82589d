"""Ways to reach a cluster: several files, certificates, tokens, programs of clouds, a pod's service account."""

from __future__ import annotations

import base64
import json
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from heterotrain_cli.cluster import kubeconfig
from heterotrain_cli.cluster.api import Cluster
from heterotrain_cli.cluster.credentials import LoginError, Program, authorization_of
from heterotrain_cli.cluster.target import Target
from heterotrain_cli.errors import UnavailableError


def files(folder: Path, server: str, user: dict[str, Any], **cluster: Any) -> str:
    """Write a kubeconfig in two files, as KUBECONFIG names them: contexts in one, the rest in the other."""
    first = {"current-context": "c", "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}]}
    second = {
        "current-context": "other",
        "clusters": [{"name": "k", "cluster": {"server": server, **cluster}}],
        "users": [{"name": "u", "user": user}],
    }
    for name, document in (("first", first), ("second", second)):
        (folder / name).write_text(yaml.safe_dump(document))
    return f"{folder / 'first'}:{folder / 'nowhere'}:{folder / 'second'}"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority, a server's certificate for the name ``api``, and a client's, as files."""
    folder = tmp_path_factory.mktemp("certificates")
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    signed = ["-CA", "ca.crt", "-CAkey", "ca.key", "-addext", "basicConstraints=critical,CA:FALSE"]
    for name, more in (("ca", []), ("server", [*signed, "-addext", "subjectAltName=DNS:api"]), ("client", signed)):
        line = [*make, "-keyout", f"{name}.key", "-out", f"{name}.crt", "-subj", f"/CN={name}", *more]
        subprocess.run(line, cwd=folder, check=True, capture_output=True)
    return folder


@pytest.fixture
def server(certificates: Path) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """A server that wants a client's certificate; its address, and client and header of each request."""
    seen: list[tuple[str, str]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            subject = dict(pair for (pair,) in self.connection.getpeercert()["subject"])  # type: ignore[attr-defined]  # a socket with TLS
            seen.append((subject["commonName"], self.headers.get("Authorization", "")))
            raw = json.dumps({"items": [], "metadata": {}}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the library's name
            pass

    found = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(certificates / "ca.crt"))
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(certificates / "server.crt", certificates / "server.key")
    found.socket = context.wrap_socket(found.socket, server_side=True)
    thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield f"https://127.0.0.1:{found.server_port}", seen
    found.shutdown()
    found.server_close()
    thread.join()


def encoded(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()


@pytest.mark.parametrize("inline", [True, False], ids=["in the file", "as files beside it"])
def test_the_cluster_s_and_the_user_s_certificates_are_used(
    tmp_path: Path, certificates: Path, server: tuple[str, list[tuple[str, str]]], inline: bool
) -> None:
    address, seen = server
    user: dict[str, Any] = {"token": "t"}
    cluster: dict[str, Any] = {"tls-server-name": "api"}
    for where, key, name in (
        (cluster, "certificate-authority", "ca.crt"), (user, "client-certificate", "client.crt"),
        (user, "client-key", "client.key"),
    ):  # fmt: skip
        (tmp_path / name).write_bytes((certificates / name).read_bytes())
        where.update({f"{key}-data": encoded(certificates / name)} if inline else {key: name})
    found = Cluster(Target(kubeconfig=files(tmp_path, address, user, **cluster)), read_tries=1)
    assert found.jobs() == []
    assert found.namespace == "default"
    assert seen == [("client", "Bearer t")]
    other = files(tmp_path, address, user, **{**cluster, "tls-server-name": "another"})
    with pytest.raises(UnavailableError, match="does not answer"):
        Cluster(Target(kubeconfig=other), read_tries=1).jobs()


def test_a_program_logs_in_and_is_asked_again_when_its_token_expires(tmp_path: Path) -> None:
    count = tmp_path / "count"
    code = (
        "import json, os, pathlib; p = pathlib.Path(os.environ['COUNT']); n = int(p.read_text() or 0) + 1; "
        "p.write_text(str(n)); assert json.loads(os.environ['KUBERNETES_EXEC_INFO'])['kind'] == 'ExecCredential'; "
        "print(json.dumps({'status': {'token': f't{n}', 'expirationTimestamp': '2030-01-01T00:00:00Z'}}))"
    )
    count.write_text("")
    entry = {
        "apiVersion": "client.authentication.k8s.io/v1", "command": sys.executable, "args": ["-c", code],
        "env": [{"name": "COUNT", "value": str(count)}],
    }  # fmt: skip
    now = [0.0]
    program = Program(entry, now_s=lambda: now[0])
    assert [program(), program()] == ["Bearer t1", "Bearer t1"]
    now[0] = 1_893_456_000.0 - 30  # half a minute before the year 2030
    assert program() == "Bearer t2"


@pytest.mark.parametrize(
    ("user", "why"),
    [
        ({"exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": "nosuch", "installHint": "get\n it"}},
         "the login program nosuch is not installed: get it"),
        ({"exec": {"apiVersion": "v0", "command": "x"}}, "speaks v0"),
        ({"exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": "false"}}, "fails: run it by hand"),
        ({"exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": "echo"}}, "prints no ExecCredential"),
        ({"auth-provider": {"name": "gcp", "config": {}}}, "gcp has no id-token"),
    ],
)  # fmt: skip
def test_a_way_to_log_in_that_fails_is_one_sentence(user: dict[str, Any], why: str) -> None:
    with pytest.raises(LoginError, match=why):
        authorization_of(user)()


def test_other_ways_to_log_in(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("first\n")
    renewed = authorization_of({"tokenFile": str(tmp_path / "token")})
    assert renewed() == "Bearer first"
    (tmp_path / "token").write_text("second\n")
    assert renewed() == "Bearer second"
    assert authorization_of({"username": "me", "password": "x"})() == f"Basic {base64.b64encode(b'me:x').decode()}"
    assert authorization_of({"auth-provider": {"config": {"id-token": "i"}}})() == "Bearer i"
    assert authorization_of({})() == ""


def test_a_pod_uses_its_service_account(tmp_path: Path, certificates: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (("token", "t"), ("namespace", "ml\n"), ("ca.crt", (certificates / "ca.crt").read_text())):
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(kubeconfig, "_SERVICE_ACCOUNT", tmp_path)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "6443")
    monkeypatch.delenv("KUBECONFIG", raising=False)
    access, namespace = kubeconfig.load(Target())
    assert (access.server, access.authorization(), namespace) == ("https://[fd00::1]:6443", "Bearer t", "ml")


def test_a_proxy_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    named = files(tmp_path, "http://api:6443/", {}, **{"proxy-url": "http://own:1"})
    assert kubeconfig.load(Target(kubeconfig=named))[0].connections.proxy.host == "own"  # type: ignore[attr-defined]  # a pool through a proxy
    plain = files(tmp_path, "http://api:6443/", {})
    access, _ = kubeconfig.load(Target(kubeconfig=plain))
    assert (access.server, access.connections.proxy.host) == ("http://api:6443", "proxy")  # type: ignore[attr-defined]  # likewise
    monkeypatch.setenv("no_proxy", "api")
    assert kubeconfig.load(Target(kubeconfig=plain))[0].connections.proxy is None
