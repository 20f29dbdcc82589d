"""Objects of others with the names of a job, and edits of the job's own ones."""

from __future__ import annotations

import copy

import pytest
from heterotrain_core.contract import keys
from heterotrain_operator.cluster_state.parse import (
    MOST_PLAN_CHARACTERS,
)
from heterotrain_operator.cluster_state.views import ValidJob
from heterotrain_operator.decide.objects.objects import build_network_policy
from heterotrain_operator.engine.clocks import Clocks
from heterotrain_operator.engine.memory import MANY_CONFLICTS
from heterotrain_operator.engine.resync import relist
from heterotrain_operator.kube.errors import Conflict
from support.fake_cluster import JOB_UID
from support.fakes import FakeKube
from support.operator_app import KEY, an_app, condition, failing, labelled_config_map, many_workers


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


@pytest.mark.parametrize(
    ("plural", "kind", "name"),
    [
        ("networkpolicies", "NetworkPolicy", "job-workers"),
        ("configmaps", "ConfigMap", "job-plan"),
        ("pods", "Pod", "job-w0"),
    ],
)
async def test_a_foreign_object_with_the_job_s_name_stays_as_it_is_and_is_reported(
    plural: str, kind: str, name: str
) -> None:
    kube = FakeKube()
    app = an_app(kube, network_policy=True)
    foreign = {"kind": kind, "metadata": {"name": name, "namespace": "ns", "uid": "foreign"}, "spec": {"a": "b"}}
    kube.objects[plural, "ns", name] = foreign
    before = copy.deepcopy(foreign)
    await app.reconciler.run_once(KEY)
    await app.reconciler.run_once(KEY)
    assert kube.objects[plural, "ns", name] == before
    assert f"a {kind} named {name} exists and does not belong to this job" in condition(kube, "Scheduled")[1]


@pytest.mark.parametrize("by", ["watch", "list"])
async def test_a_foreign_config_map_with_the_plan_s_name_and_labels_stays_as_it_is(by: str) -> None:
    kube = FakeKube()
    app = an_app(kube)
    foreign = labelled_config_map("a neighbour's data")
    kube.objects["configmaps", "ns", "job-plan"] = foreign
    before = copy.deepcopy(foreign)
    if by == "watch":
        app.events.plan(foreign, deleted=False)
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
        app.events.plan(body, deleted=False)
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
    app.events.plan(plan, deleted=False)
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
    app = an_app(kube, network_policy=True)
    await app.reconciler.run_once(KEY)
    policy = kube.objects["networkpolicies", "ns", "job-workers"]
    policy["spec"] = {"ingress": []}
    app.reconciler.reapply()
    kube.conflicts.add(("networkpolicies", "job-workers"))
    await app.reconciler.run_once(KEY)
    assert kube.objects["networkpolicies", "ns", "job-workers"]["spec"]["ingress"]


async def test_fields_that_the_api_server_or_others_add_cause_no_write() -> None:
    kube = FakeKube()
    app = an_app(kube, network_policy=True)
    await app.reconciler.run_once(KEY)
    kube.objects["networkpolicies", "ns", "job-workers"]["spec"] |= {"egress": []}
    kube.calls.clear()
    app.reconciler.reapply()
    await app.reconciler.run_once(KEY)
    assert ("get", "networkpolicies") in {call[:2] for call in kube.calls}
    assert "apply" not in {call[0] for call in kube.calls}
    kube.objects["networkpolicies", "ns", "job-workers"]["spec"]["ingress"].append({"ports": [{"port": 1}]})
    app.reconciler.reapply()
    await app.reconciler.run_once(KEY)
    assert ("apply", "networkpolicies") in {call[:2] for call in kube.calls}


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


async def test_a_foreign_object_with_equal_values_is_not_taken_over() -> None:
    """The API server reports no conflict then, and applying would make the job its owner."""
    kube = FakeKube()
    app = an_app(kube, network_policy=True)
    job = app.store.jobs.get(KEY)
    assert isinstance(job, ValidJob)
    foreign = build_network_policy(job)
    foreign["metadata"]["ownerReferences"] = [{"kind": "Deployment", "name": "other", "uid": "u", "controller": True}]
    kube.objects["networkpolicies", "ns", foreign["metadata"]["name"]] = foreign
    await app.reconciler.run_once(KEY)
    await app.reconciler.run_once(KEY)
    name = foreign["metadata"]["name"]
    assert ("apply", "networkpolicies", name) not in kube.writes
    assert [each["uid"] for each in kube.objects["networkpolicies", "ns", name]["metadata"]["ownerReferences"]] == ["u"]
    conditions = kube.objects["heterotrainjobs", "ns", "job"]["status"]["conditions"]
    message = next(each["message"] for each in conditions if each["type"] == "Scheduled")
    assert "exists and does not belong to this job" in message


async def test_a_worker_that_lost_its_label_costs_the_job_no_worker_and_is_reported() -> None:
    """Somebody isolates a pod by its label, to look into it: the job controls it, and does not see it any more."""
    kube = FakeKube()
    now_s = 0.0
    app = an_app(kube, many_workers(3), Clocks(monotonic=lambda: now_s))
    isolated = {"name": "job-w0", "namespace": "ns", "uid": "x", "labels": {"debug": "yes"}}
    isolated["ownerReferences"] = [{"uid": JOB_UID, "kind": "HeteroTrainJob", "name": "job", "controller": True}]
    kube.objects["pods", "ns", "job-w0"] = {"kind": "Pod", "metadata": isolated}
    await app.reconciler.run_once(KEY)
    await app.reconciler.run_once(KEY)
    words = "pod job-w0 is this job's but lacks the label heterotrain.dev/job: give it back, or delete the pod"
    assert words in condition(kube, "Scheduled")[1]
    now_s = 21.0
    await app.reconciler.run_once(KEY)
    assert {key[2] for key in kube.objects if key[0] == "pods"} == {"job-w0", "job-w1", "job-w2", "job-w3"}


async def test_the_status_is_written_although_a_later_write_conflicts() -> None:
    kube = FakeKube()
    app = an_app(kube, many_workers(3))
    kube.fail = failing("create", "pods", Conflict("stale"))
    assert await app.reconciler.handle(KEY) != "ok"
    assert condition(kube, "Accepted")[0] == "Valid"


async def test_a_conflict_that_repeats_is_reported_until_a_pass_succeeds() -> None:
    kube = FakeKube()
    app = an_app(kube, network_policy=True)
    kube.fail = failing("apply", "networkpolicies", Conflict("stale words"))
    for _ in range(MANY_CONFLICTS + 1):
        assert await app.reconciler.handle(KEY) == "conflict"
    assert condition(kube, "Reconciling")[1].endswith("writes conflict again and again: stale words")
    kube.fail = lambda *_: None
    for _ in range(2):
        assert await app.reconciler.handle(KEY) == "ok"
    assert "conflict" not in condition(kube, "Reconciling")[1]
