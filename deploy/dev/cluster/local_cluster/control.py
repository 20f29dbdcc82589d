"""Power and network of the running cluster's nodes, on kind and without Docker alike, for tests and the demo."""

from __future__ import annotations

from pathlib import Path

from local_cluster import kind, network, paths, record, topology
from local_cluster import node as local_node


def power_off(node: str) -> None:
    """Cut the node's network link, then its power: its peers and the API server get no last message.

    Raises:
        Problem: there is no such node, or it has no power.
    """
    if kind.is_running():
        kind.power_off(node)
    else:
        local_node.power_off(_plan().node(node))


def power_on(node: str) -> None:
    """Restore the node's power and network link; it registers again by itself.

    Raises:
        Problem: there is no such node, or it has power.
    """
    if kind.is_running():
        kind.power_on(node)
    else:
        plan = _plan()
        local_node.power_on(plan.node(node), plan)


def unplug(node: str) -> None:
    """Cut the node's network link; its processes keep running, out of reach.

    Raises:
        Problem: there is no such node, or it has no power.
    """
    if kind.is_running():
        kind.unplug(node)
    else:
        network.unplug(_plan().node(node))


def plug(node: str) -> None:
    """Restore the node's network link.

    Raises:
        Problem: there is no such node, or it has no power.
    """
    if kind.is_running():
        kind.plug(node)
    else:
        network.plug(_plan().node(node))


def inside(node: str, *command: str, stdin: str | None = None) -> str:
    """Run a command on a node, as root, and return what it printed.

    Raises:
        Problem: there is no such node, it has no power, or the command failed.
    """
    if kind.is_running():
        return kind.inside(node, *command, stdin=stdin)
    return local_node.inside(_plan().node(node), *command, stdin=stdin)


def name_image(node: str, image: str, other: str) -> None:
    """Give an image that a node holds another name there; both are complete references, such as docker.io/a/b:c.

    Raises:
        Problem: there is no such node, it has no power, or it does not hold the image.
    """
    ctr = "ctr" if kind.is_running() else str(paths.programs() / "ctr")
    inside(node, ctr, "--namespace=k8s.io", "images", "tag", "--force", image, other)


def kubeconfig_path() -> Path:
    """Return the path of the administrator's kubeconfig of the running cluster.

    Raises:
        Problem: no cluster is running.
    """
    if kind.is_running():
        return kind.kubeconfig()
    record.present()
    return paths.kubeconfig()


def nodes() -> tuple[str, ...]:
    """Return the names of the cluster's nodes, the control plane first."""
    return tuple(node.name for node in topology.read((paths.REPOSITORY / "kind-config.yaml").read_text()).nodes)


def _plan() -> topology.Topology:
    return topology.read(record.present().topology)
