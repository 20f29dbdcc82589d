"""The real API server and kubeconform accept every object of the chart, with the values of each platform of the docs.

The API server knows the kinds of the Prometheus operator while these tests run.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from lab.cluster import Cluster, ClusterError
from support.helm import CHART
from support.kubeconform import kubeconform, write_schemas
from support.platforms import blocks, job

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(600),  # fetches a module of Go, once
    pytest.mark.needs_program("helm", "kubeconform"),
]

NAMESPACE = "chart-objects"
EVERYTHING = """
nameOverride: mine
commonLabels: {team: ml}
commonAnnotations: {owner: ml}
replicas: 2
strategy: {type: RollingUpdate, rollingUpdate: {maxSurge: 1, maxUnavailable: 50%}}
dnsPolicy: None
dnsConfig: {nameservers: [10.0.0.10], searches: [example.com], options: [{name: ndots, value: "2"}]}
hostAliases: [{ip: 10.1.2.3, hostnames: [prometheus.example.com]}]
topologySpreadConstraints:
- {maxSkew: 1, topologyKey: zone, whenUnsatisfiable: ScheduleAnyway, labelSelector: {matchLabels: {a: b}}}
podDisruptionBudget: {enabled: true, minAvailable: 50%}
networkPolicy: {enabled: true}
prometheus: {auth: {secretName: token, caSecretName: ca}}
metrics: {auth: true, tls: {secretName: tls, caSecretName: ca}}
monitoring:
  podMonitor: {enabled: true}
  serviceMonitor: {enabled: true}
  prometheusRule: {enabled: true, runbookUrl: "https://docs.example.com/operations"}
  dashboard: {enabled: true}
service: {annotations: {a: b}, labels: {c: d}}
serviceAccount: {annotations: {a: b}, labels: {c: d}}
extraVolumes: [{name: more, emptyDir: {}}]
extraVolumeMounts: [{name: more, mountPath: /more}]
extraObjects:
- {apiVersion: v1, kind: ConfigMap, metadata: {name: "of-{{ .Release.Name }}"}, data: {a: b}}
"""
VALUES = [("defaults", "{}"), ("everything", EVERYTHING), *blocks("values")]


def rendered(cluster: Cluster, values: str) -> str:
    """Return the chart's objects, also those that need the kinds of the Prometheus operator."""
    command = ["helm", "template", "release", str(CHART), "--namespace", NAMESPACE, "--kube-version", "1.36.0"]
    return cluster.run(*command, "--values", "-", stdin=values)


@pytest.fixture(scope="module")
def schemas(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The schemas of all kinds that the chart renders."""
    folder = tmp_path_factory.mktemp("schemas")
    objects = [each for each in yaml.safe_load_all(rendered(cluster, EVERYTHING)) if each]
    write_schemas(cluster.raw, folder, {(each["apiVersion"], each["kind"]) for each in objects})
    return folder


def dry_run(cluster: Cluster, text: str) -> None:
    """Have the API server check objects as it would before it writes them.

    Raises:
        ClusterError: it refuses one.
    """
    objects = [each for each in yaml.safe_load_all(text) if each]
    cluster.apply(*(each for each in objects if each["kind"] == "ServiceAccount"))  # a pod needs its account to exist
    command = ["apply", "--server-side", "--force-conflicts", "--dry-run=server", "--validate=strict", "-f", "-"]
    for namespace in sorted({each["metadata"].get("namespace", NAMESPACE) for each in objects}):
        there = [each for each in objects if each["metadata"].get("namespace", NAMESPACE) == namespace]
        Cluster(namespace=namespace).kubectl(*command, stdin=yaml.safe_dump_all(there))


@pytest.mark.parametrize("values", [text for _, text in VALUES], ids=[name for name, _ in VALUES])
def test_the_api_server_and_kubeconform_accept_the_objects(cluster: Cluster, schemas: Path, values: str) -> None:
    text = rendered(cluster, values)
    report = kubeconform(text, schemas)
    assert [each for each in report["resources"] if each["status"] != "statusValid"] == []
    assert report["summary"]["valid"] == len([each for each in yaml.safe_load_all(text) if each])
    dry_run(cluster, text)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("revisionHistoryLimit: 10", "revisionHistoryLimits: 10"),
        ("containerPort: 8080", "containerPort: health"),
        ("interval: 5s", "intervals: 5s"),
    ],
)
def test_both_refuse_a_wrong_field(cluster: Cluster, schemas: Path, right: str, wrong: str) -> None:
    text = rendered(cluster, EVERYTHING)
    assert right in text
    broken = text.replace(right, wrong)
    assert kubeconform(broken, schemas)["summary"]["invalid"] == 1
    with pytest.raises(ClusterError, match=wrong.partition(":")[0]):
        dry_run(cluster, broken)


@pytest.mark.parametrize("pools", [text for _, text in blocks("pools")], ids=[name for name, _ in blocks("pools")])
def test_the_api_server_accepts_the_pools(cluster: Cluster, pools: str) -> None:
    cluster.kubectl("create", "--dry-run=server", "--validate=strict", "-f", "-", stdin=yaml.safe_dump(job(pools)))
