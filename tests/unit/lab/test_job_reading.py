"""A job of the end-to-end tests is read without kubectl; what is not there is told apart from no answer."""

from __future__ import annotations

from pathlib import Path

import pytest
from heterotrain.data.sample_log import SampleLog
from heterotrain_cli.cluster import api
from heterotrain_core.contract import keys
from heterotrain_core.contract.codec import encode_plan
from lab.cluster import Cluster, ClusterError
from lab.jobs import Job, committed_steps
from support.api_stub import ApiStub, serve
from support.plans import plan_of

JOBS = f"/apis/{keys.GROUP}/{keys.VERSION}/namespaces/tests/{keys.PLURAL}"
CORE = "/api/v1/namespaces/tests"


def test_job_plan_and_pods_are_read(tmp_path: Path) -> None:
    """Before its first plan a job has none, and a job that does not exist is an error."""
    stub = ApiStub(objects={f"{JOBS}/digits": {"metadata": {"uid": "j"}, "status": {"epoch": 3}}})
    stub.lists[f"{CORE}/pods"] = [{"metadata": {"name": "digits-w0"}}]
    with serve(stub, tmp_path) as kubeconfig:
        job = Job(Cluster(environment={"KUBECONFIG": str(kubeconfig)}, namespace="tests"), "digits")
        assert job.status() == {"epoch": 3}
        assert [pod["metadata"]["name"] for pod in job.pods()] == ["digits-w0"]
        assert job.plan() is None
        plan = plan_of((3, 5))
        stub.objects[f"{CORE}/configmaps/{keys.plan_name('digits')}"] = {"data": {keys.PLAN_KEY: encode_plan(plan)}}
        assert job.plan() == plan
        with pytest.raises(ClusterError, match="there is no job other"):
            Job(job.cluster, "other").read()


def test_a_server_that_fails_is_not_a_job_without_a_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits take this error for "not yet"; an assertion does not pass by it."""
    monkeypatch.setattr(api, "RETRY_S", 0.0)
    path = f"{CORE}/configmaps/{keys.plan_name('digits')}"
    stub = ApiStub(refusals={("GET", path): [(503, "starting")] * api.READ_TRIES})
    with serve(stub, tmp_path) as kubeconfig:
        job = Job(Cluster(environment={"KUBECONFIG": str(kubeconfig)}, namespace="tests"), "digits")
        with pytest.raises(ClusterError, match="starting"):
            job.plan()
        assert job.plan() is None


def test_steps_are_counted_once_and_without_a_line_that_is_still_being_written(tmp_path: Path) -> None:
    for rank in range(2):
        log = SampleLog(str(tmp_path), name=f"rank-{rank}")
        for step in range(10, 22):
            log.write({"rank": rank, "step": step, "samples": [step, 1]})
    with (tmp_path / "rank-0.jsonl").open("a") as file:
        file.write('{"rank":0,"step":2')  # of 22
    assert committed_steps(tmp_path) == 12
