"""The Python client in threads on a real API server, with an operator process, while the event loop goes on.

The test acts as the kubelet, and as Prometheus where a value comes from a scrape.
"""

from __future__ import annotations

import asyncio
from asyncio import to_thread
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from heterotrain_cli.cluster import checkpoint, submit
from heterotrain_client import HeteroTrainClient, InputError, JobFailedError, TrainingJob, UnavailableError
from heterotrain_client.manifest import CONTAINER
from heterotrain_core.contract.outcome import Ending
from heterotrain_operator.cluster_state.parse import rfc3339
from heterotrain_operator.kube.errors import Conflict
from heterotrain_operator.kube.resources import CONFIG_MAPS, JOBS, PODS
from support.api_cluster import Cluster, Operator
from support.waiting import until

NAME = "my-training"
IMAGE = "image.invalid/none:1"
SCRIPT = "print('trains')\n"


@pytest.fixture
def client(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> HeteroTrainClient:
    """A client of the test's namespace, by the kubeconfig of the environment."""
    monkeypatch.setattr(submit, "LOOK_S", 0.1)
    monkeypatch.setattr(checkpoint, "LOOK_S", 0.1)
    cluster.container = CONTAINER
    return HeteroTrainClient(namespace=cluster.namespace)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "my_training.py"
    path.write_text(SCRIPT, encoding="utf-8")
    return path


def pools(cluster: Cluster, *names: str) -> dict[str, Mapping[str, Any]]:
    """Return pools on the test's nodes, as the client takes them."""
    bodies = {name: cluster.pool(name) for name in names}
    return {name: {key: value for key, value in body.items() if key != "name"} for name, body in bodies.items()}


async def state_is(job: TrainingJob, wanted: str) -> None:
    async def probe() -> bool:
        return (await to_thread(job.status)).state == wanted

    await until(probe, f"state {wanted} of {job.name}")


async def test_a_job_from_a_script_to_its_end(
    client: HeteroTrainClient, cluster: Cluster, operator: Operator, script: Path
) -> None:
    """Two jobs are waited for at the same time, and both are changed meanwhile; one succeeds, and one fails."""
    for name in ("a", "b", "c"):
        await cluster.add_node(name)
    settings: dict[str, Any] = {"image": IMAGE, "global_batch_size": 100}
    job, other = await asyncio.gather(
        to_thread(client.train, script, pools=pools(cluster, "a", "b"), checkpoint="s3://bucket/x", **settings),
        to_thread(client.train, script, pools=pools(cluster, "c"), name="other", spec={"backoffLimit": 0}, **settings),
    )
    assert sorted(each.name for each in await to_thread(client.jobs)) == [NAME, "other"]
    waits = [asyncio.create_task(to_thread(each.wait, timeout_s=400, progress=False)) for each in (job, other)]
    config = await cluster.kube.get(CONFIG_MAPS, cluster.namespace, f"{NAME}-script")
    assert config["data"] == {"my_training.py": SCRIPT}
    assert config["metadata"]["ownerReferences"][0]["uid"] == (await to_thread(job.body))["metadata"]["uid"]
    first = await cluster.started(2, NAME)
    (lost,) = await cluster.started(1, "other")
    await state_is(job, "Running")

    await check_checkpoint(cluster, job)
    await check_suspension(cluster, job, first)

    async def announced() -> bool:  # events follow the status
        return "TrainingStarted" in {each["reason"] for each in await to_thread(job.events)}

    await until(announced, "the event of the start")
    assert not any(task.done() for task in waits)
    await cluster.end(lost, Ending.FAILED, reason="no data")
    with pytest.raises(JobFailedError, match=r"job other: Failed\. .*no data"):
        await waits[1]
    (last,) = [name for name, pod in (await cluster.pods(NAME)).items() if pod["status"]["phase"] == "Running"]
    await cluster.end(last, Ending.FINISHED, reason="every epoch is committed")
    assert (await waits[0]).state == "Succeeded"
    assert (await to_thread(job.metrics))["step"].tolist()[-1] == 2
    await check_end(client, cluster, job)


async def check_checkpoint(cluster: Cluster, job: TrainingJob) -> None:
    """Ask for a checkpoint: the plan has the request until the status has a newer checkpoint."""
    asked = asyncio.create_task(to_thread(job.checkpoint, timeout_s=120))

    async def requested() -> bool:
        return bool((await cluster.plan(NAME)).get("checkpoint_request"))

    await until(requested, "the request in the plan")

    async def reported() -> bool:
        patch = {"status": {"lastCheckpoint": {"step": 7, "time": rfc3339(1_800_000_000)}}}
        try:
            await cluster.kube.merge(JOBS, cluster.namespace, NAME, patch, subresource="status")
        except Conflict:
            return False
        return True

    await until(reported, "a checkpoint in the status")
    assert (await asked).step == 7

    async def taken_back() -> bool:
        return not (await to_thread(job.body))["metadata"].get("annotations")

    await until(taken_back, "the request is taken back")


async def check_suspension(cluster: Cluster, job: TrainingJob, workers: list[str]) -> None:
    """Suspend the job, make it smaller and resume it: it trains with one worker."""
    await to_thread(job.suspend)

    async def gone() -> bool:
        await cluster.confirm_deletions()
        return not await cluster.pods(NAME)

    await until(gone, f"{workers} are deleted")
    await state_is(job, "Suspended")
    await to_thread(job.scale, 1, pools={"b": 0})
    spec = (await to_thread(job.body))["spec"]
    assert spec["elasticPolicy"]["maxReplicas"] == 1
    assert [pool["maxReplicas"] for pool in spec["workerPools"]] == [1, 0]
    await to_thread(job.resume)
    await cluster.started(1, NAME)
    await state_is(job, "Running")


async def check_end(client: HeteroTrainClient, cluster: Cluster, job: TrainingJob) -> None:
    """Check what the API server and the client say of a job that has ended, and of one that is deleted."""
    for change in (job.suspend, job.resume, lambda: job.scale(2)):
        with pytest.raises(InputError, match=r"job my-training has ended \(Succeeded\)"):
            await to_thread(change)
    await to_thread(job.delete)
    with pytest.raises(InputError, match="there is no job my-training"):
        await to_thread(client.job, NAME)
    with pytest.raises(InputError, match="there is no job my-training"):
        await to_thread(job.status)
    assert [each.name for each in await to_thread(client.jobs)] == ["other"]


async def test_the_api_server_s_refusals_are_one_sentence(
    client: HeteroTrainClient, cluster: Cluster, script: Path
) -> None:
    """A name that is taken, a value that only the API server refuses, and a pod without a kubelet."""
    settings: dict[str, Any] = {"pools": pools(cluster, "a"), "image": IMAGE, "global_batch_size": 100}
    job = await to_thread(client.train, script, **settings)
    with pytest.raises(InputError, match="job my-training exists already"):
        await to_thread(client.train, script, **settings)
    with pytest.raises(InputError, match="its pools hold at most 1 in all"):
        await to_thread(job.scale, 2)
    with pytest.raises(InputError) as refused:
        await to_thread(job.scale, pools={"a": 10**9})
    assert "maxReplicas" in str(refused.value)
    node = await cluster.add_node("a")
    labels = {"heterotrain.dev/job": NAME}
    pod = {
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": f"{NAME}-w0", "namespace": cluster.namespace, "labels": labels},
        "spec": {"containers": [{"name": CONTAINER, "image": IMAGE}], "nodeName": node},
    }  # fmt: skip
    await cluster.kube.create(PODS, pod)
    await cluster.run(f"{NAME}-w0")
    with pytest.raises(UnavailableError, match="the API server failed"):
        await to_thread(list, job.logs())
