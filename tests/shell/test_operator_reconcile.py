"""Passes over jobs with a fake API server: the order of writes, recovery after a crash, and errors."""

from __future__ import annotations

import asyncio
import base64
import copy
import json
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any

import kopf
import pytest
from heterotrain_core.contract import keys
from heterotrain_core.contract.outcome import Ending
from heterotrain_core.layout.problem import UnitProfile, UnitSeconds
from heterotrain_operator.api.status import as_body
from heterotrain_operator.cluster_state.parse import (
    MOST_PLAN_CHARACTERS,
    RANKS_ANNOTATION,
    parse_job,
    parse_node,
    rfc3339,
)
from heterotrain_operator.cluster_state.profiles import PoolProfile
from heterotrain_operator.cluster_state.store import Store
from heterotrain_operator.cluster_state.telemetry import Telemetry
from heterotrain_operator.cluster_state.views import JobKey, ValidJob
from heterotrain_operator.decide import job as job_module
from heterotrain_operator.decide.grants.grant import UNLIMITED
from heterotrain_operator.decide.inputs import JobInputs
from heterotrain_operator.decide.job import Decision
from heterotrain_operator.decide.objects.objects import build_service
from heterotrain_operator.decide.plan.revision_budget import BURST, INTERVAL_S
from heterotrain_operator.engine import reconcile
from heterotrain_operator.engine.act import FIRST_BATCH
from heterotrain_operator.engine.app import STUCK_S, App
from heterotrain_operator.engine.clocks import Clocks
from heterotrain_operator.engine.queue import LONGEST_BACKOFF_S
from heterotrain_operator.engine.reconcile import PLANNING_PART, RELEARN_S
from heterotrain_operator.engine.resync import relist
from heterotrain_operator.handlers import register
from heterotrain_operator.kube.errors import Conflict, KubeError, NotFound, Rejected, Unavailable
from heterotrain_operator.kube.resources import PODS, Resource
from heterotrain_operator.settings import Settings
from support.fake_cluster import JOB_UID, NOW_S, FakeCluster, a_running_job, job_body, node_body, pool
from support.fakes import Body, FakeKube

KEY = JobKey("ns", "job")


def an_app(kube: FakeKube, cluster: FakeCluster | None = None, clocks: Clocks | None = None, **settings: Any) -> App:
    """Return an operator that has listed a cluster."""
    app = without_competition(kube, status_interval_s=0.0, clocks=clocks, **settings)
    cluster = cluster or FakeCluster().with_nodes("a", "b", "c")
    for body in cluster.nodes.values():
        app.store.nodes.put(parse_node(body))
    kube.objects["heterotrainjobs", "ns", "job"] = cluster.job
    app.store.jobs.put(parse_job(cluster.job))
    return app


def without_competition(
    kube: FakeKube, *, status_interval_s: float, clocks: Clocks | None = None, **settings: Any
) -> App:
    """Return an operator whose jobs need not wait for an allocation."""
    app = App(kube, Settings(leader_election=False, status_interval_s=status_interval_s, **settings), clocks=clocks)
    app.reconciler._sources = replace(app.reconciler._sources, grant_of=lambda _: UNLIMITED)
    return app


def failing(verb: str, plural: str, error: KubeError) -> Callable[[str, str, str], KubeError | None]:
    return lambda v, p, _: error if (v, p) == (verb, plural) else None


async def test_objects_that_pods_need_are_written_before_them_and_the_status_after_them() -> None:
    kube = FakeKube()
    await an_app(kube).reconciler.run_once(KEY)
    assert [(verb, plural) for verb, plural, _ in kube.writes] == [
        ("apply", "services"),
        ("apply", "poddisruptionbudgets"),
        ("create", "configmaps"),
        ("create", "secrets"),
        ("create", "pods"),
        ("create", "pods"),
        ("create", "pods"),
        ("merge status", "heterotrainjobs"),
    ]


async def test_the_operator_s_own_writes_count_before_their_watch_events() -> None:
    """The API's answers are stored: the second pass only counts the new pods, and the third one does nothing."""
    kube = FakeKube()
    app = an_app(kube)
    await app.reconciler.run_once(KEY)
    kube.calls.clear()
    await app.reconciler.run_once(KEY)
    assert [call[0] for call in kube.writes] == ["merge status"]
    await app.reconciler.run_once(KEY)
    assert len(kube.writes) == 1


@pytest.mark.parametrize("crash_after", range(9))
async def test_the_next_operator_recovers_from_a_crash_after_any_write(crash_after: int) -> None:
    kube = FakeKube()

    class Crash(BaseException):
        pass

    def fail(*_: str) -> None:
        if len(kube.writes) > crash_after:
            raise Crash

    kube.fail = fail
    with pytest.raises(Crash) if crash_after < 8 else nullcontext():
        await an_app(kube).reconciler.run_once(KEY)
    kube.fail = lambda *_: None
    successor = without_competition(kube, status_interval_s=0.0)
    for name in ("a", "b", "c"):
        kube.objects["nodes", "", name] = node_body(name, name)
    for _ in range(3):
        await relist(kube, successor.store)
        await successor.reconciler.run_once(KEY)
    assert sorted(name for plural, _, name in kube.objects if plural == "pods") == ["job-w0", "job-w1", "job-w2"]
    assert ("configmaps", "ns", "job-plan") in kube.objects


async def test_a_job_has_one_secret_for_its_whole_life() -> None:
    """A second operator finds it and leaves it alone; nothing else shows its value."""
    kube = FakeKube()
    await an_app(kube).reconciler.run_once(KEY)
    made = copy.deepcopy(kube.objects["secrets", "ns", "job-secret"])
    assert made["immutable"]
    assert len(base64.b64decode(made["data"][keys.SECRET_KEY])) == keys.SECRET_BYTES
    assert [owner["uid"] for owner in made["metadata"]["ownerReferences"]] == [JOB_UID]
    for name in ("job-w0", "job-w1", "job-w2"):
        del kube.objects["pods", "ns", name]
    successor = an_app(kube)
    await relist(kube, successor.store)
    await successor.reconciler.run_once(KEY)
    assert ("pods", "ns", "job-w0") in kube.objects
    assert kube.objects["secrets", "ns", "job-secret"] == made
    others = [body for (plural, _, _), body in kube.objects.items() if plural != "secrets"]
    assert made["data"][keys.SECRET_KEY] not in json.dumps(others)


async def test_an_encrypted_job_has_one_certificate_for_its_whole_life() -> None:
    """Made before its first worker, once; its private key is in this Secret only."""
    kube, cluster = FakeKube(), FakeCluster().with_nodes("a", "b", "c")
    cluster.job["spec"]["training"]["communication"] = {"encryption": "TLS"}
    await an_app(kube, cluster).reconciler.run_once(KEY)
    made = copy.deepcopy(kube.objects["secrets", "ns", "job-workers-tls"])
    assert (made["type"], made["immutable"]) == ("kubernetes.io/tls", True)
    assert [owner["uid"] for owner in made["metadata"]["ownerReferences"]] == [JOB_UID]
    written = [plural for _, plural, _ in kube.writes if plural in ("secrets", "pods")]
    assert written == ["secrets"] * 2 + ["pods"] * 3
    for name in ("job-w0", "job-w1", "job-w2"):
        del kube.objects["pods", "ns", name]
    successor = an_app(kube, cluster)
    await relist(kube, successor.store)
    await successor.reconciler.run_once(KEY)
    assert ("pods", "ns", "job-w0") in kube.objects
    assert kube.objects["secrets", "ns", "job-workers-tls"] == made
    others = [body for (_, _, name), body in kube.objects.items() if name != "job-workers-tls"]
    assert made["data"]["tls.key"] not in json.dumps(others)


async def test_a_secret_of_somebody_else_is_neither_used_nor_changed() -> None:
    """Whoever made it knows its value: no worker starts with it, and the status says what to do."""
    kube = FakeKube()
    foreign = {"metadata": {"name": "job-secret", "namespace": "ns", "uid": "x"}, "data": {keys.SECRET_KEY: "AAAA"}}
    kube.objects["secrets", "ns", "job-secret"] = copy.deepcopy(foreign)
    app = an_app(kube)
    for _ in range(2):
        await app.reconciler.run_once(KEY)
    assert kube.objects["secrets", "ns", "job-secret"] == foreign
    assert not [name for plural, _, name in kube.objects if plural == "pods"]
    status = json.dumps(kube.objects["heterotrainjobs", "ns", "job"]["status"])
    assert "a Secret named job-secret exists and does not belong to this job" in status


async def test_without_the_right_to_make_secrets_no_worker_starts() -> None:
    """With a chart that is older than the operator, the status tells the refusal."""
    kube = FakeKube()
    kube.fail = failing("create", "secrets", Rejected("secrets is forbidden", status_code=403))
    app = an_app(kube)
    for _ in range(2):
        await app.reconciler.run_once(KEY)
    assert not [name for plural, _, name in kube.objects if plural == "pods"]
    assert "secrets is forbidden" in json.dumps(kube.objects["heterotrainjobs", "ns", "job"]["status"])


async def test_each_job_gets_a_network_policy_where_that_is_switched_on() -> None:
    """Its own workers reach all its ports, everybody the metrics; a policy of somebody else's is left alone."""
    kube = FakeKube()
    app = an_app(kube)
    app.actor._network_policy = True
    await app.reconciler.run_once(KEY)
    spec = kube.objects["networkpolicies", "ns", "job-workers"]["spec"]
    workers = {"matchLabels": {keys.LABEL_MANAGED_BY: keys.MANAGED_BY, keys.LABEL_JOB: "job"}}
    assert spec == {
        "podSelector": workers,
        "policyTypes": ["Ingress"],
        "ingress": [
            {"from": [{"podSelector": workers}]},
            {"ports": [{"protocol": "TCP", "port": 9400, "endPort": 9415}]},
        ],
    }


async def test_the_status_counts_a_failed_worker_before_its_pod_is_removed() -> None:
    cluster = FakeCluster(spec={"cleanPodPolicy": "All", "backoffLimit": 0}).with_nodes("a", "b", "c").start()
    cluster.end("job-w0", Ending.FAILED, exit_code=1, reason="boom")
    kube = FakeKube()
    app = an_app(kube, cluster)
    for body in cluster.pods.values():
        kube.objects["pods", "ns", body["metadata"]["name"]] = body
        app.pod_event(body, deleted=False)
    assert cluster.plan is not None
    app.plan_event(cluster.plan, deleted=False)
    await app.reconciler.run_once(KEY)
    order = [call[0] for call in kube.writes]
    assert order.index("merge status") < order.index("delete")
    assert kube.objects["heterotrainjobs", "ns", "job"]["status"]["restarts"] == 1


async def test_a_refused_pod_is_reported_in_the_status_and_tried_again() -> None:
    kube = FakeKube()
    app = an_app(kube)
    kube.fail = failing("create", "pods", Rejected("exceeded quota: team", status_code=403))
    await app.reconciler.run_once(KEY)
    again_s = await app.reconciler.run_once(KEY)
    status = kube.objects["heterotrainjobs", "ns", "job"]["status"]
    (scheduled,) = [c for c in status["conditions"] if c["type"] == "Scheduled"]
    assert scheduled["reason"] == "PodsRejected"
    assert "exceeded quota: team" in scheduled["message"]
    assert again_s is not None
    assert again_s <= 20.0


def many_workers(count: int) -> FakeCluster:
    """Return a cluster with room for a job of so many small workers."""
    small = pool("a", maxReplicas=count, resources={"limits": {"cpu": "10m"}})
    cluster = FakeCluster(small, spec={"training": {"globalBatchSize": 1000}}).with_nodes("a", cpu="64")
    cluster.nodes["a"]["status"]["allocatable"]["pods"] = "200"
    return cluster


async def test_a_full_quota_costs_a_few_requests_and_later_ones_come_more_and_more_rarely() -> None:
    kube = FakeKube()
    now_s = 0.0
    app = an_app(kube, many_workers(50), Clocks(monotonic=lambda: now_s))
    quota = 5

    def creations() -> int:
        return sum(call[:2] == ("create", "pods") for call in kube.calls)

    def full(verb: str, plural: str, _: str) -> KubeError | None:
        pods = sum(key[0] == "pods" for key in kube.objects)
        refused = (verb, plural) == ("create", "pods") and pods >= quota
        return Rejected("exceeded quota: team", status_code=403) if refused else None

    kube.fail = full
    await app.reconciler.run_once(KEY)
    assert creations() == FIRST_BATCH
    requests, waits = [], []
    for _ in range(6):
        before = creations()
        for _ in range(20):  # each scrape and each event cause a pass
            wait_s = await app.reconciler.run_once(KEY)
        assert wait_s is not None
        requests.append(creations() - before)
        waits.append(wait_s)
        now_s += wait_s
    assert requests == [0, 1, 1, 1, 1, 1]
    assert waits == pytest.approx([20.0, 40.0, 80.0, 160.0, 160.0, 160.0])
    assert "exceeded quota: team" in condition(kube, "Degraded")[1] + condition(kube, "Scheduled")[1]
    quota = 1000
    for _ in range(2):
        await app.reconciler.run_once(KEY)
    assert sum(key[0] == "pods" for key in kube.objects) == 50
    assert "exceeded quota" not in str(kube.objects["heterotrainjobs", "ns", "job"]["status"])


async def test_a_changed_spec_is_tried_at_once_after_a_refusal() -> None:
    kube = FakeKube()
    cluster = many_workers(3)
    app = an_app(kube, cluster, Clocks(monotonic=lambda: 0.0))
    kube.fail = failing("create", "pods", Rejected("only images of the team's registry", status_code=403))
    await app.reconciler.run_once(KEY)
    kube.fail = lambda *_: None
    cluster.job["metadata"] |= {"generation": 2, "resourceVersion": "5000"}
    app.store.jobs.put(parse_job(cluster.job))
    await app.reconciler.run_once(KEY)
    assert sum(key[0] == "pods" for key in kube.objects) == 3


async def test_a_refused_service_is_not_asked_for_in_each_pass() -> None:
    kube = FakeKube()
    app = an_app(kube, clocks=Clocks(monotonic=lambda: 0.0))
    kube.fail = failing("apply", "services", Rejected("services is forbidden", status_code=403))
    for _ in range(20):
        await app.reconciler.run_once(KEY)
    assert sum(call[:2] == ("apply", "services") for call in kube.calls) == 1


async def test_a_foreign_pod_with_a_worker_s_name_costs_the_job_no_worker() -> None:
    kube = FakeKube()
    now_s = 0.0
    app = an_app(kube, many_workers(3), Clocks(monotonic=lambda: now_s))
    kube.objects["pods", "ns", "job-w0"] = {
        "kind": "Pod",
        "metadata": {"name": "job-w0", "namespace": "ns", "uid": "x"},
    }
    await app.reconciler.run_once(KEY)
    now_s = 21.0
    await app.reconciler.run_once(KEY)
    assert {key[2] for key in kube.objects if key[0] == "pods"} == {"job-w0", "job-w1", "job-w2", "job-w3"}


def condition(kube: FakeKube, kind: str) -> tuple[str, str]:
    """Return reason and message of a condition in the written status."""
    conditions = kube.objects["heterotrainjobs", "ns", "job"]["status"]["conditions"]
    return next((c["reason"], c["message"]) for c in conditions if c["type"] == kind)


@pytest.mark.parametrize(
    ("verb", "plural"), [("apply", "services"), ("apply", "poddisruptionbudgets"), ("create", "configmaps")]
)
async def test_a_missing_right_is_reported_in_the_status_and_tried_again(verb: str, plural: str) -> None:
    kube = FakeKube()
    now_s = 0.0
    app = an_app(kube, clocks=Clocks(monotonic=lambda: now_s))
    kube.fail = failing(verb, plural, Rejected(f"{plural} is forbidden", status_code=403))
    first_s = await app.reconciler.run_once(KEY)
    await app.reconciler.run_once(KEY)
    assert condition(kube, "Scheduled")[0] == "PodsRejected"
    assert f"{plural} is forbidden" in condition(kube, "Scheduled")[1]
    assert first_s is not None
    assert first_s <= 20.0
    assert bool([call for call in kube.writes if call[:2] == ("create", "pods")]) is (plural != "configmaps")
    kube.fail = lambda *_: None
    now_s = 21.0
    for _ in range(3):
        await app.reconciler.run_once(KEY)
    assert "forbidden" not in str(kube.objects["heterotrainjobs", "ns", "job"]["status"])
    assert len([key for key in kube.objects if key[0] == "pods"]) == 3


async def test_a_refused_plan_does_not_count_as_written_and_is_tried_again_later() -> None:
    """Otherwise its version in the status would grow with every pass, and each status update causes another pass."""
    cluster = a_running_job()
    kube = FakeKube()
    now_s = 0.0
    app = an_app(kube, cluster, Clocks(monotonic=lambda: now_s))
    assert cluster.plan is not None
    for body in cluster.pods.values():
        kube.objects["pods", "ns", body["metadata"]["name"]] = body
        app.pod_event(body, deleted=False)
    kube.objects["configmaps", "ns", "job-plan"] = cluster.plan
    app.plan_event(cluster.plan, deleted=False)
    cluster.edit(lambda spec: spec["training"].update(rebalance={"boundary": "Never"}))
    cluster.job["metadata"]["resourceVersion"] = "50"
    app.store.jobs.put(parse_job(cluster.job))
    kube.fail = failing("replace", "configmaps", Rejected("field is immutable", status_code=422))
    desired = cluster.status["plan"]["desired"]
    for _ in range(4):
        await app.reconciler.run_once(KEY)
    assert condition(kube, "Ready") == ("WriteRejected", "field is immutable")
    assert kube.objects["heterotrainjobs", "ns", "job"]["status"]["plan"]["desired"] == desired
    assert len([call for call in kube.writes if call[0] == "replace"]) == 1
    before = len(kube.writes)
    await app.reconciler.run_once(KEY)
    assert len(kube.writes) == before, "nothing is written while nothing changes"
    now_s = 21.0
    kube.fail = lambda *_: None
    for _ in range(2):
        await app.reconciler.run_once(KEY)
    assert condition(kube, "Ready")[0] == "Training"


@pytest.mark.parametrize(
    ("plural", "kind", "name"),
    [("services", "Service", "job-workers"), ("configmaps", "ConfigMap", "job-plan"), ("pods", "Pod", "job-w0")],
)
async def test_a_foreign_object_with_the_job_s_name_stays_as_it_is_and_is_reported(
    plural: str, kind: str, name: str
) -> None:
    kube = FakeKube()
    app = an_app(kube)
    foreign = {"kind": kind, "metadata": {"name": name, "namespace": "ns", "uid": "foreign"}, "spec": {"a": "b"}}
    kube.objects[plural, "ns", name] = foreign
    before = copy.deepcopy(foreign)
    await app.reconciler.run_once(KEY)
    await app.reconciler.run_once(KEY)
    assert kube.objects[plural, "ns", name] == before
    assert f"a {kind} named {name} exists and does not belong to this job" in condition(kube, "Scheduled")[1]


def labelled_config_map(text: str, *, name: str = "job", **metadata: object) -> dict[str, Any]:
    """Return a ConfigMap that looks like a job's plan but belongs to no job."""
    labels = {keys.LABEL_MANAGED_BY: keys.MANAGED_BY, keys.LABEL_JOB: name}
    identity = {"name": keys.plan_name(name), "namespace": "ns", "uid": "foreign", "resourceVersion": "7"}
    return {"kind": "ConfigMap", "metadata": {**identity, "labels": labels, **metadata}, "data": {"plan.json": text}}


@pytest.mark.parametrize("by", ["watch", "list"])
async def test_a_foreign_config_map_with_the_plan_s_name_and_labels_stays_as_it_is(by: str) -> None:
    kube = FakeKube()
    app = an_app(kube)
    foreign = labelled_config_map("a neighbour's data")
    kube.objects["configmaps", "ns", "job-plan"] = foreign
    before = copy.deepcopy(foreign)
    if by == "watch":
        app.plan_event(foreign, deleted=False)
    else:
        await relist(kube, app.store)
    for _ in range(3):
        await app.reconciler.run_once(KEY)
    assert kube.objects["configmaps", "ns", "job-plan"] == before
    assert "a ConfigMap named job-plan exists and does not belong to this job" in condition(kube, "Ready")[1]
    assert not app.store.plans.all()


async def test_config_maps_that_no_job_controls_are_not_kept() -> None:
    kube = FakeKube()
    app = an_app(kube)
    for number in range(20):
        body = labelled_config_map("x" * 1000, name=f"no-job-{number}")
        kube.objects["configmaps", "ns", body["metadata"]["name"]] = body
        app.plan_event(body, deleted=False)
    assert not app.store.plans.all()
    await relist(kube, app.store)
    assert not app.store.plans.all()
    assert len(app.store.plans._stamps) <= 1, "nor are their names"


async def test_a_plan_that_became_too_long_is_written_again() -> None:
    kube = FakeKube()
    app = an_app(kube)
    await app.reconciler.run_once(KEY)
    plan = kube.objects["configmaps", "ns", "job-plan"]
    plan["data"]["plan.json"] += " " * MOST_PLAN_CHARACTERS
    plan["metadata"]["resourceVersion"] = "9000"
    app.plan_event(plan, deleted=False)
    stored = app.store.plans.get(KEY)
    assert stored is not None
    assert stored.text == ""
    await app.reconciler.run_once(KEY)
    assert len(kube.objects["configmaps", "ns", "job-plan"]["data"]["plan.json"]) < 5000


async def test_a_job_waits_briefly_for_the_removal_of_its_predecessor_s_plan() -> None:
    kube = FakeKube()
    app = an_app(kube)
    owner = {"kind": keys.KIND, "name": "job", "uid": "predecessor", "controller": True}
    kube.objects["configmaps", "ns", "job-plan"] = labelled_config_map("{}", ownerReferences=[owner])
    with pytest.raises(Conflict):
        await app.reconciler.run_once(KEY)
    del kube.objects["configmaps", "ns", "job-plan"]
    await app.reconciler.run_once(KEY)
    assert sum(key[0] == "pods" for key in kube.objects) == 3


async def test_edits_of_the_operator_s_objects_are_reverted() -> None:
    kube = FakeKube()
    app = an_app(kube)
    await app.reconciler.run_once(KEY)
    service = kube.objects["services", "ns", "job-workers"]
    service["spec"] = {"clusterIP": "edited"}
    app.reconciler.reapply()
    kube.conflicts.add(("services", "job-workers"))
    await app.reconciler.run_once(KEY)
    assert kube.objects["services", "ns", "job-workers"]["spec"]["clusterIP"] == "None"


async def test_a_plan_without_labels_gets_them_back_and_is_read_before_it_is_overwritten() -> None:
    kube = FakeKube()
    app = an_app(kube)
    await app.reconciler.run_once(KEY)
    plan = kube.objects["configmaps", "ns", "job-plan"]
    labels, text = plan["metadata"].pop("labels"), plan["data"]
    app.store.plans.discard(KEY)
    with pytest.raises(Conflict):
        await app.reconciler.run_once(KEY)
    found = kube.objects["configmaps", "ns", "job-plan"]
    assert (found["metadata"]["labels"], found["data"]) == (labels, text)
    await app.reconciler.run_once(KEY)


async def test_a_webhook_without_an_answer_is_reported() -> None:
    kube = FakeKube()
    app = an_app(kube)
    kube.fail = failing("dry-run", "pods", Unavailable("failed calling webhook policy.example.com"))
    again_s = await app.reconciler.run_once(KEY)
    assert condition(kube, "Accepted")[0] == "DryRunFailed"
    assert "failed calling webhook" in condition(kube, "Accepted")[1]
    assert again_s == pytest.approx(20.0, abs=1.0)


async def test_an_unreadable_object_does_not_hide_others(monkeypatch: pytest.MonkeyPatch) -> None:
    kube = FakeKube()
    app = without_competition(kube, status_interval_s=0.0)
    for name in ("good", "unreadable"):
        body = job_body(name=name, uid=name)
        kube.objects["heterotrainjobs", "ns", name] = body
    del kube.objects["heterotrainjobs", "ns", "unreadable"]["metadata"]["uid"]
    assert await relist(kube, app.store) == {JobKey("ns", "good")}


def test_an_invalid_annotation_counts_as_one_rank() -> None:
    cluster = FakeCluster().with_nodes("a", "b", "c").start()
    for text in ("many", "-1", "0", "1" * 5000, ""):
        cluster.pods["job-w0"]["metadata"]["annotations"][RANKS_ANNOTATION] = text
        assert [pod.ranks for pod in cluster.pod_views] == [1, 1, 1]


async def test_a_template_is_checked_once_for_each_generation_of_the_spec() -> None:
    kube = FakeKube()
    app = an_app(kube)
    for _ in range(3):
        await app.reconciler.run_once(KEY)
    assert [name for verb, _, name in kube.calls if verb == "dry-run"] == ["job-try-a", "job-try-b", "job-try-c"]


async def test_a_forced_deletion_leaves_the_pod_no_grace_period() -> None:
    kube, cluster = FakeKube(), a_running_job()
    app = an_app(kube, cluster, Clocks(lambda: 0.0, lambda: NOW_S + 60.0), force_delete_s=60.0)
    assert app.reconciler._sources.force_delete_s == 60.0
    body = cluster.pods["job-w0"]
    body["metadata"]["deletionTimestamp"] = rfc3339(NOW_S)
    del cluster.nodes[body["spec"]["nodeName"]]
    app.store.nodes.discard(body["spec"]["nodeName"])
    for each in cluster.pods.values():
        app.pod_event(each, deleted=False)
    for each in [*cluster.pods.values(), cluster.plan]:
        kube.objects["pods" if "spec" in each else "configmaps", "ns", each["metadata"]["name"]] = each
    app.plan_event(cluster.plan, deleted=False)
    await app.reconciler.run_once(KEY)
    deletions = [call for call in kube.writes if call[0].startswith("delete")]
    assert deletions == [("delete in 0 s", "pods", "job-w0")]


class AdmittingKube(FakeKube):
    """An API server whose LimitRange gives each container without a request two cores, and pods a priority."""

    async def create(self, resource: Resource, body: Body, *, dry_run: bool = False) -> Body:
        if resource == PODS:
            body = copy.deepcopy(body)
            body["spec"]["priority"] = 7
            for container in body["spec"]["containers"]:
                container["resources"].setdefault("requests", {}).setdefault("cpu", "2")
        return await super().create(resource, body, dry_run=dry_run)


async def test_capacity_counts_with_what_admission_adds_to_a_pod() -> None:
    kube = AdmittingKube()
    app = an_app(kube, FakeCluster(pool("a", maxReplicas=8, resources={})).with_nodes("a", cpu="6"))
    for _ in range(2):
        await app.reconciler.run_once(KEY)
    workers = [body for (plural, _, _), body in kube.objects.items() if plural == "pods"]
    assert len(workers) == 3, "so many fit on six cores"
    job = app.store.jobs.get(KEY)
    assert isinstance(job, ValidJob)
    shapes = app.allocator._new_entry(job).shapes
    assert shapes["a"].requests["cpu"] == 2.0, "the allocation counts the same"
    assert {pod.priority for pod in app.store.pods.of_job(KEY)} == {7}


async def test_a_new_leader_learns_what_admission_adds_without_haste() -> None:
    kube, now_s = AdmittingKube(), 0.0
    clocks = Clocks(monotonic=lambda: now_s)
    cluster = FakeCluster(pool("a", maxReplicas=8, resources={})).with_nodes("a", cpu="6")
    await an_app(kube, cluster, clocks).reconciler.run_once(KEY)
    kube.calls.clear()
    app = without_competition(kube, status_interval_s=0.0, clocks=clocks)
    for body in cluster.nodes.values():
        app.store.nodes.put(parse_node(body))
    await relist(kube, app.store)
    dry_runs = lambda: sum(call[0] == "dry-run" for call in kube.calls)  # noqa: E731  # a short count
    for _ in range(3):
        await app.reconciler.run_once(KEY)
    assert dry_runs() == 0, "the job was accepted before"
    now_s = RELEARN_S
    for _ in range(3):
        await app.reconciler.run_once(KEY)
    assert dry_runs() == 1
    job = app.store.jobs.get(KEY)
    assert job is not None
    assert app.reconciler._sources.admitted.of(job)["a"].shape.requests["cpu"] == 2.0


async def test_a_refused_template_is_checked_again_later_because_a_policy_may_change() -> None:
    kube = FakeKube()
    app = an_app(kube)
    kube.fail = failing("dry-run", "pods", Rejected("violates PodSecurity", status_code=403))
    again_s = await app.reconciler.run_once(KEY)
    status = kube.objects["heterotrainjobs", "ns", "job"]["status"]
    assert status["state"] == "Invalid"
    assert "violates PodSecurity" in status["reason"]
    assert again_s == pytest.approx(20.0, abs=1.0)


async def test_an_invalid_template_is_checked_less_and_less_often() -> None:
    kube = FakeKube()
    now_s = 0.0
    app = an_app(kube, clocks=Clocks(monotonic=lambda: now_s))
    kube.fail = failing("dry-run", "pods", Rejected("unknown field", status_code=400))
    waits_s = []
    for _ in range(7):
        again_s = await app.reconciler.run_once(KEY)
        assert again_s is not None
        waits_s.append(again_s)
        now_s += again_s
    assert waits_s == [20.0, 40.0, 80.0, 160.0, 320.0, 320.0, 320.0]


async def test_a_job_deleted_during_its_pass_is_not_an_error() -> None:
    kube = FakeKube()
    app = an_app(kube)

    def gone(verb: str, plural: str, _: str) -> KubeError | None:
        if (verb, plural) == ("merge status", "heterotrainjobs"):
            app.store.jobs.discard(KEY)
            return NotFound("job")
        return None

    kube.fail = gone
    assert await app.reconciler.run_once(KEY) is None


@pytest.mark.looptime
@pytest.mark.parametrize("error", [Unavailable("down"), Conflict("changed"), NotFound("gone"), RuntimeError("a bug")])
async def test_an_error_with_one_job_does_not_delay_another(error: Exception) -> None:
    kube = FakeKube()
    app = an_app(kube)
    other = job_body()
    other["metadata"] |= {"name": "good", "uid": "other"}
    kube.objects["heterotrainjobs", "ns", "good"] = other
    app.store.jobs.put(parse_job(other))

    def fail(_verb: str, plural: str, name: str) -> KubeError | None:
        if plural == "services" and name == "job-workers":
            raise error
        return None

    kube.fail = fail
    app.queue.add(KEY)
    app.queue.add(JobKey("ns", "good"))
    worker = asyncio.create_task(app.reconciler.work())
    await asyncio.sleep(0.01)
    assert ("merge status", "heterotrainjobs", "good") in kube.writes
    assert not worker.done(), "the loop survives"
    before = len([call for call in kube.calls if call == ("get", "services", "job-workers")])
    await asyncio.sleep(30)
    tries = len([call for call in kube.calls if call == ("get", "services", "job-workers")])
    assert before < tries < 12, "it is tried again, less and less often"
    worker.cancel()


@pytest.mark.looptime
async def test_numbers_are_written_at_intervals_and_changes_at_once() -> None:
    kube = FakeKube()
    clocks = Clocks(monotonic=asyncio.get_running_loop().time)
    app = without_competition(kube, status_interval_s=5.0, clocks=clocks)
    cluster = FakeCluster().with_nodes("a", "b", "c")
    kube.objects["heterotrainjobs", "ns", "job"] = cluster.job
    app.store.jobs.put(parse_job(cluster.job))
    await app.reconciler.run_once(KEY)
    memory = app.reconciler._memories[KEY]
    job = app.store.jobs.get(KEY)
    assert job is not None

    def writes() -> int:
        return len([call for call in kube.writes if call[0] == "merge status"])

    first = writes()
    await asyncio.sleep(1)
    numbers = replace_status(job, step=5)
    assert await app.actor.write_status(job, numbers, memory) == pytest.approx(4.0)
    assert writes() == first
    conditions = as_body(job.status)["conditions"]
    reworded = replace_status(
        job, conditions=[{**each, "message": "the same with newer numbers"} for each in conditions]
    )
    assert await app.actor.write_status(job, reworded, memory) == pytest.approx(4.0)
    assert writes() == first
    change = replace_status(job, step=5, restarts=1)
    assert await app.actor.write_status(job, change, memory) is None
    assert writes() == first + 1
    await asyncio.sleep(6)
    job = app.store.jobs.get(KEY)
    assert job is not None
    assert await app.actor.write_status(job, reworded, memory) is None
    assert writes() == first + 2, "late, but written"


def replace_status(job: object, **fields: object) -> object:
    """Return the job's status with other fields."""
    status = job.status  # type: ignore[attr-defined]  # a JobView
    return type(status).model_validate({**as_body(status), **fields})


async def test_nothing_is_done_for_a_missing_job() -> None:
    kube = FakeKube()
    app = an_app(kube)
    app.store.jobs.discard(KEY)
    assert await app.reconciler.run_once(KEY) is None
    assert kube.calls == []


async def test_heartbeats_of_nodes_queue_no_job_and_taints_queue_all() -> None:
    app = an_app(FakeKube())
    body = node_body("a", "a")
    body["metadata"]["resourceVersion"] = "7"
    app.node_event(body, deleted=False)
    assert len(app.queue) == 0
    tainted = node_body("a", "a", taints=["karpenter.sh/disrupted:NoSchedule"])
    tainted["metadata"]["resourceVersion"] = "8"
    app.node_event(tainted, deleted=False)
    assert len(app.queue) == 1


async def test_a_condition_that_announces_a_node_s_end_queues_all_jobs() -> None:
    app = an_app(FakeKube(), node_announcements="Maintenance, example.com/retiring")
    app.node_event(node_body("a", "a"), deleted=False)
    app.queue.forget(KEY)
    leaving = node_body("a", "a")
    leaving["metadata"]["resourceVersion"] = "8"
    leaving["status"]["conditions"].append({"type": "Maintenance", "status": "True"})
    app.node_event(leaving, deleted=False)
    assert len(app.queue) == 1


def test_views_are_frozen() -> None:
    job = parse_job(job_body())
    with pytest.raises(AttributeError):
        job.uid = "other"  # type: ignore[misc]  # frozen on purpose
    assert replace(job, uid="other").uid == "other"


async def test_shares_are_decided_again_only_on_new_telemetry_and_not_all_the_time() -> None:
    """The time for fitting models grows with the job's size; it may only use a small part of the processor."""
    kube = FakeKube()
    replanned: list[bool] = []
    clock_s = 0.0
    telemetry = Telemetry()
    app = an_app(kube, clocks=Clocks(monotonic=lambda: clock_s))

    def slow_decision(inputs: JobInputs) -> Decision:
        nonlocal clock_s
        replanned.append(inputs.replan)
        clock_s += 0.5
        return Decision()

    app.reconciler._sources = replace(app.reconciler._sources, telemetry_of=lambda _: telemetry)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("heterotrain_operator.engine.reconcile.decide", slow_decision)
        telemetry = Telemetry(sequence=1)
        await app.reconciler.run_once(KEY)
        await app.reconciler.run_once(KEY)
        assert replanned == [True, False], "the same telemetry again is not a reason"
        telemetry = Telemetry(sequence=2)
        again_s = await app.reconciler.run_once(KEY)
        assert replanned[-1] is False, "half a second of fitting is followed by ten seconds of rest"
        assert again_s == pytest.approx(0.5 * PLANNING_PART - 1.0)
        clock_s += 10.0
        await app.reconciler.run_once(KEY)
        assert replanned[-1] is True


@pytest.mark.parametrize("between", [("MODIFIED",), ()])
async def test_a_deletion_during_a_gap_of_the_watch_is_noticed_when_the_watch_lists_again(
    between: tuple[str, ...],
) -> None:
    kube = FakeKube()
    app = App(kube, Settings(leader_election=False, relist_s=3600.0))
    for name in ("a", "b"):
        kube.objects["nodes", "", name] = node_body(name, name)
    running = asyncio.create_task(app.run())
    try:
        async with asyncio.timeout(30):
            await app._synced.wait()
            for event_type in (None, *between):
                app.note_event("nodes", event_type, "uid-b")
            del kube.objects["nodes", "", "a"]
            await asyncio.sleep(0)
            assert set(app.store.nodes.all()) == {"a", "b"}, "no event reports the deletion"
            app.note_event("nodes", None, "uid-b")
            while set(app.store.nodes.all()) != {"b"}:  # noqa: ASYNC110  # the store signals nothing
                await asyncio.sleep(0)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_job_that_was_deleted_while_no_watch_reported_it_is_forgotten_when_a_write_finds_it_missing() -> None:
    kube = FakeKube()
    app = an_app(kube)
    del kube.objects["heterotrainjobs", "ns", "job"]
    kube.fail = failing("merge status", "heterotrainjobs", NotFound("job"))
    await app.reconciler.run_once(KEY)
    assert KEY not in app.store.jobs.all()


async def test_labels_of_nodes_wake_jobs_only_where_a_job_selects_by_them() -> None:
    app = an_app(FakeKube())
    node = node_body("a", "a")
    for label, woken in (("feature.node.kubernetes.io/cpu-model", 0), ("pool", 1)):
        node["metadata"]["labels"] = {**node["metadata"]["labels"], label: "new"}
        node["metadata"]["resourceVersion"] += "0"
        app.node_event(node, deleted=False)
        assert len(app.queue) == woken


async def test_shares_that_alternate_with_each_scrape_cause_a_bounded_number_of_revisions() -> None:
    kube = FakeKube()
    clock_s, written, held = 0.0, 0, 0
    telemetry = Telemetry()
    app = an_app(kube, clocks=Clocks(monotonic=lambda: clock_s))

    def alternating(inputs: JobInputs) -> Decision:
        nonlocal written, held
        held += inputs.revised_often
        if not inputs.replan:
            return Decision()
        written += 1
        plan = labelled_config_map(str(written))
        if written > 1:
            plan["metadata"]["resourceVersion"] = kube.objects["configmaps", "ns", "job-plan"]["metadata"][
                "resourceVersion"
            ]
        else:
            del plan["metadata"]["resourceVersion"]
        return Decision(plan=plan)

    app.reconciler._sources = replace(app.reconciler._sources, telemetry_of=lambda _: telemetry)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("heterotrain_operator.engine.reconcile.decide", alternating)
        for scrape in range(60):
            clock_s = float(scrape)
            telemetry = Telemetry(sequence=scrape + 1)
            await app.reconciler.run_once(KEY)
    assert BURST <= written <= BURST + 60 / INTERVAL_S
    assert held, "the status says why newer shares wait"


async def test_nothing_is_watched_before_the_api_server_serves_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kopf looks the resources up once: a watch that starts before the definition exists never sees a job."""
    kube = FakeKube()
    answers = [NotFound("the server could not find the requested resource"), Unavailable("refused"), None]
    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    kube.fail = lambda *_: answers.pop(0)
    monkeypatch.setattr("heterotrain_operator.engine.app.asyncio.sleep", pause)
    await App(kube, Settings(leader_election=False)).wait_until_served()
    assert (answers, len(pauses)) == ([], 2)


async def test_the_operator_starts_only_after_the_api_server_serves_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    async def note(step: str) -> None:
        order.append(step)

    async def no_servers(**_: object) -> list[object]:
        return []

    app = App(FakeKube(), Settings(leader_election=False))
    monkeypatch.setattr("heterotrain_operator.handlers.serve", no_servers)
    monkeypatch.setattr(app, "wait_until_served", lambda: note("served"))
    monkeypatch.setattr(app, "run", lambda: note("run"))
    registry = kopf.OperatorRegistry()
    stop = asyncio.Event()
    register(registry, app, stop=stop)
    (start,) = [each.fn for each in registry._activities.get_all_handlers() if "start" in str(each.id)]
    await start(settings=kopf.OperatorSettings())
    await stop.wait()
    assert order == ["served", "run"]


def internal_errors(app: App, part: str) -> float:
    return app.metrics.internal_errors.labels(part=part)._value.get()


@pytest.mark.looptime
async def test_a_pass_that_fails_by_a_bug_is_reported_in_the_status_and_held_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kube, cluster = FakeKube(), a_running_job()
    app = an_app(kube, cluster)

    def broken(_: JobInputs) -> Decision:
        raise ZeroDivisionError("x" * 5000)

    monkeypatch.setattr(reconcile, "decide", broken)
    app.queue.add(KEY)
    worker = asyncio.create_task(app.reconciler.work())
    for _ in range(60):
        await asyncio.sleep(1.0)
        app.queue.add_unless_failing(KEY)  # a scrape
    conditions = {c["type"]: c for c in kube.objects["heterotrainjobs", "ns", "job"]["status"]["conditions"]}
    assert (conditions["Stalled"]["status"], conditions["Stalled"]["reason"]) == ("True", "InternalError")
    assert (conditions["Ready"]["status"], conditions["Running"]["status"]) == ("False", "True")
    assert "ZeroDivisionError" in conditions["Stalled"]["message"]
    assert len(conditions["Stalled"]["message"]) < 500
    assert 2 <= internal_errors(app, "what to do") < 10
    assert app.reconciler._memories[KEY].logged_fault
    monkeypatch.undo()
    await asyncio.sleep(1.2 * LONGEST_BACKOFF_S + 1.0)  # the jitter lengthens a delay by 20 % at most
    conditions = {c["type"]: c for c in kube.objects["heterotrainjobs", "ns", "job"]["status"]["conditions"]}
    assert conditions["Stalled"]["status"] == "False"
    worker.cancel()


async def test_a_part_that_fails_by_a_bug_is_counted_and_logged_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [0.0]
    kube, cluster = FakeKube(), a_running_job()
    app = an_app(kube, cluster, clocks=Clocks(monotonic=lambda: clock[0]))
    for pod in cluster.pod_views:
        app.store.pods.put(pod)
    assert cluster.plan_view is not None
    app.store.plans.put(cluster.plan_view)
    sequence = iter(range(1, 100))
    app.reconciler._sources = replace(
        app.reconciler._sources, telemetry_of=lambda _: Telemetry(sequence=next(sequence))
    )
    calls = []

    def broken(*_: object, **__: object) -> None:
        calls.append(clock[0])
        raise ZeroDivisionError

    monkeypatch.setattr(job_module, "share_out", broken)
    for _ in range(20):
        assert await app.reconciler.handle(KEY) == "bug"
        found = kube.objects["heterotrainjobs", "ns", "job"]["status"]["conditions"]
        assert next(c["status"] for c in found if c["type"] == "Stalled") == "True"
        clock[0] += 5.0  # the next scrape
    assert calls == [0.0, 60.0], "telemetry that leads to a bug is not tried with each scrape"
    assert internal_errors(app, "shares") == 2
    assert capsys.readouterr().out.count("Traceback") == 1
    monkeypatch.undo()
    clock[0] += 60.0
    assert await app.reconciler.handle(KEY) == "ok"


@pytest.mark.parametrize("crash_after", range(8))
async def test_a_worker_lost_with_its_pod_is_counted_once_whenever_the_operator_dies(crash_after: int) -> None:
    """The plan is written first. It names the members that it lost until the status counts them."""
    kube, cluster = FakeKube(), a_running_job()
    cluster.vanish("job-w2")
    for kind, bodies in (
        ("pods", cluster.pods.values()),
        ("nodes", cluster.nodes.values()),
        ("configmaps", [cluster.plan]),
    ):
        for body in bodies:
            assert body is not None
            kube.objects[kind, body["metadata"].get("namespace", ""), body["metadata"]["name"]] = body
    kube.objects["heterotrainjobs", "ns", "job"] = cluster.job

    class Crash(BaseException):
        pass

    def fail(*_: str) -> None:
        if len(kube.writes) > crash_after:
            raise Crash

    for each in (fail, lambda *_: None):
        kube.fail = each
        app = without_competition(kube, status_interval_s=0.0)
        with suppress(Crash):
            for _ in range(3):
                await relist(kube, app.store)
                await app.reconciler.run_once(KEY)
    status = kube.objects["heterotrainjobs", "ns", "job"]["status"]
    assert (status["disruptions"], status["restarts"]) == (1, 0)
    assert [pool["disruptions"] for pool in status["pools"]] == [0, 0, 1]


@pytest.mark.looptime
async def test_an_operator_with_a_pass_that_hangs_is_unhealthy(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    app = an_app(FakeKube(), clocks=Clocks(monotonic=loop.time))
    app._synced.set()
    forever = asyncio.Event()
    monkeypatch.setattr(app.actor, "act", lambda *_: forever.wait())
    app.queue.add(KEY)
    worker = asyncio.create_task(app.reconciler.work())
    await asyncio.sleep(STUCK_S - 1.0)
    app._listed_s = loop.time()
    assert app.healthy
    await asyncio.sleep(2.0)
    assert not app.healthy
    forever.set()
    await asyncio.sleep(1.0)
    assert app.healthy, "the pass has ended"
    worker.cancel()


async def test_the_event_names_only_workers_that_were_created() -> None:
    """The quota takes one of three."""
    kube = FakeKube()
    app = an_app(kube)
    kube.fail = lambda verb, plural, name: (
        Rejected("exceeded quota", status_code=403)
        if (verb, plural) == ("create", "pods") and name != "job-w0"
        else None
    )
    await app.reconciler.run_once(KEY)
    await app.publisher.flush()
    events = [body for (plural, _, _), body in kube.objects.items() if plural == "events"]
    assert [each["message"] for each in events if each["reason"] == "WorkersCreated"] == ["created job-w0"]


async def test_a_foreign_object_with_equal_values_is_not_taken_over() -> None:
    """The API server reports no conflict then, and applying would make the job its owner."""
    kube = FakeKube()
    app = an_app(kube)
    job = app.store.jobs.get(KEY)
    assert isinstance(job, ValidJob)
    foreign = build_service(job)
    foreign["metadata"]["ownerReferences"] = [{"kind": "Deployment", "name": "other", "uid": "u", "controller": True}]
    kube.objects["services", "ns", foreign["metadata"]["name"]] = foreign
    await app.reconciler.run_once(KEY)
    await app.reconciler.run_once(KEY)
    name = foreign["metadata"]["name"]
    assert ("apply", "services", name) not in kube.writes
    assert [each["uid"] for each in kube.objects["services", "ns", name]["metadata"]["ownerReferences"]] == ["u"]
    conditions = kube.objects["heterotrainjobs", "ns", "job"]["status"]["conditions"]
    message = next(each["message"] for each in conditions if each["type"] == "Scheduled")
    assert "exists and does not belong to this job" in message


async def test_fields_that_an_older_definition_of_jobs_lacks_are_left_out_of_the_status(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise no status could be written until the definition is updated, and no failure would be counted."""
    kube = FakeKube()
    app = an_app(kube)
    merge, older = kube.merge, [True]

    async def pruning(*where: Any, **which: Any) -> Any:
        """Store a status as an API server with an older definition does."""
        patch = where[-1]
        if older[0] and "status" in patch:
            known = copy.deepcopy({name: value for name, value in patch["status"].items() if name != "selector"})
            for each in known.get("pools") or ():
                each.pop("placed")
            where = (*where[:-1], {**patch, "status": known})
        return await merge(*where, **which)

    monkeypatch.setattr(kube, "merge", pruning)
    await app.reconciler.run_once(KEY)
    status = kube.objects["heterotrainjobs", "ns", "job"]["status"]
    assert "selector" not in status
    assert status["desiredReplicas"] == 3
    kube.calls.clear()
    for _ in range(3):
        await app.reconciler.run_once(KEY)
    assert len(kube.writes) <= 1, "the missing fields alone are no reason to write"
    older[0] = False
    app.reconciler.reapply()  # after a full list, the definition may be newer
    cluster_body = kube.objects["heterotrainjobs", "ns", "job"]
    app.job_event({**cluster_body, "metadata": {**cluster_body["metadata"], "resourceVersion": "9999"}}, deleted=False)
    await app.reconciler.run_once(KEY)
    status = kube.objects["heterotrainjobs", "ns", "job"]["status"]
    assert "selector" in status
    assert all("placed" in each for each in status["pools"])


async def test_other_refusals_of_a_status_are_errors() -> None:
    kube = FakeKube()
    kube.fail = failing("merge status", "heterotrainjobs", Unavailable("etcd is away"))
    with pytest.raises(Unavailable):
        await an_app(kube).reconciler.run_once(KEY)


async def test_several_namespaces_are_listed_one_by_one_and_others_are_not() -> None:
    kube, store = FakeKube(), Store()
    for namespace in ("one", "two", "three"):
        body = job_body(name=namespace, namespace=namespace, uid=f"uid-{namespace}")
        kube.objects["heterotrainjobs", namespace, namespace] = body
    await relist(kube, store, ("one", "two"))
    assert {key.namespace for key in store.jobs.all()} == {"one", "two"}
    assert Settings(watch_namespaces=" one, two,,one ").watched == ("one", "two")
    assert Settings().watched == ()


async def test_layouts_are_planned_outside_the_pass_and_the_job_is_queued_again() -> None:
    """The first pass writes generation 0; the planner's answer queues the job, and the next pass names members."""
    cluster = FakeCluster(
        pool("a"), pool("b"), spec={"parallelism": {"mode": "Pipeline"}, "elasticPolicy": {"minReplicas": 1}}
    )
    cluster.with_nodes("a", "b").start()
    assert cluster.plan_json["generation"] == 0
    kube = FakeKube()
    app = an_app(kube, cluster)
    points = (UnitSeconds(micro_batch_samples=1, forward_s=0.01, backward_s=0.02),)
    profiles = {
        name: PoolProfile(
            memory_bytes=900,
            units=(
                UnitProfile(
                    name="unit", parameter_bytes=100, activation_bytes=1, boundary_bytes=1, seconds={name: points}
                ),
            )
            * 3,
        )
        for name in "ab"
    }
    app.reconciler._sources = replace(
        app.reconciler._sources, telemetry_of=lambda _: Telemetry(profiles=profiles, sequence=1)
    )
    for view in cluster.pod_views:
        app.store.pods.put(view)
        kube.objects["pods", "ns", view.name] = cluster.pods[view.name]
    assert cluster.plan is not None
    kube.objects["configmaps", "ns", "job-plan"] = cluster.plan
    plan = cluster.plan_view
    assert plan is not None
    app.store.plans.put(plan)
    await app.reconciler.run_once(KEY)
    assert json.loads(kube.objects["configmaps", "ns", "job-plan"]["data"][keys.PLAN_KEY])["generation"] == 0
    assert await app.queue.get() == KEY
    await app.reconciler.run_once(KEY)
    found = json.loads(kube.objects["configmaps", "ns", "job-plan"]["data"][keys.PLAN_KEY])
    assert found["generation"] == 1
    assert len(found["members"]) == 1
    assert len(found["ranks"]) == 2
