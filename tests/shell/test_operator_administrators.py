"""What an administrator sets for all jobs reaches their objects, by watch events and by lists."""

from __future__ import annotations

import json

from heterotrain_operator.engine.resync import relist
from support.fake_cluster import FakeCluster
from support.fakes import FakeKube
from support.operator_app import KEY, an_app

DEFAULTS = json.dumps({"labels": {"team": "ml"}, "env": [{"name": "PROXY", "value": "p"}]})
RULE = {"ports": [{"port": 443, "protocol": "TCP"}]}


async def test_defaults_of_workers_and_rules_of_egress_are_in_what_the_operator_creates() -> None:
    kube, cluster = FakeKube(), FakeCluster().with_nodes("a", "b", "c")
    app = an_app(kube, cluster, worker_defaults=DEFAULTS, network_policy=True, egress=json.dumps([RULE]))
    app.store.jobs.discard(KEY)
    app.events.job(cluster.job, deleted=False)
    await app.reconciler.run_once(KEY)
    (pod, *_) = [body for (plural, _, _), body in kube.objects.items() if plural == "pods"]
    assert pod["metadata"]["labels"]["team"] == "ml"
    assert {"name": "PROXY", "value": "p"} in pod["spec"]["containers"][0]["env"]
    assert kube.objects["networkpolicies", "ns", "job-workers"]["spec"]["egress"][-1] == RULE
    watched = app.store.jobs.all()[KEY].template
    app.store.jobs.discard(KEY)
    await relist(kube, app.store)
    assert app.store.jobs.all()[KEY].template == watched
