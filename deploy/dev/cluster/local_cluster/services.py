"""The programs of a node: their command lines and configuration files. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from local_cluster.topology import Node, Topology

PAUSE_IMAGE = "docker.io/heterotrain/pause:local"
CNI_PROGRAMS = "/usr/lib/cni"
CNI_CONFIGURATION = "/run/heterotrain/cni"
OWN_CNI_PROGRAMS = "/run/heterotrain/cni-programs"
CONTAINERD_SOCKET = "/run/containerd/containerd.sock"


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Capabilities of the machine that some settings depend on.

    Attributes:
        may_protect_from_oom: whether processes may be made less likely to be killed when memory runs out.
        has_cgroup_v2: whether there is only the unified hierarchy of control groups.
    """

    may_protect_from_oom: bool
    has_cgroup_v2: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Programs that a node keeps running, and files to write before they start, by path in the node."""

    services: Mapping[str, list[str]]
    files: Mapping[str, str]
    sysctls: Mapping[str, str] = field(default_factory=dict)


# kubelet requires these values of the whole machine. A node sees private files in their place that already hold them,
# so kubelet changes nothing.
MACHINE_WIDE_SYSCTLS: Mapping[str, str] = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}


# Of a pod's IPv6 address, the kernel would first ask for up to two seconds whether another host has it.
USABLE_AT_ONCE = """#!/bin/sh
cat >/dev/null
case "$CNI_COMMAND" in
ADD)
    nsenter --net="$CNI_NETNS" sh -c 'echo 0 >/proc/sys/net/ipv6/conf/default/accept_dad' >&2 || exit 1
    echo '{"cniVersion": "1.0.0"}' ;;
VERSION)
    echo '{"cniVersion": "1.0.0", "supportedVersions": ["1.0.0"]}' ;;
esac
"""


def of(node: Node, topology: Topology, *, machine: Machine, programs: Path, pki: Path, cgroup: str) -> Setup:
    """Return the node's programs and their configuration files."""
    labels = ",".join(f"{key}={value}" for key, value in node.labels.items())
    services = {
        "containerd": [f"{programs}/containerd", "--config", "/run/heterotrain/containerd.toml"],
        "kubelet": [
            f"{programs}/kubelet",
            "--config=/run/heterotrain/kubelet.yaml",
            f"--kubeconfig={pki}/{node.name}.kubeconfig",
            f"--hostname-override={node.name}",
            f"--node-ip={','.join(filter(None, (node.address, node.address_6)))}",
            "--volume-plugin-dir=/var/lib/kubelet/volume-plugins",
            f"--node-labels={labels}",
            f"--register-with-taints={','.join(node.taints)}",
        ],
        "kube-proxy": [
            f"{programs}/kube-proxy",
            "--config=/run/heterotrain/kube-proxy.yaml",
            f"--hostname-override={node.name}",
        ],
    }
    if node.is_control_plane:
        services = control_plane(node, topology, programs=programs, pki=pki) | services
    files = {
        "/run/heterotrain/containerd.toml": _containerd(machine),
        "/run/heterotrain/kubelet.yaml": json.dumps(_kubelet(topology, machine=machine, pki=pki, cgroup=cgroup)),
        "/run/heterotrain/kube-proxy.yaml": json.dumps(_kube_proxy(topology, machine=machine, pki=pki)),
        f"{CNI_CONFIGURATION}/10-pods.conflist": json.dumps(_cni(node)),
        "/run/heterotrain/resolv.conf": "",
    }
    sysctls = {"net/ipv4/ip_forward": "1"}
    if node.address_6:
        sysctls |= {"net/ipv6/conf/all/forwarding": "1", "net/ipv6/conf/default/accept_dad": "0"}
        files[f"{OWN_CNI_PROGRAMS}/usable-at-once"] = USABLE_AT_ONCE
    return Setup(services=services, files=files, sysctls=sysctls)


def control_plane(node: Node, topology: Topology, *, programs: Path, pki: Path) -> dict[str, list[str]]:
    """Return the command lines of the control plane's programs."""
    # One controller manager and one scheduler need no election. The default client limits would delay a thousand pods.
    single = ["--leader-elect=false", "--kube-api-qps=500", "--kube-api-burst=1000"]
    accounts = f"{pki}/service-account"

    def client(name: str) -> list[str]:
        path = f"{pki}/{name}.kubeconfig"
        return [f"--kubeconfig={path}", f"--authentication-kubeconfig={path}", f"--authorization-kubeconfig={path}"]

    return {
        # The data does not have to survive a crash of the machine, so etcd does not have to wait for the disk.
        "etcd": [f"{programs}/etcd", "--data-dir=/var/lib/etcd", "--unsafe-no-fsync", "--log-level=warn"],
        "kube-apiserver": [
            f"{programs}/kube-apiserver", f"--advertise-address={node.address}", "--etcd-servers=http://127.0.0.1:2379",
            f"--service-cluster-ip-range={topology.service_subnet}", f"--external-hostname={node.address}",
            f"--client-ca-file={pki}/ca.crt",
            f"--tls-cert-file={pki}/apiserver.crt", f"--tls-private-key-file={pki}/apiserver.key",
            f"--kubelet-client-certificate={pki}/apiserver-kubelet-client.crt",
            f"--kubelet-client-key={pki}/apiserver-kubelet-client.key", "--kubelet-preferred-address-types=InternalIP",
            f"--service-account-key-file={accounts}.pub", f"--service-account-signing-key-file={accounts}.key",
            "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
            "--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction", "--allow-privileged=true",
            # Webhooks are called at their pods' addresses.
            "--enable-aggregator-routing=true", "--profiling=false",
        ],
        "kube-controller-manager": [
            f"{programs}/kube-controller-manager", f"--master={topology.api_server}",
            *client("controller-manager"), *single,
            f"--service-account-private-key-file={accounts}.key", f"--root-ca-file={pki}/ca.crt",
            f"--cluster-signing-cert-file={pki}/ca.crt", f"--cluster-signing-key-file={pki}/ca.key",
            "--use-service-account-credentials=true", "--profiling=false",
            *(f"--{name}={value}" for name, value in topology.controller_manager.items()),
        ],
        "kube-scheduler": [
            f"{programs}/kube-scheduler", f"--master={topology.api_server}", *client("scheduler"), *single,
            "--profiling=false",
        ],
    }  # fmt: skip


def _kubelet(topology: Topology, *, machine: Machine, pki: Path, cgroup: str) -> dict[str, Any]:
    return {
        "kind": "KubeletConfiguration",
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": f"{pki}/ca.crt"},
        },
        "authorization": {"mode": "Webhook"},
        "clusterDNS": [topology.dns_address],
        "clusterDomain": "cluster.local",
        "resolvConf": "/run/heterotrain/resolv.conf",
        "containerRuntimeEndpoint": f"unix://{CONTAINERD_SOCKET}",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": cgroup,
        "failCgroupV1": False,
        "failSwapOn": False,
        "makeIPTablesUtilChains": False,
        "oomScoreAdj": -999 if machine.may_protect_from_oom else 0,
        # The disk belongs to the whole machine. A node must not delete images that it shares with the others, and a
        # disk that others have filled must not evict pods before it is nearly full.
        "imageGCHighThresholdPercent": 100,
        "evictionHard": {
            "memory.available": "100Mi",
            "nodefs.available": "1%",
            "imagefs.available": "1%",
            "nodefs.inodesFree": "1%",
        },
        **topology.kubelet,
    }


def _kube_proxy(topology: Topology, *, machine: Machine, pki: Path) -> dict[str, Any]:
    return {
        "kind": "KubeProxyConfiguration",
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "clientConnection": {"kubeconfig": f"{pki}/kube-proxy.kubeconfig"},
        "mode": "nftables",
        "clusterCIDR": topology.pod_subnet,
        "oomScoreAdj": -999 if machine.may_protect_from_oom else 0,
        # The limits of connection tracking belong to the machine and must stay as they are.
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
    }


def _cni(node: Node) -> dict[str, Any]:
    """Return a point-to-point link per pod, so that packets between pods of one node also pass kube-proxy's rules."""
    return {
        "cniVersion": "1.0.0",
        "name": "pods",
        "plugins": [
            *([{"type": "usable-at-once"}] if node.pod_cidr_6 else []),
            {
                "type": "ptp",
                "ipMasq": False,
                # Leases vanish with the power, as their pods do.
                "ipam": {
                    "type": "host-local",
                    "dataDir": "/run/cni-leases",
                    "ranges": [[{"subnet": subnet}] for subnet in (node.pod_cidr, node.pod_cidr_6) if subnet],
                    "routes": [{"dst": "0.0.0.0/0"}, *([{"dst": "::/0"}] if node.pod_cidr_6 else [])],
                },
            },
            {"type": "portmap", "capabilities": {"portMappings": True}},
        ],
    }


def _containerd(machine: Machine) -> str:
    return f"""
version = 3
root = "/var/lib/containerd"
state = "/run/containerd"
oom_score = {-999 if machine.may_protect_from_oom else 0}
disabled_plugins = ["io.containerd.nri.v1.nri"]
[grpc]
  address = "{CONTAINERD_SOCKET}"
[plugins."io.containerd.cri.v1.images"]
  snapshotter = "overlayfs"
  [plugins."io.containerd.cri.v1.images".pinned_images]
    sandbox = "{PAUSE_IMAGE}"
[plugins."io.containerd.cri.v1.runtime"]
  restrict_oom_score_adj = {str(not machine.may_protect_from_oom).lower()}
  [plugins."io.containerd.cri.v1.runtime".cni]
    bin_dirs = ["{CNI_PROGRAMS}", "{OWN_CNI_PROGRAMS}"]
    conf_dir = "{CNI_CONFIGURATION}"
  [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
      SystemdCgroup = false
"""
