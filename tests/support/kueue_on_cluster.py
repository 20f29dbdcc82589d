"""The real Kueue as a Deployment on the cluster of `make cluster`, for the pods of one namespace.

The nodes mount a folder of this machine, which holds the compiled program. Its webhooks ask about pods of that
namespace only, so other jobs of the cluster do not notice it.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from lab.cluster import Cluster, ClusterError, wait_for
from lab.jobs import SHARED_FOLDER
from local_cluster import paths, toolchain

from support.kueue import GROUP, NAMESPACE, SECRET, SERVICE, VERSION, definitions, documents

PORT, HEALTH_PORT = 9443, 8081
NAME = "kueue"
CERTIFICATES = "/certificates"
READY_S = 240.0
"""The kubelet brings the certificate that Kueue makes into its pod only after a minute or more."""


@contextmanager
def kueue_on(cluster: Cluster) -> Iterator[None]:
    """Run Kueue for the pods of the cluster's namespace; nothing of it is left afterwards.

    Raises:
        ClusterError: it does not start.
    """
    folder = Path(SHARED_FOLDER) / NAME
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o755)
    shutil.copy(paths.programs() / NAME, folder / NAME)
    inside = Cluster(environment=cluster.environment, namespace=NAMESPACE)
    webhooks = _webhooks(cluster.namespace)
    inside.kubectl("apply", "--server-side", "-f", "-", stdin=yaml.safe_dump_all([*_objects(folder), *definitions()]))
    names = [f"crd/{each['metadata']['name']}" for each in definitions()]
    inside.kubectl("wait", "--for=condition=Established", "--timeout=60s", *names)
    try:
        inside.kubectl("apply", "--server-side", "-f", "-", stdin=yaml.safe_dump_all(webhooks))
        try:
            wait_for(lambda: _admits(cluster), "Kueue's webhooks answer", timeout_s=READY_S, every_s=2)
        except ClusterError as error:
            logs = inside.kubectl("logs", f"deployment/{NAME}", "--tail=40")
            raise ClusterError(f"{error}\n{inside.kubectl('get', 'pods', '-o', 'wide')}\n{logs}") from error
        yield
    finally:
        for each in webhooks:  # first, so that nobody waits for a webhook that does not answer
            inside.delete(each["kind"], each["metadata"]["name"])
        inside.kubectl("delete", *names, "--ignore-not-found", "--timeout=60s", timeout_s=90)
        inside.delete("clusterrolebinding", NAME)
        inside.kubectl("delete", "namespace", NAMESPACE, "--timeout=90s", timeout_s=100)
        shutil.rmtree(folder, ignore_errors=True)


def _objects(folder: Path) -> list[dict[str, Any]]:
    inside, labels = {"namespace": NAMESPACE}, {"app": NAME}
    configuration = {
        "apiVersion": "config.kueue.x-k8s.io/v1beta1",
        "kind": "Configuration",
        "namespace": NAMESPACE,
        "health": {"healthProbeBindAddress": f":{HEALTH_PORT}"},
        "metrics": {"bindAddress": "0"},
        "webhook": {"port": PORT, "certDir": CERTIFICATES},
        "leaderElection": {"leaderElect": False},
        "internalCertManagement": {"enable": True, "webhookServiceName": SERVICE, "webhookSecretName": SECRET},
        "integrations": {"frameworks": ["pod"]},
    }
    container = {
        "name": NAME,
        "image": "heterotrain/operator:dev",  # any image that the nodes hold: the program needs none of its files
        "imagePullPolicy": "Never",
        "command": ["/kueue/kueue", "--config=/configuration/kueue.yaml", "--feature-gates=VisibilityOnDemand=false"],
        "readinessProbe": {"httpGet": {"path": "/readyz", "port": HEALTH_PORT}, "periodSeconds": 2},
        "resources": {"requests": {"cpu": "50m", "memory": "128Mi"}},
        "volumeMounts": [
            {"name": "program", "mountPath": "/kueue", "readOnly": True},
            {"name": "configuration", "mountPath": "/configuration"},
            {"name": "certificates", "mountPath": CERTIFICATES, "readOnly": True},
        ],
    }
    pod = {
        "serviceAccountName": NAME,
        "terminationGracePeriodSeconds": 1,
        "containers": [container],
        "volumes": [
            {"name": "program", "hostPath": {"path": str(folder), "type": "Directory"}},
            {"name": "configuration", "configMap": {"name": NAME}},
            {"name": "certificates", "secret": {"secretName": SECRET}},
        ],
    }
    account = {"kind": "ServiceAccount", "name": NAME, **inside}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"}
    return [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}},
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": NAME, **inside}},
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": NAME},
            "roleRef": role,
            "subjects": [account],
        },
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": SECRET, **inside}},
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": NAME, **inside},
            "data": {"kueue.yaml": yaml.safe_dump(configuration)},
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": SERVICE, **inside},
            "spec": {"selector": labels, "ports": [{"port": 443, "targetPort": PORT}]},
        },
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": NAME, **inside},
            "spec": {
                "selector": {"matchLabels": labels},
                "template": {"metadata": {"labels": labels}, "spec": pod},
            },
        },
    ]


def _webhooks(namespace: str) -> list[dict[str, Any]]:
    """Return Kueue's webhooks for its own kinds, and for pods of one namespace."""
    found = documents(toolchain.sources(toolchain.KUEUE) / "config/components/webhook/manifests.yaml")
    for document in found:
        # Kueue looks for its webhooks by these names.
        document["metadata"]["name"] = f"kueue-{document['metadata']['name']}"
        document["webhooks"] = [each for each in document["webhooks"] if _is_used(each)]
        for webhook in document["webhooks"]:
            webhook["clientConfig"]["service"] |= {"name": SERVICE, "namespace": NAMESPACE}
            if _is_about_pods(webhook):
                named = {"key": "kubernetes.io/metadata.name", "operator": "In", "values": [namespace]}
                webhook["namespaceSelector"] = {"matchExpressions": [named]}
    return found


def _is_used(webhook: dict[str, Any]) -> bool:
    return _is_about_pods(webhook) or all(rule["apiGroups"] == [GROUP] for rule in webhook["rules"])


def _is_about_pods(webhook: dict[str, Any]) -> bool:
    return all(rule["resources"] == ["pods"] for rule in webhook["rules"])


def _admits(cluster: Cluster) -> bool:
    """Return whether the API server asks Kueue about pods of the namespace: one with a queue gets its gate."""
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "probe", "labels": {f"{GROUP}/queue-name": "none"}},
        "spec": {"containers": [{"name": "main", "image": "image.invalid/none:1"}]},
    }
    answer = cluster.kubectl("create", "--dry-run=server", "-o", "yaml", "-f", "-", stdin=yaml.safe_dump(pod))
    return "schedulingGates" in yaml.safe_load(answer)["spec"]


def cluster_queue(name: str, quotas: dict[str, str]) -> dict[str, Any]:
    """Return a ClusterQueue with one flavor of the same name and these quotas by resource."""
    flavor = {"name": name, "resources": [{"name": each, "nominalQuota": most} for each, most in quotas.items()]}
    return {
        "apiVersion": VERSION,
        "kind": "ClusterQueue",
        "metadata": {"name": name},
        "spec": {
            "namespaceSelector": {},
            "resourceGroups": [{"coveredResources": list(quotas), "flavors": [flavor]}],
        },
    }
