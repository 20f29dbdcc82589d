"""Hands kopf the same credentials that our own client uses, so that there is one way to log in."""

from __future__ import annotations

import inspect

import kopf

from heterotrain_operator.kube.auth import load_configuration


async def login(kubeconfig: str | None) -> kopf.ConnectionInfo:
    """Return how kopf reaches the API server; kopf asks again when it is refused, so a rotated token is read anew.

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
