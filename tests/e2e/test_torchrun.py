"""An unchanged script for torchrun on the real cluster: it loses a worker and ends with the job's success."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import yaml
from lab.cluster import REPOSITORY, Cluster, wait_for
from lab.jobs import Job, fresh_folder
from support.on_cluster import diagnostics, remove_namespace

EXAMPLE = REPOSITORY / "deploy/examples/torchrun"
EPOCHS = 20
GATE = """
import pathlib, runpy, sys, time
import torch
save = torch.save
def gated(saved, path):
    save(saved, path)
    reached = pathlib.Path(path).with_name("third-epoch")
    if saved["epoch"] == 3 and not reached.exists():
        reached.touch()
        time.sleep(3600)
torch.save = gated
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a script whose first rank 0 waits in the third epoch until it is ended: the loss comes before the end."""


@pytest.fixture
def namespace(installed: Cluster) -> Iterator[Cluster]:
    """Yield the cluster with a namespace of this module's own."""
    cluster = Cluster(environment=installed.environment, namespace="e2e-torchrun")
    remove_namespace(cluster)
    cluster.run("kubectl", "create", "namespace", cluster.namespace)
    yield cluster
    remove_namespace(cluster, waits=False)


@pytest.mark.thorough
def test_a_script_for_torchrun_goes_on_after_the_loss_of_a_worker(namespace: Cluster) -> None:
    """The launchers start it again from its own checkpoint. The lost worker counts as a disruption."""
    folder = fresh_folder(f"{namespace.namespace}-job")
    manifest: dict[str, Any] = yaml.safe_load((EXAMPLE / "job.yaml").read_text())
    pod = manifest["spec"]["template"]["spec"]
    run, *script = pod["containers"][0]["command"]
    pod["containers"][0]["command"] = [run, "/script/gate.py", *script, "--epochs", str(EPOCHS)]
    pod["volumes"][1]["hostPath"]["path"] = str(folder)
    for pool in manifest["spec"]["workerPools"]:  # each new world imports PyTorch again in every pod
        pool["resources"]["limits"]["cpu"] = "1"
    files = {"train.py": (EXAMPLE / "train.py").read_text(), "gate.py": GATE}
    named = {"metadata": {"name": "torchrun-script"}, "data": files}
    namespace.apply({"apiVersion": "v1", "kind": "ConfigMap", **named})
    namespace.apply(manifest)
    job = Job(namespace, "torchrun")
    try:
        job.wait_members(3, timeout_s=180)
        checkpoint = folder / "checkpoint.pt"
        wait_for((folder / "third-epoch").exists, "the script's third epoch", timeout_s=180)
        wait_for(
            lambda: job.status().get("plan", {}).get("applied"), "the plan that the launchers report", timeout_s=120
        )
        lost = job.pod_on("t4")
        assert lost is not None
        namespace.kubectl("delete", "pod", lost["metadata"]["name"], "--wait=false")
        job.wait_true("Succeeded", timeout_s=300)
        status = job.status()
        assert status["restarts"] == 0
        assert int(status["plan"]["desired"].partition(".")[0]) >= 2
        assert torch.load(checkpoint)["epoch"] == EPOCHS
        logs = namespace.kubectl("logs", "-l", f"heterotrain.dev/job={job.name}", "--tail=-1")
        assert re.search(r"^loss 0\.0", logs, re.MULTILINE), logs
        assert re.search(r"^epoch [1-9]\d* with \d processes$", logs, re.MULTILINE), "it began at the first epoch again"
    except BaseException:
        print(diagnostics(job))
        raise
