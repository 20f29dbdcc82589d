"""Credentials for the API server: the pod's service account inside a cluster, otherwise a kubeconfig."""

from __future__ import annotations

import os
from pathlib import Path

from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.config import ConfigException, load_incluster_config, load_kube_config

from heterotrain_operator.kube.errors import KubeError

DEFAULT_KUBECONFIG = str(Path("~/.kube/config").expanduser())


async def load_configuration(kubeconfig: str | None = None) -> Configuration:
    """Return address and credentials of the API server.

    Raises:
        KubeError: there is neither a service account nor a readable kubeconfig.
    """
    configuration = Configuration()
    chosen = kubeconfig or os.environ.get("KUBECONFIG")
    try:
        if chosen is None and "KUBERNETES_SERVICE_HOST" in os.environ:
            load_incluster_config(client_configuration=configuration)
        else:
            file = chosen or DEFAULT_KUBECONFIG
            if not _exists(file):
                raise KubeError(f"no credentials for a cluster: {file} does not exist; set KUBECONFIG, or run in a pod")
            await load_kube_config(config_file=file, client_configuration=configuration, persist_config=False)
    except (ConfigException, OSError) as error:
        raise KubeError(f"no credentials for a cluster: {error}; set KUBECONFIG, or run inside a pod") from error
    return configuration


def _exists(kubeconfig: str) -> bool:
    """Return whether one of the files exists; the client reports missing ones as empty."""
    return any(Path(each).exists() for each in kubeconfig.split(os.pathsep))
