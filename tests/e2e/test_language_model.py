"""The language model of the guide, small: 2 pods with many ranks, S3 in the cluster, submitted and watched from Python.

The server of S3 and its client are Python packages of ``make test-all PART=stores``, which the pods mount.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from heterotrain_client import HeteroTrainClient, TrainingJob
from lab.cluster import REPOSITORY, Cluster, wait_for
from lab.jobs import Job, fresh_folder
from lab.telemetry import Prometheus
from support.on_cluster import diagnostics, remove_namespace
from support.repeat import times
from support.s3_server import PACKAGES

EXAMPLE = REPOSITORY / "deploy/examples/language-model"
DASHBOARD = REPOSITORY / "helm/heterotrain/files/dashboards/job.json"
RANKS_PER_WORKER = times(gate=2, every=8)
RANKS = 2 * RANKS_PER_WORKER
BATCH = 64
BUCKET = "s3://bucket"
PORT = 9000
SMALL = ["--files", "8", "--length", "16", "--width", "16", "--blocks", "1", "--heads", "2"]
ENOUGH = "bucket/enough"
GATE = f"""
import fsspec, heterotrain
init = heterotrain.init
def gated_init(**options):
    job = init(**options)
    @job.on_epoch_end
    def look(_epoch):
        there = job.is_leader and fsspec.filesystem("s3", use_listings_cache=False).exists("{ENOUGH}")
        if job.sum(enough=int(there))["enough"]:
            job.finish("{ENOUGH} is there")
    return job
heterotrain.init = gated_init
"""
"""Comes before the guide's script: it trains until the test has seen what it waits for."""
NO_DATA = {
    "Units of the model by worker": "the model is not divided",
    "Seconds lost to membership changes": "no worker is lost",
    "Peak memory of the device": "there are no GPUs",
    "GPU utilisation": "there are no GPUs",
    "Memory of the GPUs in use": "there are no GPUs",
    "Power of the GPUs": "there are no GPUs",
    "Temperature of the hottest GPU": "there are no GPUs",
    "Network of the workers": "this cluster's kubelets have no cAdvisor figures of the network",
}
"""Panels of the job's dashboard that stay empty in this job, and why; all others have data."""


def variables(address: str) -> dict[str, str]:
    """Return the environment of a client of S3."""
    return {
        "AWS_ENDPOINT_URL": address, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }  # fmt: skip


def named(values: Mapping[str, str]) -> list[dict[str, str]]:
    """Return variables as a container's ``env``."""
    return [{"name": name, "value": value} for name, value in values.items()]


@pytest.fixture
def namespace(installed: Cluster) -> Iterator[Cluster]:
    """Yield the cluster with a namespace of this module's own."""
    cluster = Cluster(environment=installed.environment, namespace="e2e-language-model")
    remove_namespace(cluster)
    cluster.run("kubectl", "create", "namespace", cluster.namespace)
    yield cluster
    remove_namespace(cluster, waits=False)


@pytest.fixture
def packages() -> Iterator[dict[str, Any]]:
    """Yield a volume with the packages of S3's server and client."""
    folder = fresh_folder("language-model-packages")
    shutil.copytree(PACKAGES, folder / "packages")
    yield {"name": "packages", "hostPath": {"path": str(folder / "packages")}}
    shutil.rmtree(folder)


@pytest.fixture
def store(namespace: Cluster, packages: dict[str, Any]) -> str:
    """Start a server of S3 with one bucket that holds the shards; return its address in the cluster."""
    guide = yaml.safe_load((EXAMPLE / "job-s3.yaml").read_text())["spec"]
    container = {
        "name": "s3",
        "image": guide["template"]["spec"]["containers"][0]["image"],
        "command": ["python", "-m", "moto.server", "--host", "::", "--port", str(PORT)],
        # Otherwise the server takes the first part of its own host name for a bucket.
        "env": named(
            {"PYTHONPATH": "/packages", "S3_IGNORE_SUBDOMAIN_BUCKETNAME": "true"}
            | variables(f"http://127.0.0.1:{PORT}")
        ),
        "volumeMounts": [{"name": "packages", "mountPath": "/packages"}, {"name": "script", "mountPath": "/script"}],
        "readinessProbe": {"httpGet": {"path": "/moto-api/", "port": PORT}, "periodSeconds": 1},
        "resources": {"requests": {"cpu": "100m"}},
    }
    volumes = [packages, {"name": "script", "configMap": {"name": "write-shards"}}]
    labels = {"app": "s3"}
    namespace.apply(
        {
            "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "write-shards"},
            "data": {"train.py": (EXAMPLE / "train.py").read_text()},
        },
        {
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "s3", "labels": labels},
            "spec": {"containers": [container], "volumes": volumes, "terminationGracePeriodSeconds": 0},
        },
        {
            "apiVersion": "v1", "kind": "Service", "metadata": {"name": "s3"},
            "spec": {"selector": labels, "ports": [{"port": PORT}]},
        },
    )  # fmt: skip
    namespace.kubectl("wait", "--for=condition=Ready", "pod/s3", "--timeout=600s", timeout_s=620)
    make = "import fsspec; fsspec.filesystem('s3').mkdir('bucket')"
    namespace.kubectl("exec", "s3", "--", "python", "-c", make, timeout_s=600)
    write = ["python", "/script/train.py", *SMALL, "--write-shards", f"{BUCKET}/text"]
    namespace.kubectl("exec", "s3", "--", *write, timeout_s=600)
    return f"http://s3.{namespace.namespace}.svc:{PORT}"


def test_a_language_model_on_many_ranks_from_a_script_to_a_file(
    namespace: Cluster, store: str, packages: dict[str, Any], tmp_path: Path
) -> None:
    """The client submits, forecasts, reads metrics and waits; the dashboard has data; the checkpoint becomes a file.

    Last, the guide's check of pools and store passes where the job has trained.
    """
    script = tmp_path / "train.py"
    script.write_text(GATE + (EXAMPLE / "train.py").read_text())
    job = submit(namespace, store, packages, script)
    on_cluster = Job(namespace, job.name)
    try:
        started_s = time.time()
        plan = on_cluster.wait_members(RANKS, timeout_s=240)
        assert sorted(rank.local_rank for rank in plan.ranks) == sorted([*range(RANKS_PER_WORKER)] * 2)
        assert len({rank.worker for rank in plan.ranks}) == 2
        on_cluster.wait_true("PreflightPassed", timeout_s=120)
        # Learned speeds come with the first scrapes of a job that trains.
        on_cluster.wait_epoch(2, timeout_s=240)
        wait_for(lambda: job.status().cost_per_step, "the cost of a step", timeout_s=60)
        # A plan has a measured step once each rank has made some steps under it.
        wait_for(
            lambda: "measuredStepSeconds" in on_cluster.status().get("prediction", {}),
            "a measured step",
            timeout_s=120,
        )
        lines = {line.worker for line in job.logs(tail=5)}
        assert lines == {rank.worker for rank in plan.ranks}
        forecast = job.forecast(samples_per_epoch=10_000)
        namespace.kubectl(
            "exec", "s3", "--", "python", "-c", f"import fsspec; fsspec.filesystem('s3').touch({ENOUGH!r})"
        )
        status = job.wait(timeout_s=1200, progress=False)
        assert status.epoch is not None
        assert status.restarts == 0
        history = job.metrics(prometheus="monitoring/prometheus:9090", every_s=1.0)
        check_history(history)
        check_forecast(forecast.document)
        check_dashboard(namespace, job, start_s=started_s)
        export(namespace, job, tmp_path)
        check_pools(namespace, job, tmp_path)
    except BaseException:
        print(diagnostics(on_cluster))
        raise


def submit(namespace: Cluster, store: str, packages: dict[str, Any], script: Path) -> TrainingJob:
    """Submit the script on the guide's two pools, on CPUs."""
    guide = yaml.safe_load((EXAMPLE / "job-s3.yaml").read_text())["spec"]
    sizes = {"cpu": "900m", "memory": "6Gi"}
    fields = ("maxReplicas", "capacityType", "pricePerHour", "nodeSelector")
    pools = {
        pool["name"]: {key: pool[key] for key in fields if key in pool}
        | {"numProcPerWorker": RANKS_PER_WORKER, "resources": {"requests": sizes, "limits": sizes}}
        for pool in guide["workerPools"]
    }
    container = guide["template"]["spec"]["containers"][0]
    client = HeteroTrainClient(namespace=namespace.namespace, kubeconfig=namespace.environment["KUBECONFIG"])
    return client.train(
        script,
        name="language-model",
        arguments=[*SMALL, "--shards", f"{BUCKET}/text", "--cache", "/cache"],
        pools=pools,
        image=container["image"],
        global_batch_size=BATCH,
        epochs=1_000_000,
        checkpoint=f"{BUCKET}/language-model",
        training={"precision": "FP32"},
        spec={"elasticPolicy": {"minReplicas": 2, "maxReplicas": 2}},
        pod={
            "container": {
                "env": named({"PYTHONPATH": "/packages"} | variables(store)),
                "volumeMounts": [
                    {"name": "packages", "mountPath": "/packages"},
                    {"name": "cache", "mountPath": "/cache"},
                ],
            },
            "volumes": [packages, {"name": "cache", "emptyDir": {}}],
        },
    )


def check_history(history: Mapping[str, Any]) -> None:
    """Check arrays of the whole training: loss falls."""
    loss = [float(value) for value in history["loss"] if value == value]  # noqa: PLR0124  # without missing values
    assert len(loss) > 1
    assert loss[-1] < loss[0]


def check_forecast(document: Mapping[str, Any]) -> None:
    """Check that the answer has a price and a time for an epoch."""
    assert document["costPerEpoch"] > 0
    assert document["secondsPerEpoch"] > 0


def check_dashboard(namespace: Cluster, job: TrainingJob, *, start_s: float) -> None:
    """Check every panel of the job's dashboard on this job's telemetry, with several ranks in each pod."""
    prometheus = Prometheus(namespace)
    variables = {
        "$__rate_interval": "10s", "$job": str(job.body()["metadata"]["uid"]), "$namespace": namespace.namespace,
        "$name": job.name,
    }  # fmt: skip

    def shown(panel: Mapping[str, Any]) -> list[dict[float, float]]:
        """Return what a panel shows, by time."""
        found = []
        for query in (target["expr"] for target in panel["targets"]):
            for variable, value in variables.items():
                query = query.replace(variable, value)  # noqa: PLW2901  # one after the other
            rows = prometheus.series(query, start_s=start_s, end_s=time.time())
            found += [{float(at_s): float(value) for at_s, value in row["values"]} for row in rows]
        return found

    document = json.loads(DASHBOARD.read_text())
    panels = {panel["title"]: shown(panel) for panel in document["panels"] if panel.get("targets")}
    assert {title for title, lines in panels.items() if not any(lines)} == set(NO_DATA)
    assert all(0 <= value < 1.5 for line in panels["Efficiency"] for value in line.values())
    first, second = panels["Share of each worker (samples per step)"]
    # Means over some seconds, in which shares change and epochs end with a smaller step: their sum is not the batch.
    assert all(0 < samples < BATCH for each in (first, second) for samples in each.values())


def export(namespace: Cluster, job: TrainingJob, folder: Path) -> None:
    """Write the newest checkpoint of the bucket as a safetensors file."""
    uri = f"{BUCKET}/language-model/{namespace.namespace}-{job.name}-{job.body()['metadata']['uid']}"
    command = "from heterotrain_cli.entry import main; main()"
    with forwarded(namespace) as address:
        environment = os.environ | variables(address) | {"PYTHONPATH": str(PACKAGES)}
        subprocess.run(
            [sys.executable, "-c", command, "export", uri, str(folder / "model.safetensors")],
            env=environment, check=True, timeout=600,
        )  # fmt: skip
    header = (folder / "model.safetensors").read_bytes()
    names = json.loads(header[8 : 8 + int.from_bytes(header[:8], "little")])
    assert any(name.startswith("blocks.0.") for name in names), names


def check_pools(namespace: Cluster, job: TrainingJob, folder: Path) -> None:
    """Run ``heterotrain preflight`` for the job, in pods of its pools and with its store."""
    body = job.body()
    (folder / "job.yaml").write_text(
        yaml.safe_dump({key: body[key] for key in ("apiVersion", "kind", "spec")} | {"metadata": {"name": job.name}})
    )
    command = ["-c", "from heterotrain_cli.entry import main; main()", "preflight", str(folder / "job.yaml")]
    found = subprocess.run(
        [sys.executable, *command, "--namespace", namespace.namespace, "--output", "json"],
        env=dict(namespace.environment), capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert found.returncode == 0, found.stdout + found.stderr
    answer = json.loads(found.stdout)
    assert answer["passed"], answer
    verdicts = {check["check"]: check["verdict"] for check in answer["checks"]}
    assert verdicts["store"] == "ok", answer


@contextmanager
def forwarded(namespace: Cluster) -> Iterator[str]:
    """Yield the address of the server of S3 on this machine."""
    command = ["kubectl", "-n", namespace.namespace, "port-forward", "service/s3", f":{PORT}"]
    process = subprocess.Popen(command, env=dict(namespace.environment), stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        found = re.search(r"127\.0\.0\.1:(\d+)", process.stdout.readline())
        assert found is not None, "kubectl port-forward names its port"
        yield f"http://127.0.0.1:{found[1]}"
    finally:
        process.terminate()
        process.wait()
