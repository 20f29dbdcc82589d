"""Enforces the cluster's NetworkPolicies on its nodes, whose network plugin does not.

Knows what this project's policies use: ingress from pods of the same namespace by their labels, and ports. Anything
else is refused rather than ignored.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from local_cluster import control
from local_cluster.process import Problem

from lab.cluster import Cluster, ClusterError

TABLE = "heterotrain_policies"
EVERY_S = 1.0
"""Time between two looks at pods and policies: a pod is admitted as late as by a busy network plugin."""


def ruleset(policies: Sequence[Mapping[str, Any]], pods: Sequence[Mapping[str, Any]]) -> str:
    """Return the script for ``nft`` that replaces all rules of a node. Pure.

    Args:
        policies: all NetworkPolicies.
        pods: all pods.

    Raises:
        ValueError: a policy uses what this module does not know.
    """
    allowed: dict[str, list[str]] = {}
    for policy in policies:
        spec, namespace = policy["spec"], policy["metadata"]["namespace"]
        if spec["policyTypes"] != ["Ingress"]:
            raise ValueError(f"{policy['metadata']['name']}: only policies of ingress are known here")
        rules = [rule for entry in spec.get("ingress", ()) for rule in _rules(entry, namespace, pods)]
        for address in _addresses(spec["podSelector"], namespace, pods):
            allowed.setdefault(address, []).extend(rules)
    lines = [f"table inet {TABLE}", f"delete table inet {TABLE}"]
    if allowed:
        lines += [f"table inet {TABLE} {{ chain forward {{ type filter hook forward priority -10; policy accept;"]
        lines += ["ct state established,related accept"]
        for address, rules in sorted(allowed.items()):
            lines += [f"ip daddr {address} {rule} accept" for rule in rules]
            lines += [f"ip daddr {address} drop"]
        lines += ["}", "}"]
    return "\n".join(lines) + "\n"


@contextmanager
def enforced(cluster: Cluster) -> Iterator[None]:
    """Enforce all policies, present and future, as long as the context lasts.

    Raises:
        ClusterError, Problem: from the context's end; the rules could not be kept up to date.
    """
    stop, errors = threading.Event(), list[Exception]()

    def follow() -> None:
        while not stop.wait(EVERY_S):
            try:
                _apply(_wanted(cluster))
            except (ClusterError, Problem) as error:  # a node may be without power; the last look counts
                errors[:] = [error]
            else:
                errors.clear()

    _apply(_wanted(cluster))
    thread = threading.Thread(target=follow, name="network-policies")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        _apply(ruleset((), ()))
    if errors:
        raise errors[0]


def _wanted(cluster: Cluster) -> str:
    found = json.loads(cluster.run("kubectl", "get", "networkpolicies,pods", "--all-namespaces", "-o", "json"))["items"]
    kinds = {kind: [each for each in found if each["kind"] == kind] for kind in ("NetworkPolicy", "Pod")}
    return ruleset(kinds["NetworkPolicy"], kinds["Pod"])


def _apply(script: str) -> None:
    for node in control.nodes():
        control.inside(node, "nft", "-f", "-", stdin=script)


def _rules(entry: Mapping[str, Any], namespace: str, pods: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the matches of one ingress entry: sources times ports."""
    sources = [""]
    if "from" in entry:
        sources = []
        for peer in entry["from"]:
            if set(peer) != {"podSelector"}:
                raise ValueError(f"only podSelector is known here, not {', '.join(sorted(peer))}")
            sources += [f"ip saddr {address}" for address in _addresses(peer["podSelector"], namespace, pods)]
    ports = [""]
    if "ports" in entry:
        ports = [
            f"{port['protocol'].lower()} dport {port['port']}-{port.get('endPort', port['port'])}"
            for port in entry["ports"]
        ]
    return [f"{source} {port}".strip() for source in sources for port in ports]


def _addresses(selector: Mapping[str, Any], namespace: str, pods: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the addresses of the running pods of a namespace that have the selector's labels."""
    if set(selector) - {"matchLabels"}:
        raise ValueError(f"only matchLabels are known here, not {', '.join(sorted(selector))}")
    wanted = selector.get("matchLabels", {}).items()
    return [
        pod["status"]["podIP"]
        for pod in pods
        if pod["metadata"]["namespace"] == namespace
        and wanted <= pod["metadata"].get("labels", {}).items()
        and pod["status"].get("podIP")
        and pod["status"].get("phase") in ("Pending", "Running")
    ]
