"""Writes that the API server refuses: reported in the status, and tried again ever more rarely."""

from __future__ import annotations

import pytest
from heterotrain_operator.cluster_state.parse import (
    parse_job,
)
from heterotrain_operator.engine.act import FIRST_BATCH
from heterotrain_operator.engine.clocks import Clocks
from heterotrain_operator.kube.errors import KubeError, Rejected, Unavailable
from support.fake_cluster import a_running_job
from support.fakes import FakeKube
from support.operator_app import KEY, an_app, condition, deliver_pods_and_plan, failing, many_workers


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


async def test_a_refused_network_policy_is_not_asked_for_in_each_pass() -> None:
    kube = FakeKube()
    app = an_app(kube, clocks=Clocks(monotonic=lambda: 0.0), network_policy=True)
    kube.fail = failing("apply", "networkpolicies", Rejected("networkpolicies is forbidden", status_code=403))
    for _ in range(20):
        await app.reconciler.run_once(KEY)
    assert sum(call[:2] == ("apply", "networkpolicies") for call in kube.calls) == 1


@pytest.mark.parametrize(("verb", "plural"), [("apply", "networkpolicies"), ("create", "configmaps")])
async def test_a_missing_right_is_reported_in_the_status_and_tried_again(verb: str, plural: str) -> None:
    kube = FakeKube()
    now_s = 0.0
    app = an_app(kube, clocks=Clocks(monotonic=lambda: now_s), network_policy=True)
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


async def test_a_refused_budget_of_a_running_job_is_reported_and_stops_nothing() -> None:
    kube, cluster = FakeKube(), a_running_job()
    app = an_app(kube, cluster)
    deliver_pods_and_plan(app, kube, cluster)
    kube.fail = failing("apply", "poddisruptionbudgets", Rejected("budgets are forbidden", status_code=403))
    for _ in range(2):
        await app.reconciler.run_once(KEY)
    assert condition(kube, "Reconciling")[0] == "WriteRejected"
    assert "budgets are forbidden" in condition(kube, "Reconciling")[1]
    assert ("merge status", "heterotrainjobs") in {call[:2] for call in kube.writes}


async def test_a_refused_plan_does_not_count_as_written_and_is_tried_again_later() -> None:
    """Otherwise its version in the status would grow with every pass, and each status update causes another pass."""
    cluster = a_running_job()
    kube = FakeKube()
    now_s = 0.0
    app = an_app(kube, cluster, Clocks(monotonic=lambda: now_s))
    assert cluster.plan is not None
    for body in cluster.pods.values():
        kube.objects["pods", "ns", body["metadata"]["name"]] = body
        app.events.pod(body, deleted=False)
    kube.objects["configmaps", "ns", "job-plan"] = cluster.plan
    app.events.plan(cluster.plan, deleted=False)
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


async def test_a_webhook_without_an_answer_is_reported() -> None:
    kube = FakeKube()
    app = an_app(kube)
    kube.fail = failing("dry-run", "pods", Unavailable("failed calling webhook policy.example.com"))
    again_s = await app.reconciler.run_once(KEY)
    assert condition(kube, "Accepted")[0] == "DryRunFailed"
    assert "failed calling webhook" in condition(kube, "Accepted")[1]
    assert again_s == pytest.approx(20.0, abs=1.0)


async def test_other_refusals_of_a_status_are_errors() -> None:
    kube = FakeKube()
    kube.fail = failing("merge status", "heterotrainjobs", Unavailable("etcd is away"))
    with pytest.raises(Unavailable):
        await an_app(kube).reconciler.run_once(KEY)
