"""What users correct, renew, try again and create again takes effect on a real cluster, and nothing is lost."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from heterotrain.checkpoints.export import read_weights
from heterotrain_cli.main import main
from heterotrain_core.contract import keys
from lab.cluster import REPOSITORY, Cluster, wait_for
from support.cli_runner import CliRunner

if TYPE_CHECKING:
    from conftest import Running, Start

FLAWED = REPOSITORY / "deploy/dev/lab/training/flawed.py"
CONTAINER = "/spec/template/spec/containers/0"
RIGHT: dict[str, tuple[str, Any]] = {
    "image": (f"{CONTAINER}/image", "heterotrain/trainer:dev"),
    "selector": ("/spec/workerPools/0/nodeSelector", {"heterotrain.dev/pool": "a100"}),
    "requests": ("/spec/workerPools/0/resources/limits/cpu", "1"),
    "sidecar": ("/spec/template/spec/containers/1/image", "heterotrain/trainer:dev"),
}
"""By mistake, the path of the field and its right value."""


def wrong(manifest: dict[str, Any], kind: str) -> None:
    """Give a job one worker and one mistake."""
    spec = manifest["spec"]
    spec["workerPools"] = spec["workerPools"][:1]
    spec["elasticPolicy"] = {"minReplicas": 1, "maxReplicas": 1}
    (pool,), pod = spec["workerPools"], spec["template"]["spec"]
    if kind == "image":
        pod["containers"][0]["image"] = "heterotrain/trainer:typo"
    elif kind == "selector":
        pool["nodeSelector"] = {"heterotrain.dev/pool": "a10"}
    elif kind == "requests":
        pool["resources"]["limits"]["cpu"] = pool["resources"]["requests"]["cpu"] = "64"
    else:
        sidecar = {"name": "proxy", "image": "heterotrain/trainer:typo", "command": ["sleep", "3600"]}
        pod["containers"].append(sidecar)


def change(running: Running, *operations: dict[str, Any]) -> None:
    """Change the job as a user does by ``kubectl edit``."""
    patch = json.dumps(list(operations))
    running.job.cluster.kubectl("patch", keys.PLURAL, running.job.name, "--type=json", "-p", patch)


def cli(cluster: Cluster, *arguments: str) -> str:
    """Return what the command line says."""
    options = ["--kubeconfig", cluster.environment["KUBECONFIG"], "-n", cluster.namespace]
    result = CliRunner().invoke(main, [*arguments, *options], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def is_stuck(pod: dict[str, Any]) -> bool:
    """Return whether a pod has no node that takes it, or an image that does not exist."""
    status = pod["status"]
    waits = [each["state"].get("waiting", {}).get("reason") for each in status.get("containerStatuses", ())]
    return any(each.get("reason") == "Unschedulable" for each in status.get("conditions", ())) or bool(
        {"ErrImagePull", "ImagePullBackOff"} & set(waits)
    )


def runs(pod: dict[str, Any]) -> bool:
    """Return whether all containers of a pod run."""
    found = pod["status"].get("containerStatuses") or ()
    return bool(found) and all("running" in each["state"] for each in found)


@pytest.mark.parametrize(
    "kind", ["image", *(pytest.param(each, marks=pytest.mark.thorough) for each in list(RIGHT)[1:])]
)
def test_a_job_starts_once_its_mistake_is_corrected(start: Start, kind: str) -> None:
    """No suspend, no deleted pod: the pods that never ran are made again."""
    running = start(epochs=None, edit=lambda manifest: wrong(manifest, kind))
    stuck = wait_for(
        lambda: [pod["metadata"]["uid"] for pod in running.job.pods() if is_stuck(pod)],
        "a worker that cannot start", timeout_s=60,
    )  # fmt: skip
    began_s = time.monotonic()
    path, value = RIGHT[kind]
    more = [{"op": "replace", "path": "/spec/workerPools/0/resources/requests/cpu", "value": "100m"}]
    change(running, {"op": "replace", "path": path, "value": value}, *(more if kind == "requests" else []))
    wait_for(
        lambda: any(runs(pod) and pod["metadata"]["uid"] not in stuck for pod in running.job.pods()),
        "a worker that runs", timeout_s=60, every_s=0.2,
    )  # fmt: skip
    print(f"{kind}: runs {time.monotonic() - began_s:.1f} s after the correction")
    running.wait_steps(1)
    print(f"{kind}: trains {time.monotonic() - began_s:.1f} s after the correction")
    assert running.job.status()["disruptions"] == running.job.status()["restarts"] == 0
    running.job.wait_true("TemplateApplied", timeout_s=60)
    running.stop()


@pytest.mark.thorough
def test_a_failed_job_ends_with_the_weights_of_an_undisturbed_one_after_retry(start: Start) -> None:
    """Three epochs; the evaluation of the second one fails, and works when the job is tried again."""
    options = {
        "epochs": 3, "paces_s": {}, "epoch_samples": 560, "training_script": FLAWED,
        "spec": {"backoffLimit": 0, "checkpoint": {"uri": "file:///checkpoints", "intervalSeconds": 1}},
    }  # fmt: skip
    whole = start("whole", **options)
    broken = start("broken", edit=lambda manifest: flaw(folder_of(manifest)), **options)
    broken.job.wait_true("Failed", timeout_s=240)
    said = broken.job.condition("Failed")["message"]
    assert "`heterotrain retry broken`" in said
    assert f"broken-{broken.job.uid()}" in said
    failed_at, began_s = broken.steps(), time.monotonic()
    flaw(broken.folder, there=False)
    assert "is tried again, from step" in cli(broken.job.cluster, "retry", "broken")
    wait_for(lambda: not broken.job.is_true("Failed"), "another try", timeout_s=60)
    broken.wait_steps(failed_at + 1)
    print(f"retry: trains {time.monotonic() - began_s:.1f} s later, after step {failed_at}")
    whole.wait_succeeded()
    broken.wait_succeeded()
    assert broken.job.status()["restarts"] == 0
    weights = [read_weights(str(own_folder(each))).state for each in (whole, broken)]
    apart = max(float((weights[0][name] - weights[1][name]).abs().max()) for name in weights[0])
    print(f"weights differ by {apart:.2g}")
    assert apart < 1e-10


def folder_of(manifest: dict[str, Any]) -> Path:
    return Path(manifest["spec"]["template"]["spec"]["volumes"][1]["hostPath"]["path"])


def flaw(folder: Path, *, there: bool = True) -> None:
    """Make the evaluation of the job with this folder fail, or work."""
    if there:
        (folder / "flaw").touch()
    else:
        (folder / "flaw").unlink()


def own_folder(running: Running) -> Path:
    """Return the folder of the job's checkpoints on the host."""
    (found,) = running.folder.glob(f"*-{running.job.name}-{running.job.uid()}")
    return Path(found)


@pytest.mark.thorough
def test_a_job_created_again_continues_where_it_was(start: Start) -> None:
    """As by ``kubectl replace --force``, a GitOps tool, or a restore from a backup."""
    checkpoint = {"uri": "file:///checkpoints", "intervalSeconds": 1, "resumeFrom": "job"}
    running = start(epochs=None, spec={"checkpoint": checkpoint})
    running.wait_steps(10)
    wait_for(lambda: "lastCheckpoint" in running.job.status(), "a checkpoint", timeout_s=90)
    body, saved = running.job.read(), running.job.status()["lastCheckpoint"]["step"]
    cluster = running.job.cluster
    cluster.kubectl("delete", keys.PLURAL, "job", "--timeout=600s", timeout_s=620)
    del body["status"]
    body["metadata"] = {"name": "job", "namespace": cluster.namespace}
    cluster.apply(body)
    found = wait_for(lambda: running.job.status().get("continuedFrom"), "where it continued", timeout_s=180)
    print(f"continued from step {found['step']}; the status had {saved}")
    assert found["source"] == "job"
    assert found["step"] >= saved
    running.stop()
