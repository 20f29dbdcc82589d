"""Pools with pods of their own: images, variables, volumes and schedulers, merged into the job's template."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from heterotrain_operator.cluster_state.parse import parse_job
from heterotrain_operator.cluster_state.views import ValidJob
from heterotrain_operator.decide.objects.pods import build_pod, problem_of_templates, selector_keys, template_of
from heterotrain_operator.decide.objects.pool_template import merged
from support.fake_cluster import Body, FakeCluster, job_body, pool

TEMPLATE: Body = {
    "metadata": {"labels": {"team": "vision"}},
    "spec": {
        "containers": [
            {
                "name": "trainer",
                "image": "train:cu13",
                "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}],
            },
            {"name": "sidecar", "image": "side"},
        ],
        "volumes": [{"name": "data", "emptyDir": {}}],
        "tolerations": [{"key": "x", "operator": "Exists"}],
    },
}
ROCM: Body = {
    "metadata": {"labels": {"maker": "amd"}},
    "spec": {
        "runtimeClassName": "amd",
        "schedulerName": "other",
        "nodeSelector": {"maker": "amd"},
        "containers": [
            {
                "name": "trainer",
                "image": "train:rocm",
                "env": [{"name": "B", "value": "3"}, {"name": "C", "value": "4"}],
                "resources": {"limits": {"amd.com/gpu": 2}},
            }
        ],
        "volumes": [{"name": "data", "emptyDir": {"medium": "Memory"}}, {"name": "more", "emptyDir": {}}],
        "tolerations": [{"key": "y", "operator": "Exists"}],
    },
}


def a_job(patch: Body) -> ValidJob:
    """Return a job with two pools, the second with a patch."""
    body = job_body(pool("nvidia"), pool("amd", template=patch), template=copy.deepcopy(TEMPLATE))
    job = parse_job(body)
    assert isinstance(job, ValidJob), job.problem
    return job


def pods_of(job: ValidJob) -> dict[str, Body]:
    return {each.name: build_pod(job, each, 0, plan_version="") for each in job.spec.worker_pools}


def test_one_job_has_images_of_two_makers() -> None:
    pods = pods_of(a_job(ROCM))
    nvidia, amd = pods["nvidia"]["spec"], pods["amd"]["spec"]
    assert [each["image"] for each in nvidia["containers"]] == ["train:cu13", "side"]
    assert [each["image"] for each in amd["containers"]] == ["train:rocm", "side"]
    values = {each["name"]: each.get("value") for each in amd["containers"][0]["env"]}
    assert (values["A"], values["B"], values["C"]) == ("1", "3", "4")
    assert (amd["runtimeClassName"], amd["schedulerName"]) == ("amd", "other")
    assert "runtimeClassName" not in nvidia
    assert {each["name"]: each.get("emptyDir") for each in amd["volumes"]}["data"] == {"medium": "Memory"}
    assert "more" in {each["name"] for each in amd["volumes"]}
    assert {each["key"] for each in amd["tolerations"]} >= {"y"}, "a list without keys replaces the template's"
    assert "x" not in {each["key"] for each in amd["tolerations"]}
    assert pods["amd"]["metadata"]["labels"].items() >= {"team": "vision", "maker": "amd"}.items()


def test_the_patch_decides_ranks_and_the_labels_by_which_the_job_selects() -> None:
    job = a_job(ROCM)
    ports = [p["name"] for p in pods_of(job)["amd"]["spec"]["containers"][0]["ports"]]
    assert len(ports) == 2, "two accelerators are two ranks"
    assert selector_keys(job) == {"pool", "maker"}


def test_neither_template_nor_patch_is_changed() -> None:
    job = a_job(ROCM)
    before = copy.deepcopy((job.template, job.patches))
    pods_of(job)
    assert (job.template, job.patches) == before
    assert template_of(job, job.spec.worker_pools[0]) is job.template


@pytest.mark.parametrize(
    ("patch", "part"),
    [
        ({"spec": {"containers": [{"name": "trainer", "readinessProbe": {}}]}}, "has a readinessProbe"),
        ({"spec": {"nodeName": "n"}}, "nodeName"),
        ({"metadata": {"annotations": {"kubectl.kubernetes.io/default-container": "none"}}}, "names 'none'"),
    ],
)
def test_what_is_unusable_is_reported_with_the_name_of_the_pool(patch: Body, part: str) -> None:
    job = a_job(patch)
    problem = problem_of_templates(job.template, job.spec, job.patches)
    assert problem.startswith("pool amd: ")
    assert part in problem


@pytest.mark.parametrize(
    "spec",
    [
        {"nodeSelector": 7},
        {"nodeSelector": "maker=amd"},
        {"tolerations": {"key": "x"}},
        {"tolerations": ["x"]},
        {"overhead": "much"},
        {"terminationGracePeriodSeconds": "half a minute"},
        {"initContainers": 7},
        {"initContainers": [{"image": "x"}]},
        {"containers": [{"name": "trainer", "resources": "2 GPUs"}]},
        {"containers": [{"name": "trainer", "resources": {"limits": {"amd.com/gpu": "two"}}}]},
        {"containers": [{"name": "trainer", "ports": [8080]}]},
        {"containers": [{"name": "trainer", "volumeMounts": "/data"}]},
    ],
)
def test_a_malformed_patch_is_a_problem_of_its_job_and_never_of_others(spec: Body) -> None:
    """A node's event asks all jobs for the labels by which they select: no job may raise there."""
    job = parse_job(job_body(pool("amd", template={"spec": spec}), template=copy.deepcopy(TEMPLATE)))
    assert selector_keys(job) == frozenset()
    assert job.problem.startswith("spec.workerPools[0].template.spec")


def test_a_volume_or_variable_of_another_kind_replaces_that_of_the_template() -> None:
    """Merged field by field, it would have two sources, and the API server would refuse the pod."""
    variable = {"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
    volume = {"name": "data", "hostPath": {"path": "/data"}}
    job = a_job({"spec": {"volumes": [volume], "containers": [{"name": "trainer", "env": [variable]}]}})
    spec = pods_of(job)["amd"]["spec"]
    assert volume in spec["volumes"]
    assert variable in spec["containers"][0]["env"]


def test_a_patch_of_odd_shapes_is_a_problem_of_its_pod_and_no_exception() -> None:
    odd: list[Any] = ["text", 3, [], [1], {"name": "trainer"}, None]
    for value in odd:
        assert isinstance(merged(TEMPLATE, {"spec": {"initContainers": value, "affinity": value}}), dict)


def test_a_job_with_a_patched_pool_gets_its_workers() -> None:
    cluster = FakeCluster(pool("a"), pool("b", template={"spec": {"priorityClassName": "low"}})).with_nodes("a", "b")
    cluster.start()
    classes = {body["spec"]["nodeName"]: body["spec"].get("priorityClassName") for body in cluster.pods.values()}
    assert classes == {"a": None, "b": "low"}
