"""The network: one bridge on the machine, one virtual link from it to each node, and routes to each node's pods."""

from __future__ import annotations

import json
import socket

from local_cluster.process import Problem, run
from local_cluster.topology import NODE_SUBNET, NODE_SUBNET_6, Node, Topology

BRIDGE = "htrain-br"


def create_bridge(topology: Topology) -> None:
    """Create the bridge, with routes from the machine to the pods."""
    run("ip", "link", "add", BRIDGE, "type", "bridge")
    run("ip", "address", "add", f"{topology.gateway}/{NODE_SUBNET.prefixlen}", "dev", BRIDGE)
    run("ip", "link", "set", BRIDGE, "up")
    for node in topology.nodes:
        run("ip", "route", "add", node.pod_cidr, "via", node.address, "dev", BRIDGE)


def connect(node: Node, topology: Topology, *, pid: int) -> None:
    """Create the link to a node that was just powered on, and the node's addresses and routes.

    The default route leads nowhere: a Service's address must have some route before it is translated.
    """
    run("ip", "link", "add", node.host_device, "type", "veth", "peer", "name", "eth0", "netns", str(pid))
    run("ip", "link", "set", node.host_device, "master", BRIDGE, "up")
    commands = [
        "link set lo up",
        f"address add {node.address}/{NODE_SUBNET.prefixlen} dev eth0",
        "link set eth0 up",
        f"route add default via {topology.gateway}",
        *(f"route add {other.pod_cidr} via {other.address}" for other in topology.nodes if other != node),
    ]
    if node.address_6:
        commands += [
            f"address add {node.address_6}/{NODE_SUBNET_6.prefixlen} dev eth0 nodad",  # usable at once
            "route add ::/0 dev eth0",
            *(f"route add {other.pod_cidr_6} via {other.address_6}" for other in topology.nodes if other != node),
        ]
    run("nsenter", f"--net=/proc/{pid}/ns/net", "ip", "-batch", "-", stdin="\n".join(commands))


def unplug(node: Node) -> None:
    """Cut the node's network link, without a last message in either direction."""
    _exists(node)
    run("ip", "link", "set", node.host_device, "down")


def plug(node: Node) -> None:
    """Restore the node's network link."""
    _exists(node)
    run("ip", "link", "set", node.host_device, "up")


def disconnect(device: str) -> None:
    """Remove a network device of the cluster if it exists."""
    if device in devices():
        try:
            run("ip", "link", "delete", device)
        except Problem:  # a node's end of a link vanishes with the node at any moment
            if device in devices():
                raise


def devices() -> set[str]:
    """Return the names of the cluster's network devices on this machine."""
    return {name for _, name in socket.if_nameindex() if name == BRIDGE or name.startswith("htrain-n")}


def is_plugged(node: Node) -> bool:
    """Return whether the machine's end of the node's network link is up."""
    if node.host_device not in devices():
        return False
    return "UP" in json.loads(run("ip", "-json", "link", "show", "dev", node.host_device))[0]["flags"]


def _exists(node: Node) -> None:
    if node.host_device not in devices():
        raise Problem(f"node {node.name} has no power: `power-on {node.name}` first")
