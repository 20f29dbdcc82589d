"""The contents of `kind-config.yaml` as values, with the addresses derived from it. Pure."""

from __future__ import annotations

import ipaddress
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

import yaml

from local_cluster.process import Problem

NODE_SUBNET = ipaddress.IPv4Network("172.30.240.0/24")
"""Addresses of the machine (.1) and of the nodes (.2 …) on the bridge between them."""
NODE_SUBNET_6 = ipaddress.IPv6Network("fd30:240::/64")
"""The same in IPv6, for nodes only: the machine itself gets no address."""
POD_PREFIX_LENGTH = 24
POD_PREFIX_LENGTH_6 = 64
SHORT_GRACE: Mapping[str, Mapping[str, Any]] = {
    # A node renews its Lease four times in this time, and reports a change of its conditions after two seconds.
    "KubeletConfiguration": {
        "nodeLeaseDurationSeconds": 8,
        "nodeStatusUpdateFrequency": "2s",
        "nodeStatusReportFrequency": "5m0s",  # as kubelet writes it
    },
    "ClusterConfiguration": {
        "controllerManager": {"extraArgs": {"node-monitor-period": "1s", "node-monitor-grace-period": "12s"}}
    },
}
"""Settings by which a silent node is lost after 12 s instead of 40 to 50: six renewals may fail or come late."""
CONTROL_PLANE_TAINT = "node-role.kubernetes.io/control-plane=:NoSchedule"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """A folder of the machine, mounted into a node."""

    host_path: str
    node_path: str
    is_read_only: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One node.

    Attributes:
        index: position in the file; names of its network device and its addresses follow from it.
        taints: in kubectl's notation, ``key=value:Effect``.
        address_6: its IPv6 address; empty in a cluster of IPv4 only.
        pod_cidr_6: its pods' IPv6 addresses; empty likewise.
    """

    name: str
    index: int
    is_control_plane: bool
    address: str
    pod_cidr: str
    labels: Mapping[str, str]
    taints: tuple[str, ...]
    mounts: tuple[Mount, ...]
    address_6: str = ""
    pod_cidr_6: str = ""

    @property
    def host_device(self) -> str:
        """The machine's end of the node's network link."""
        return f"htrain-n{self.index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """The cluster that the file describes.

    Attributes:
        pod_subnet: the pods' addresses, with those of IPv6 after a comma in a cluster with both.
        service_subnet: the Services' addresses, likewise.
        kubelet: fields to merge into every kubelet's configuration.
        controller_manager: further flags of the controller manager, without their dashes.
    """

    name: str
    gateway: str
    pod_subnet: str
    service_subnet: str
    nodes: tuple[Node, ...]
    kubelet: Mapping[str, Any]
    controller_manager: Mapping[str, str] = field(default_factory=dict)
    api_port: int = 6443

    @property
    def api_server(self) -> str:
        """The API server's URL."""
        return f"https://{self.control_plane.address}:{self.api_port}"

    @property
    def control_plane(self) -> Node:
        """The one node that runs etcd and the API server."""
        return next(node for node in self.nodes if node.is_control_plane)

    @property
    def dns_address(self) -> str:
        """The cluster's DNS server, by convention the tenth address of the Service network."""
        return str(_first(self.service_subnet)[10])

    @property
    def kubernetes_address(self) -> str:
        """The Service ``kubernetes``, the first address of the Service network."""
        return str(_first(self.service_subnet)[1])

    def node(self, name: str) -> Node:
        """Return a node by name.

        Raises:
            Problem: there is none of that name.
        """
        for node in self.nodes:
            if node.name == name:
                return node
        raise Problem(f"node {name!r} does not exist: the nodes are {', '.join(node.name for node in self.nodes)}")


def read(text: str) -> Topology:
    """Return the cluster that the text of a kind configuration describes.

    Raises:
        Problem: the file is not a kind configuration, does not have exactly one control plane, or requires a feature
            that these nodes lack.
    """
    document = yaml.safe_load(text)
    if not isinstance(document, dict) or document.get("kind") != "Cluster":
        raise Problem("kind-config.yaml: `kind: Cluster` is missing")
    name = str(document.get("name", "kind"))
    networking = document.get("networking") or {}
    pod_subnet = str(networking.get("podSubnet", "10.244.0.0/16"))
    pod_cidrs = _first(pod_subnet).subnets(new_prefix=POD_PREFIX_LENGTH)
    pod_cidrs_6 = _pod_cidrs_6(str(networking.get("ipFamily", "ipv4")), pod_subnet)
    nodes = tuple(
        _node(entry, name=node_name, index=index, pod_cidr=str(next(pod_cidrs)), pod_cidr_6=next(pod_cidrs_6))
        for index, (entry, node_name) in enumerate(_named(document.get("nodes") or [{"role": "control-plane"}], name))
    )
    if sum(node.is_control_plane for node in nodes) != 1:
        raise Problem("kind-config.yaml: exactly one node must have `role: control-plane`")
    return Topology(
        name=name,
        gateway=str(NODE_SUBNET[1]),
        pod_subnet=pod_subnet,
        service_subnet=str(networking.get("serviceSubnet", "10.96.0.0/16")),
        nodes=nodes,
        kubelet=_patch(document, "KubeletConfiguration"),
        controller_manager=_patch(document, "ClusterConfiguration").get("controllerManager", {}).get("extraArgs", {}),
    )


def with_short_grace(text: str) -> str:
    """Return the configuration with ``SHORT_GRACE`` added, for tests that wait for the loss of nodes."""
    document = yaml.safe_load(text)
    patches = [yaml.safe_dump({"kind": kind, **fields}) for kind, fields in SHORT_GRACE.items()]
    return yaml.safe_dump({**document, "kubeadmConfigPatches": [*document.get("kubeadmConfigPatches", ()), *patches]})


def _first(subnets: str) -> ipaddress.IPv4Network:
    return ipaddress.IPv4Network(subnets.partition(",")[0])


def _pod_cidrs_6(family: str, pod_subnet: str) -> Iterator[str]:
    """Yield each node's part of the pods' IPv6 addresses; empty texts for a cluster of IPv4 only.

    Raises:
        Problem: another family is asked for, or the subnet of the family is missing.
    """
    second = pod_subnet.partition(",")[2]
    if family not in ("ipv4", "dual") or (family == "dual") != bool(second):
        raise Problem(
            "kind-config.yaml: networking.ipFamily must be ipv4, or dual with an IPv4 and an IPv6 subnet in podSubnet "
            f"and serviceSubnet, not {family!r} with {pod_subnet!r}"
        )
    if not second:
        return itertools.repeat("")
    return map(str, ipaddress.IPv6Network(second).subnets(new_prefix=POD_PREFIX_LENGTH_6))


def _named(entries: list[dict[str, Any]], cluster: str) -> list[tuple[dict[str, Any], str]]:
    """Pair each entry with kind's name for it: the role, with a number from the second node of a role on."""
    counts: dict[str, int] = {}
    named = []
    for entry in entries:
        role = str(entry.get("role", "control-plane"))
        counts[role] = counts.get(role, 0) + 1
        named.append((entry, f"{cluster}-{role}" + (str(counts[role]) if counts[role] > 1 else "")))
    return named


def _node(entry: dict[str, Any], *, name: str, index: int, pod_cidr: str, pod_cidr_6: str) -> Node:
    is_control_plane = entry.get("role", "control-plane") == "control-plane"
    registration = _patch(entry, "JoinConfiguration").get("nodeRegistration", {})
    taints = tuple(
        f"{taint['key']}={taint.get('value', '')}:{taint['effect']}" for taint in registration.get("taints", ())
    )
    return Node(
        name=name,
        index=index,
        is_control_plane=is_control_plane,
        address=str(NODE_SUBNET[2 + index]),
        pod_cidr=pod_cidr,
        labels={str(key): str(value) for key, value in (entry.get("labels") or {}).items()},
        taints=(CONTROL_PLANE_TAINT, *taints) if is_control_plane else taints,
        mounts=tuple(_mount(mount, name) for mount in entry.get("extraMounts") or ()),
        address_6=str(NODE_SUBNET_6[2 + index]) if pod_cidr_6 else "",
        pod_cidr_6=pod_cidr_6,
    )


def _mount(entry: dict[str, Any], node: str) -> Mount:
    host_path, node_path = str(entry["hostPath"]), str(entry["containerPath"])
    if PurePosixPath("/var") not in PurePosixPath(node_path).parents or not host_path.startswith("/"):
        raise Problem(
            f"kind-config.yaml: extraMounts of {node}: hostPath must be absolute and containerPath below /var, "
            f"not {host_path!r} and {node_path!r}"
        )
    return Mount(host_path=host_path, node_path=node_path, is_read_only=bool(entry.get("readOnly", False)))


def _patch(entry: dict[str, Any], kind: str) -> dict[str, Any]:
    """Merge the kubeadm patches of one kind, without `kind` and `apiVersion`."""
    merged: dict[str, Any] = {}
    for text in entry.get("kubeadmConfigPatches") or ():
        patch = yaml.safe_load(text)
        if patch.get("kind") == kind:
            merged |= {key: value for key, value in patch.items() if key not in ("kind", "apiVersion")}
    return merged
