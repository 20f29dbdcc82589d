"""The rules by which the lab enforces NetworkPolicies."""

from __future__ import annotations

from typing import Any

import pytest
from lab.network_policies import ruleset


def pod(name: str, address: str, *, namespace: str = "a", **labels: str) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "namespace": namespace, "labels": labels},
        "status": {"podIP": address, "phase": "Running"},
    }


def policy(*ingress: dict[str, Any], **labels: str) -> dict[str, Any]:
    spec = {"podSelector": {"matchLabels": labels}, "policyTypes": ["Ingress"], "ingress": list(ingress)}
    return {"metadata": {"name": "one", "namespace": "a"}, "spec": spec}


def test_selected_pods_accept_what_an_entry_allows_and_nothing_else() -> None:
    workers = {"from": [{"podSelector": {"matchLabels": {"job": "x"}}}]}
    metrics = {"ports": [{"protocol": "TCP", "port": 80, "endPort": 82}]}
    pods = [
        pod("one", "10.0.0.1", job="x"), pod("two", "10.0.0.2", job="x"), pod("other", "10.0.0.3", job="y"),
        pod("namesake", "10.0.0.4", namespace="b", job="x"),
    ]  # fmt: skip
    lines = ruleset([policy(workers, metrics, job="x")], pods).splitlines()
    assert [line for line in lines if line.startswith("ip ")] == [
        f"ip daddr {address} {rule}"
        for address in ("10.0.0.1", "10.0.0.2")
        for rule in ("ip saddr 10.0.0.1 accept", "ip saddr 10.0.0.2 accept", "tcp dport 80-82 accept", "drop")
    ]


def test_without_policies_nothing_is_left() -> None:
    assert ruleset([], [pod("one", "10.0.0.1")]).splitlines()[-1].startswith("delete table")


def test_what_is_unknown_is_refused() -> None:
    with pytest.raises(ValueError, match="namespaceSelector"):
        ruleset([policy({"from": [{"namespaceSelector": {}}]}, job="x")], [pod("one", "10.0.0.1", job="x")])
