"""Access to the user's cluster: kubectl's kubeconfig, or in a pod its service account.

The format is public: https://kubernetes.io/docs/reference/config-api/kubeconfig.v1. The official client reads it as
well, but needs most of a second of a processor to load, for every command.
"""

from __future__ import annotations

import base64
import os
import ssl
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import urllib3
import yaml
from heterotrain_operator.api.text import quoted

from heterotrain_cli.cluster.credentials import Authorization, LoginError, authorization_of, certificate_of
from heterotrain_cli.cluster.refusals import said
from heterotrain_cli.cluster.target import Target
from heterotrain_cli.errors import UnavailableError

_SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_DEFAULT_FILE: Final = "~/.kube/config"
_PATHS: Final = ("certificate-authority", "client-certificate", "client-key", "tokenFile")
"""Fields of clusters and users that name files, seen from the kubeconfig's own folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """How requests reach the API server.

    Attributes:
        server: its address, without a slash at the end.
        connections: to it, with certificates and proxy.
        authorization: the header of each request; asked for each time, because tokens expire.
    """

    server: str
    connections: urllib3.PoolManager
    authorization: Authorization


class _IncompleteError(Exception):
    """A kubeconfig lacks something; the message is a part of a sentence."""


def load(target: Target) -> tuple[Access, str]:
    """Return the access to the cluster, and the namespace of the jobs.

    Raises:
        UnavailableError: there is no usable kubeconfig, or its way to log in fails.
    """
    in_pod = "KUBERNETES_SERVICE_HOST" in os.environ and not os.environ.get("KUBECONFIG")
    files = target.kubeconfig or os.environ.get("KUBECONFIG") or _DEFAULT_FILE
    try:
        if target.kubeconfig is None and target.context is None and in_pod:
            cluster, user, namespace = _in_pod()
        else:
            cluster, user, namespace = _chosen(_merged(files), target.context)
        access = _access(cluster, user)
    except (
        _IncompleteError,
        LoginError,
        OSError,
        ValueError,
        TypeError,
        AttributeError,
        KeyError,
        yaml.YAMLError,
    ) as error:
        raise UnavailableError(
            f"no access to a cluster ({_missing(files) or _unusable(error)}): set KUBECONFIG, or give "
            "--kubeconfig and --context"
        ) from error
    return access, target.namespace or namespace


def _in_pod() -> tuple[Mapping[str, Any], Mapping[str, Any], str]:
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    server = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
    cluster = {"server": server, "certificate-authority": str(_SERVICE_ACCOUNT / "ca.crt")}
    namespace = (_SERVICE_ACCOUNT / "namespace").read_text(encoding="utf-8").strip()
    return cluster, {"tokenFile": str(_SERVICE_ACCOUNT / "token")}, namespace


def _merged(files: str) -> dict[str, Any]:
    """Return the kubeconfig of one or several files; the first to name something wins, as in kubectl."""
    found: dict[str, Any] = {"current-context": "", "clusters": {}, "contexts": {}, "users": {}}
    paths = [Path(each).expanduser() for each in files.split(os.pathsep) if each]
    for path in paths:
        if len(paths) > 1 and not path.exists():
            continue
        document = yaml.load(path.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader)) or {}  # noqa: S506  # both are safe
        found["current-context"] = found["current-context"] or document.get("current-context") or ""
        for plural, kind in (("clusters", "cluster"), ("contexts", "context"), ("users", "user")):
            for each in document.get(plural) or ():
                inner = dict(each.get(kind) or {})
                inner |= {key: str(path.parent / inner[key]) for key in _PATHS if inner.get(key)}
                found[plural].setdefault(each["name"], inner)
    return found


def _chosen(config: Mapping[str, Any], context: str | None) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Return cluster, user and namespace of a context."""
    name = context or config["current-context"]
    if not name:
        raise _IncompleteError("the kubeconfig has no current context")
    if name not in config["contexts"]:
        raise _IncompleteError(f"the kubeconfig has no context {quoted(str(name))}")
    chosen = config["contexts"][name]
    cluster = config["clusters"].get(chosen.get("cluster"))
    if not cluster or not cluster.get("server"):
        raise _IncompleteError(f"the kubeconfig has no address of the cluster {quoted(str(chosen.get('cluster')))}")
    return cluster, config["users"].get(chosen.get("user")) or {}, chosen.get("namespace") or "default"


def _access(cluster: Mapping[str, Any], user: Mapping[str, Any]) -> Access:
    server = str(cluster["server"]).rstrip("/")
    authorization = authorization_of(user)
    options: dict[str, Any] = {"retries": False}
    if server.startswith("https://"):
        options |= {"ssl_context": _context(cluster, certificate_of(user, authorization))}
        if name := cluster.get("tls-server-name"):
            options |= {"server_hostname": name, "assert_hostname": name}
        if cluster.get("insecure-skip-tls-verify"):
            options |= {"cert_reqs": ssl.CERT_NONE, "assert_hostname": False}
            urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)
    return Access(server=server, connections=_connections(cluster, server, options), authorization=authorization)


def _connections(cluster: Mapping[str, Any], server: str, options: dict[str, Any]) -> urllib3.PoolManager:
    """Return connections to the server, through the proxy of the kubeconfig, else through that of the environment."""
    parts = urlsplit(server)
    proxy = cluster.get("proxy-url")
    if proxy is None and not urllib.request.proxy_bypass(parts.hostname or ""):
        proxy = urllib.request.getproxies().get(parts.scheme)
    if not proxy:
        return urllib3.PoolManager(**options)
    if str(proxy).startswith("socks"):
        raise _IncompleteError(f"the proxy {quoted(str(proxy))} is not one for HTTP")
    return urllib3.ProxyManager(str(proxy), **options)


def _context(cluster: Mapping[str, Any], certificate: tuple[bytes, bytes] | None) -> ssl.SSLContext:
    """Return the settings of TLS: the cluster's authority, and the user's certificate with its key, both PEM."""
    encoded = cluster.get("certificate-authority-data")
    authority = base64.b64decode(encoded).decode() if encoded else None
    context = ssl.create_default_context(cafile=cluster.get("certificate-authority"), cadata=authority)
    context.verify_flags &= ~getattr(ssl, "VERIFY_X509_STRICT", 0)  # clusters' own authorities lack extensions
    if cluster.get("insecure-skip-tls-verify"):
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if certificate is not None:
        with _as_files(certificate) as (file, key):
            context.load_cert_chain(file, key)
    return context


@contextmanager
def _as_files(texts: tuple[bytes, ...]) -> Iterator[tuple[str, ...]]:
    """Keep texts in files that only this user reads: OpenSSL reads certificates from files only."""
    with tempfile.TemporaryDirectory(prefix="heterotrain-") as folder:
        paths = tuple(Path(folder) / str(number) for number in range(len(texts)))
        for path, text in zip(paths, texts, strict=True):
            path.write_bytes(text)
        yield tuple(map(str, paths))


def _missing(files: str) -> str:
    """Return that none of these files, separated as in a path, is there; empty if one is, or none is named."""
    named = [each for each in files.split(os.pathsep) if each]
    gone = bool(named) and not any(Path(each).expanduser().exists() for each in named)
    return f"there is no file {quoted(files)}" if gone else ""


def _unusable(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"the kubeconfig is not YAML: correct its line {error.problem_mark.line + 1}"
    if isinstance(error, UnicodeDecodeError | yaml.YAMLError):
        return "the kubeconfig is not YAML in UTF-8"
    if isinstance(error, OSError) and error.strerror and not isinstance(error, ssl.SSLError):
        return f"{quoted(str(error.filename))}: {error.strerror}"
    if isinstance(error, _IncompleteError | LoginError):
        return str(error)
    if isinstance(error, TypeError | AttributeError):
        return "a value in the kubeconfig has another type than kubectl gives it"
    if isinstance(error, KeyError):
        return f"an entry of the kubeconfig has no {quoted(str(error.args[0]))}"
    return f"the kubeconfig is not complete: {said(str(error))}"
