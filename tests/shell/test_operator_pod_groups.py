"""Pod groups of jobs for schedulers that place all workers or none."""

from __future__ import annotations

import json
from typing import Any

from heterotrain_operator.cluster_state.parse import parse_job
from heterotrain_operator.engine.app import App
from heterotrain_operator.kube.errors import NotFound
from support.fake_cluster import FakeCluster, pool
from support.fakes import FakeKube
from support.operator_app import KEY, an_app, failing


def a_grouped_job(**spec: Any) -> FakeCluster:
    return FakeCluster(pool("a", maxReplicas=4), spec={"podGroup": {"scheduler": "Volcano"}, **spec}).with_nodes("a")


def change_spec(app: App, cluster: FakeCluster, generation: int, **spec: Any) -> None:
    """Change the spec as a user would, and deliver it."""
    cluster.job["spec"].update(spec)
    cluster.job["metadata"] |= {"generation": generation, "resourceVersion": f"{generation}000"}
    app.store.jobs.put(parse_job(cluster.job))


async def test_a_job_s_group_follows_its_minimum_and_goes_when_the_job_is_suspended() -> None:
    """It is deleted once; a group of somebody else is left alone."""
    kube, cluster = FakeKube(), a_grouped_job()
    app = an_app(kube, cluster)
    await app.reconciler.run_once(KEY)
    assert kube.objects["podgroups", "ns", "job-workers"]["spec"] == {"minMember": 1}
    change_spec(app, cluster, 2, elasticPolicy={"minReplicas": 2})
    await app.reconciler.run_once(KEY)
    assert kube.objects["podgroups", "ns", "job-workers"]["spec"] == {"minMember": 2}
    change_spec(app, cluster, 3, suspend=True)
    await app.reconciler.run_once(KEY)
    assert ("podgroups", "ns", "job-workers") not in kube.objects
    kube.calls.clear()
    await app.reconciler.run_once(KEY)
    assert not [call for call in kube.calls if call[1] == "podgroups"]


async def test_a_group_of_the_same_name_that_is_not_the_job_s_is_left_alone() -> None:
    kube, cluster = FakeKube(), a_grouped_job(suspend=True)
    theirs = {"kind": "PodGroup", "metadata": {"name": "job-workers", "namespace": "ns", "uid": "theirs"}}
    kube.objects["podgroups", "ns", "job-workers"] = theirs
    app = an_app(kube, cluster)
    await app.reconciler.run_once(KEY)
    assert kube.objects["podgroups", "ns", "job-workers"] == theirs


async def test_a_cluster_without_pod_groups_is_one_sentence_in_the_status() -> None:
    """And it is asked again after a pause, not in each pass."""
    kube = FakeKube()
    kube.fail = failing("apply", "podgroups", NotFound("404 page not found"))
    app = an_app(kube, a_grouped_job())
    for _ in range(3):
        await app.reconciler.run_once(KEY)
    status = json.dumps(kube.objects["heterotrainjobs", "ns", "job"]["status"])
    assert "the cluster has no PodGroups of scheduling.volcano.sh/v1beta1: install the scheduler" in status
    assert len([call for call in kube.calls if call[:2] == ("apply", "podgroups")]) == 1
