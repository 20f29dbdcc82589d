"""``heterotrain preflight JOB`` on a real API server, with an operator process; the test acts as the kubelet."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from heterotrain_cli.cluster.api import Cluster as Api
from heterotrain_cli.cluster.target import Target
from heterotrain_cli.job_file import read_job_file
from heterotrain_cli.preflight import FAILED, checking_job
from heterotrain_core.contract.outcome import Ending
from heterotrain_operator.kube.errors import NotFound
from heterotrain_operator.kube.resources import JOBS, Resource
from lab.cluster import REPOSITORY
from support.api_cluster import Cluster, Operator
from support.waiting import until

EXAMPLES = sorted((REPOSITORY / "deploy/examples").glob("*/job*.yaml"))
GUIDE = REPOSITORY / "deploy/examples/language-model/job-s3.yaml"
CHECKS = "language-model-preflight"
RANKS_PER_WORKER = 8
ACCOUNTS = Resource("v1", "serviceaccounts")


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: f"{path.parent.name} {path.stem}")
async def test_the_api_server_accepts_each_example_and_the_job_that_checks_its_workers(
    cluster: Cluster, example: Path
) -> None:
    job, api = read_job_file(str(example)), Api(Target(namespace=cluster.namespace))
    for body in (job.body, checking_job(job, None)):
        body["metadata"]["namespace"] = cluster.namespace
        await asyncio.to_thread(api.create, body, dry_run=True)


def guide_on(cluster: Cluster, path: Path) -> None:
    """Write the guide's job with its pools on the test's nodes, which have no GPUs."""
    body = yaml.safe_load(GUIDE.read_text())
    kept = ("name", "maxReplicas", "capacityType", "pricePerHour")
    pools = [{key: pool[key] for key in kept if key in pool} for pool in body["spec"]["workerPools"]]
    body["spec"]["workerPools"] = [cluster.pool(numProcPerWorker=RANKS_PER_WORKER, **pool) for pool in pools]
    path.write_text(yaml.safe_dump(body))


@pytest.mark.parametrize("ending", [Ending.FINISHED, Ending.FAILED])
async def test_the_checks_run_on_16_ranks_in_the_guide_s_pools_and_leave_no_job(
    cluster: Cluster, operator: Operator, tmp_path: Path, ending: Ending
) -> None:
    """Two pods get the checks in place of the training, with the job's account and its folder of checkpoints."""
    cluster.container = "trainer"
    path = tmp_path / "job.yaml"
    guide_on(cluster, path)
    for pool in ("a100", "t4-spot"):
        await cluster.add_node(pool)
    account = {"name": "training", "namespace": cluster.namespace}
    await cluster.kube.create(ACCOUNTS, {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": account})
    command = ["preflight", str(path), "--namespace", cluster.namespace, "--output", "json"]
    main = "from heterotrain_cli.entry import main; main()"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", main, *command, stdout=asyncio.subprocess.PIPE
    )  # fmt: skip
    try:
        names = await cluster.started(2, CHECKS)
        assert len(await cluster.members(CHECKS)) == 2 * RANKS_PER_WORKER
        for pod in (await cluster.pods(CHECKS)).values():
            (container,) = pod["spec"]["containers"]
            checks = ["-m", "heterotrain.preflight", "--store", "s3://bucket/language-model"]
            assert container["command"] == ["heterotrain-run", *checks]
            assert pod["spec"]["serviceAccountName"] == "training"
        for name in names:
            await cluster.end(name, ending, reason="the checks have ended")
        said, _ = await asyncio.wait_for(process.communicate(), 120)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    found: dict[str, Any] = json.loads(said)
    passed = ending is Ending.FINISHED
    assert (process.returncode, found["passed"], found["job"]) == (0 if passed else FAILED, passed, CHECKS)

    async def deleted() -> bool:
        try:
            await cluster.kube.get(JOBS, cluster.namespace, CHECKS)
        except NotFound:
            return True
        return False

    await until(deleted, "the job of the checks is deleted")
