"""``spec.network``: the workers' ports."""

from __future__ import annotations

from typing import Any

from heterotrain_core.contract import keys
from pydantic import Field

from heterotrain_operator.api.schema import Model, SpecRule

LEAST_PORT = 1024
"""Lower ports need a privilege that workers do not have."""
MOST_PORT = 2**16 - 1
_LAST_METRICS = keys.METRICS_PORTS - 1
_LAST_PEER = keys.PEER_PORTS - 1


class Network(
    Model,
    rules=(
        SpecRule(
            cel=f"self.metricsPort + {_LAST_METRICS} < self.peerPort || "
            f"self.peerPort + {_LAST_PEER} < self.metricsPort",
            holds=lambda self: not set(self.metrics_ports) & set(self.peer_ports),
            message=f"the ports overlap: workers use {keys.METRICS_PORTS} ports from metricsPort on and "
            f"{keys.PEER_PORTS} from peerPort on, so choose ports that are further apart",
        ),
    ),
):
    """Ports of the workers."""

    metrics_port: int = Field(
        default=keys.METRICS_PORT,
        ge=LEAST_PORT,
        le=MOST_PORT - _LAST_METRICS,
        description="Port of metrics and readiness of a worker's first process; the others use the ports above it. "
        "Example: 9400.",
    )
    peer_port: int = Field(
        default=keys.PEER_PORT,
        ge=LEAST_PORT,
        le=MOST_PORT - _LAST_PEER,
        description="Port at which a worker's first process listens for other workers; the others use the ports above "
        f"it. With runtime: Torchrun, MASTER_PORT is one of the {keys.PEER_PORTS} ports from here on. Example: 29400.",
    )

    @property
    def metrics_ports(self) -> range:
        """All ports that metrics may use."""
        return range(self.metrics_port, self.metrics_port + keys.METRICS_PORTS)

    @property
    def peer_ports(self) -> range:
        """All ports that connections between workers may use."""
        return range(self.peer_port, self.peer_port + keys.PEER_PORTS)


NODE_PORTS = (range(10_248, 10_260), range(30_000, 32_768))
"""Ports that a node itself uses: of kubelet, kube-proxy and control plane, and the default range of node ports."""

_TAKEN = " || ".join(
    f"({first} <= {ports[-1]} && {first} + {last} >= {ports[0]})"
    for first, last in (("self.network.metricsPort", _LAST_METRICS), ("self.network.peerPort", _LAST_PEER))
    for ports in NODE_PORTS
)
_ON_HOST = "has({0}.hostNetwork) && {0}.hostNetwork"
_POOL_ON_HOST = (
    f"self.workerPools.exists(p, has(p.template) && has(p.template.spec) && {_ON_HOST.format('p.template.spec')})"
)


def clear_of_node_ports(network: Network) -> bool:
    """Return whether no port of a worker is one that nodes use themselves."""
    used = {*network.metrics_ports, *network.peer_ports}
    return not any(used & set(ports) for ports in NODE_PORTS)


def _uses_host_network(spec: Any) -> bool:
    patches = [pool.template.spec for pool in spec.worker_pools if pool.template is not None]
    return bool(spec.template.spec.host_network) or any(patch.host_network for patch in patches)


NETWORK_RULES = (
    SpecRule(
        cel=f"!(({_ON_HOST.format('self.template.spec')}) || {_POOL_ON_HOST}) || !({_TAKEN})",
        holds=lambda self: not _uses_host_network(self) or clear_of_node_ports(self.network),
        message="with hostNetwork the workers' ports are the node's: choose network.metricsPort and network.peerPort "
        "below 10000 or from 10260 to 29800, because Kubernetes itself uses 10248 to 10259 and 30000 to 32767",
    ),
    SpecRule(
        cel="oldSelf.suspend || (self.network.metricsPort == oldSelf.network.metricsPort && "
        "self.network.peerPort == oldSelf.network.peerPort)",
        message="the network's ports are immutable while the job runs: set suspend: true, change them, then set "
        "suspend: false",
    ),
)
"""Rules of a whole job about its network."""
