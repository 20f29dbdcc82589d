"""Certificates: one authority, and one client or server certificate per part of the cluster; new at each start."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import yaml

from local_cluster.process import run
from local_cluster.topology import Topology

DAYS = "365"


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The subject of a certificate: Kubernetes' own roles grant rights to its user and group."""

    file: str
    user: str
    group: str = ""
    server_names: tuple[str, ...] = ()


def identities(topology: Topology) -> list[Identity]:
    """Return the subjects of all certificates."""
    address = topology.control_plane.address
    return [
        Identity(
            file="apiserver",
            user="kube-apiserver",
            server_names=(
                "DNS:kubernetes", "DNS:kubernetes.default", "DNS:kubernetes.default.svc",
                "DNS:kubernetes.default.svc.cluster.local", "DNS:localhost",
                "IP:127.0.0.1", f"IP:{address}", f"IP:{topology.kubernetes_address}",
            ),
        ),
        Identity(file="admin", user="kubernetes-admin", group="system:masters"),
        Identity(file="apiserver-kubelet-client", user="kube-apiserver-kubelet-client", group="system:masters"),
        Identity(file="controller-manager", user="system:kube-controller-manager"),
        Identity(file="scheduler", user="system:kube-scheduler"),
        Identity(file="kube-proxy", user="system:kube-proxy"),
        *(Identity(file=node.name, user=f"system:node:{node.name}", group="system:nodes") for node in topology.nodes),
    ]  # fmt: skip


def issue(folder: Path, topology: Topology) -> None:
    """Fill ``folder`` with keys, certificates and a kubeconfig for each client."""
    folder.mkdir(parents=True, mode=0o700)
    _openssl(
        folder, "ca", "/CN=heterotrain-local", ["-addext", "keyUsage=critical,keyCertSign,cRLSign,digitalSignature"]
    )
    key = folder / "service-account.key"
    run("openssl", "genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out", key)
    run("openssl", "pkey", "-in", key, "-pubout", "-out", folder / "service-account.pub")
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda identity: _certify(folder, identity, topology), identities(topology)))


def _certify(folder: Path, identity: Identity, topology: Topology) -> None:
    subject = f"/CN={identity.user}" + (f"/O={identity.group}" if identity.group else "")
    usage = "serverAuth" if identity.server_names else "clientAuth"
    names = ["-addext", f"subjectAltName={','.join(identity.server_names)}"] if identity.server_names else []
    signer: list[str | Path] = ["-CA", folder / "ca.crt", "-CAkey", folder / "ca.key"]
    plain = ["-addext", "basicConstraints=critical,CA:FALSE", "-addext", f"extendedKeyUsage={usage}"]
    _openssl(folder, identity.file, subject, [*signer, *plain, *names])
    if not identity.server_names:
        (folder / f"{identity.file}.kubeconfig").write_text(kubeconfig(folder, identity.file, topology))


def _openssl(folder: Path, name: str, subject: str, options: Sequence[str | Path]) -> None:
    run(
        "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", DAYS,
        "-keyout", folder / f"{name}.key", "-out", folder / f"{name}.crt", "-subj", subject, *options,
    )  # fmt: skip


def kubeconfig(folder: Path, client: str, topology: Topology) -> str:
    """Return the kubeconfig of a client, with its key in it."""

    def data(file: str) -> str:
        return base64.b64encode((folder / file).read_bytes()).decode()

    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{
            "name": topology.name,
            "cluster": {
                "server": topology.api_server,
                "certificate-authority-data": data("ca.crt"),
            },
        }],
        "users": [{
            "name": client,
            "user": {"client-certificate-data": data(f"{client}.crt"), "client-key-data": data(f"{client}.key")},
        }],
        "contexts": [{"name": topology.name, "context": {"cluster": topology.name, "user": client}}],
        "current-context": topology.name,
    }  # fmt: skip
    return yaml.safe_dump(document, sort_keys=False)
