"""The restricted Pod Security standard, as far as a pod's spec can violate it, and the uids of OpenShift."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}
HOST = ("hostNetwork", "hostPID", "hostIPC")
USER = ("runAsUser", "runAsGroup", "fsGroup", "supplementalGroups")


def problems(spec: Mapping[str, Any]) -> list[str]:
    """Return what an admission by these standards would refuse."""
    pod = spec.get("securityContext") or {}
    found = [name for name in HOST if spec.get(name)]
    found += [f"{name} is fixed" for name in USER if name in pod]  # OpenShift gives each namespace its own range
    for volume in spec.get("volumes") or ():
        found += [f"volume {volume['name']}: {kind}" for kind in volume.keys() - {"name"} - VOLUMES]
    for container in (*(spec.get("initContainers") or ()), *spec["containers"]):
        own = container.get("securityContext") or {}
        effective = {**pod, **own}
        found += [f"{container['name']}: {name} is fixed" for name in USER if name in own]
        if effective.get("runAsNonRoot") is not True:
            found.append(f"{container['name']}: runAsNonRoot")
        if (effective.get("seccompProfile") or {}).get("type") not in ("RuntimeDefault", "Localhost"):
            found.append(f"{container['name']}: seccompProfile")
        if own.get("privileged") or own.get("allowPrivilegeEscalation") is not False:
            found.append(f"{container['name']}: allowPrivilegeEscalation")
        capabilities = own.get("capabilities") or {}
        if "ALL" not in capabilities.get("drop", ()) or set(capabilities.get("add", ())) - {"NET_BIND_SERVICE"}:
            found.append(f"{container['name']}: capabilities")
        found += [f"{container['name']}: hostPort" for port in container.get("ports") or () if "hostPort" in port]
    return found
