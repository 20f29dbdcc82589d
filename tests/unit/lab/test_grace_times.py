"""The emulated cluster's grace times: short ones for tests that wait for the loss of a node, or those of Kubernetes."""

from __future__ import annotations

from pathlib import Path

import pytest
from local_cluster import lifecycle, services, topology
from local_cluster.process import Problem
from local_cluster.topology import Topology


def flags(found: Topology) -> dict[str, str]:
    """Return the controller manager's flags that say when a node is lost."""
    commands = services.control_plane(found.control_plane, found, programs=Path("bin"), pki=Path("pki"))
    words = dict(word.removeprefix("--").partition("=")[::2] for word in commands["kube-controller-manager"][1:])
    return {name: value for name, value in words.items() if name.startswith("node-monitor")}


def test_a_short_grace_is_several_renewals_long_and_leaves_the_rest_of_the_file() -> None:
    short, real = (topology.read(lifecycle.configuration(grace)) for grace in ("short", "real"))
    assert flags(short) == {"node-monitor-period": "1s", "node-monitor-grace-period": "12s"}
    renewal_s = short.kubelet["nodeLeaseDurationSeconds"] / 4  # as kubelet renews it
    assert 12 / renewal_s >= 5
    assert real.kubelet.items() <= short.kubelet.items()
    assert short.nodes == real.nodes


def test_the_real_grace_is_that_of_kubernetes() -> None:
    real = topology.read(lifecycle.configuration("real"))
    assert flags(real) == {}
    assert not [name for name in real.kubelet if name.startswith("node")]


def test_another_grace_is_refused() -> None:
    with pytest.raises(Problem, match=r"^GRACE is 'long': write short or real$"):
        lifecycle.configuration("long")
