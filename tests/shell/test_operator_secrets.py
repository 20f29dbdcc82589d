"""What the operator makes for a job alone: its Secret and its network policy."""

from __future__ import annotations

import base64
import copy
import json

from heterotrain_core.contract import keys
from heterotrain_operator.engine.resync import relist
from heterotrain_operator.kube.errors import Rejected
from support.fake_cluster import JOB_UID
from support.fakes import FakeKube
from support.operator_app import KEY, an_app, failing


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
