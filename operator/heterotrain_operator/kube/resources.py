"""Resources that the operator reads and writes, and their URL paths."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from heterotrain_core.contract import keys


class Resource(NamedTuple):
    """A resource: API group and version as in ``apiVersion``, and the plural name."""

    api_version: str
    plural: str

    def path(self, namespace: str | None, name: str = "", subresource: str = "") -> str:
        """Return the URL path; without a namespace, the path for the whole cluster."""
        root = f"/apis/{self.api_version}" if "/" in self.api_version else f"/api/{self.api_version}"
        parts = [root, *(["namespaces", namespace] if namespace else []), self.plural, name, subresource]
        return "/".join(part for part in parts if part)


JOBS: Final = Resource(f"{keys.GROUP}/{keys.VERSION}", keys.PLURAL)
PODS: Final = Resource("v1", "pods")
NODES: Final = Resource("v1", "nodes")
CONFIG_MAPS: Final = Resource("v1", "configmaps")
SECRETS: Final = Resource("v1", "secrets")
DISRUPTION_BUDGETS: Final = Resource("policy/v1", "poddisruptionbudgets")
NETWORK_POLICIES: Final = Resource("networking.k8s.io/v1", "networkpolicies")
EVENTS: Final = Resource("v1", "events")
LEASES: Final = Resource("coordination.k8s.io/v1", "leases")

_BY_KIND: Final = {
    "PodDisruptionBudget": DISRUPTION_BUDGETS,
    "NetworkPolicy": NETWORK_POLICIES,
}


def resource_of(body: Mapping[str, Any]) -> Resource:
    """Return the resource of an object that the operator applies; those of plugins have their usual plural."""
    return _BY_KIND.get(body["kind"]) or Resource(body["apiVersion"], f"{body['kind'].lower()}s")
