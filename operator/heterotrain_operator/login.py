"""Credentials for kopf: the same as those of the operator's own client."""

from __future__ import annotations

import inspect

import kopf

from heterotrain_operator.kube.auth import load_configuration


async def login(kubeconfig: str | None) -> kopf.ConnectionInfo:
    """Return kopf's connection to the API server; kopf calls this again after a denial, so rotated tokens are read.

    Raises:
        KubeError: there is neither a service account nor a kubeconfig.
    """
    configuration = await load_configuration(kubeconfig)
    found = configuration.get_api_key_with_prefix("BearerToken")
    token = await found if inspect.isawaitable(found) else found
    scheme, _, bare = (token or "").rpartition(" ")
    return kopf.ConnectionInfo(
        server=configuration.host,
        ca_path=configuration.ssl_ca_cert,
        insecure=not configuration.verify_ssl,
        scheme=scheme or None,
        token=bare or None,
        certificate_path=configuration.cert_file,
        private_key_path=configuration.key_file,
    )
