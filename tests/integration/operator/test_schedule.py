"""The guide's schedule on a real API server: what its CronJobs' pods run suspends and resumes the job, and no more.

No kubelet runs the pods here. The test runs their commands, with a token of their service account.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import yaml
from heterotrain_operator.kube.resources import JOBS
from lab.cluster import REPOSITORY, ClusterError
from lab.cluster import Cluster as Commands
from support.api_cluster import Cluster, Operator
from support.waiting import until

pytestmark = pytest.mark.needs_program("kubectl")

SCHEDULE = REPOSITORY / "deploy/examples/language-model/schedule.yaml"
JOB = "language-model"
NOWHERE = {"spec": {"template": {"spec": {"nodeSelector": {"ht-test": "nowhere"}}}}}


class Scheduled:
    """The objects of the guide's schedule in the test's namespace."""

    def __init__(self, namespace: str, folder: Path) -> None:
        self._admin = Commands(namespace=namespace)
        self._folder = folder
        self._admin.kubectl("apply", "--server-side", "--validate=strict", "-f", str(SCHEDULE))

    async def fire(self, name: str) -> None:
        """Make the Job of a CronJob, wait for its pod, and run the pod's command as the pod would."""
        body = json.loads(
            self._admin.kubectl("create", "job", f"--from=cronjob/{name}", name, "--dry-run=client", "-o", "json")
        )
        body["spec"]["template"]["spec"] |= NOWHERE["spec"]["template"]["spec"]
        self._admin.apply(body)
        (pod,) = await until(lambda: self._admin.list("pods", f"batch.kubernetes.io/job-name={name}"), f"pod of {name}")
        (container,) = pod["spec"]["containers"]
        self.account(pod["spec"]["serviceAccountName"]).run(*container["command"])

    def account(self, name: str) -> Commands:
        """Return commands with the rights of a service account, as in its pods: by a token, in its namespace."""
        admin = self._admin
        config = yaml.safe_load(admin.kubectl("config", "view", "--raw", "--minify", "--flatten", "-o", "yaml"))
        cluster = config["clusters"][0]["cluster"]
        context = {"cluster": "here", "user": "account", "namespace": admin.namespace}
        path = self._folder / f"{name}.kubeconfig"
        text = yaml.safe_dump(
            {
                "apiVersion": "v1", "kind": "Config", "current-context": "pod",
                "clusters": [{"name": "here", "cluster": cluster}],
                "contexts": [{"name": "pod", "context": context}],
                "users": [{"name": "account", "user": {"token": admin.kubectl("create", "token", name).strip()}}],
            }
        )  # fmt: skip
        path.write_text(text)
        return Commands(environment=dict(os.environ) | {"KUBECONFIG": str(path)}, namespace=admin.namespace)


async def test_the_cron_jobs_suspend_and_resume_the_job_and_may_do_nothing_else(
    cluster: Cluster, operator: Operator, tmp_path: Path
) -> None:
    await cluster.add_node("a")
    await cluster.add_node("b")
    await cluster.create(cluster.job(cluster.pool("a"), name=JOB))
    await cluster.create(cluster.job(cluster.pool("b"), name="other"))
    await cluster.started(1, JOB)
    scheduled = Scheduled(cluster.namespace, tmp_path)
    await scheduled.fire("training-suspend")

    async def suspended() -> bool:
        await cluster.confirm_deletions()
        return not await cluster.pods(JOB) and (await cluster.status(JOB)).get("state") == "Suspended"

    await until(suspended, "the job is suspended and holds no node")
    await scheduled.fire("training-resume")
    await cluster.started(1, JOB)
    assert (await cluster.kube.get(JOBS, cluster.namespace, JOB))["spec"]["suspend"] is False

    account = scheduled.account("training-schedule")
    assert may(account, "patch", f"heterotrainjobs/{JOB}")
    for verb, what in (
        ("patch", "heterotrainjobs/other"), ("delete", f"heterotrainjobs/{JOB}"), ("list", "heterotrainjobs"),
        ("create", "heterotrainjobs"), ("create", "pods"), ("get", "secrets"), ("patch", "cronjobs"),
    ):  # fmt: skip
        assert not may(account, verb, what), (verb, what)
    with pytest.raises(ClusterError, match="forbidden"):
        account.kubectl("patch", "htj", "other", "--type=merge", '--patch={"spec":{"suspend":true}}')
    assert not (await cluster.kube.get(JOBS, cluster.namespace, "other"))["spec"].get("suspend")


def may(account: Commands, verb: str, what: str) -> bool:
    """Return what the API server says of a right."""
    try:
        return account.kubectl("auth", "can-i", verb, what).strip() == "yes"
    except ClusterError as error:
        if not str(error).endswith("no"):
            raise
        return False
