"""Input that the API server refuses at once, each with its message to the user.

``test_admission_table`` has the mistakes that the schema alone finds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import yaml
from heterotrain_operator.kube.errors import Rejected
from heterotrain_operator.kube.resources import JOBS
from support.api_cluster import ROOT, Cluster

Body = dict[str, Any]
Change = Callable[[Body], object]


def spec(change: Change) -> Change:
    return lambda job: change(job["spec"])


def container(change: Change) -> Change:
    return lambda job: change(job["spec"]["template"]["spec"]["containers"][0])


def adaptive(least: int, most: int) -> Change:
    return spec(lambda s: s.update(training={"adaptiveBatch": {"min": least, "max": most}}))


REFUSED: dict[str, tuple[Change, str]] = {
    "no batch": (
        spec(lambda s: s["training"].clear()),
        "give exactly one of globalBatchSize (a fixed batch) and adaptiveBatch",
    ),
    "two batches": (
        spec(lambda s: s["training"].update(adaptiveBatch={"min": 100, "max": 200})),
        "give exactly one of globalBatchSize (a fixed batch) and adaptiveBatch",
    ),
    "adaptive minimum above maximum": (
        adaptive(least=200, most=100),
        "adaptiveBatch.min is larger than adaptiveBatch.max",
    ),
    "adaptive batch below ranks": (
        spec(
            lambda s: (
                s.update(training={"adaptiveBatch": {"min": 3, "max": 100}}),
                s["workerPools"][0].update(numProcPerWorker=4),
            )
        ),
        "the batch is too small for the maximum number of processes",
    ),
    "cost without prices": (
        spec(lambda s: s.update(objective="Cost")),
        "objective: Cost compares prices: give every pool its pricePerHour",
    ),
    "deadline without its time": (
        spec(lambda s: s.update(objective="Deadline")),
        "deadline and objective: Deadline belong together: give both or neither",
    ),
    "deadline with a price for some": (
        spec(
            lambda s: (
                s["workerPools"][0].update(pricePerHour="1.0"),
                s["workerPools"].append({**s["workerPools"][0], "name": "unpriced", "pricePerHour": None}),
                s.update(objective="Deadline", deadline="2099-01-01T00:00:00Z"),
            )
        ),
        "objective: Deadline compares prices: give every pool its pricePerHour, or none of them",
    ),
    "min above max": (
        spec(lambda s: s.update(elasticPolicy={"minReplicas": 3, "maxReplicas": 2})),
        "minReplicas is larger than maxReplicas: lower minReplicas or raise maxReplicas",
    ),
    "pool min above max": (
        spec(lambda s: s["workerPools"][0].update(minReplicas=3, maxReplicas=2)),
        "the pool's minReplicas is larger than its maxReplicas",
    ),
    "min above pools": (
        spec(lambda s: s.update(elasticPolicy={"minReplicas": 9})),
        "elasticPolicy.minReplicas is larger than the sum of the pools' maxReplicas",
    ),
    "pools' minimums above max": (
        spec(
            lambda s: (
                s["workerPools"][0].update(minReplicas=2, maxReplicas=2),
                s.update(elasticPolicy={"maxReplicas": 1}),
            )
        ),
        "the sum of the pools' minReplicas is larger than elasticPolicy.maxReplicas",
    ),
    "batch below workers": (
        spec(lambda s: (s["training"].update(globalBatchSize=3), s["workerPools"][0].update(maxReplicas=8))),
        "the batch is too small for the maximum number of processes",
    ),
    "batch below ranks": (
        spec(lambda s: (s["training"].update(globalBatchSize=3), s["workerPools"][0].update(numProcPerWorker=4))),
        "the batch is too small for the maximum number of processes",
    ),
    "more processes than a plan holds": (
        spec(
            lambda s: (
                s["training"].update(globalBatchSize=100_000),
                s["workerPools"][0].update(maxReplicas=400, numProcPerWorker=16),
            )
        ),
        "more than 5000 processes do not fit into a plan",
    ),
    "every steps without steps": (
        spec(lambda s: s["training"].update(rebalance={"everySteps": 5})),
        "everySteps belongs to boundary: Steps",
    ),
    "steps without every steps": (
        spec(lambda s: s["training"].update(rebalance={"boundary": "Steps"})),
        "everySteps belongs to boundary: Steps",
    ),
    "managed by a stranger": (spec(lambda s: s.update(managedBy="me")), "Unsupported value"),
    "reserved variable": (
        container(lambda c: c.update(env=[{"name": "HETEROTRAIN_PLAN_DIR", "value": "/x"}])),
        "names that start with HETEROTRAIN_ belong to the operator",
    ),
    "reserved volume": (
        lambda job: job["spec"]["template"]["spec"].update(volumes=[{"name": "heterotrain-plan", "emptyDir": {}}]),
        "belong to the operator: rename the volume",
    ),
    "a node of its own": (
        lambda job: job["spec"]["template"]["spec"].update(nodeName="n"),
        "nodeName out: choose nodes by nodeSelector",
    ),
    "restart policy": (
        lambda job: job["spec"]["template"]["spec"].update(restartPolicy="Always"),
        "leave spec.template.spec.restartPolicy out",
    ),
    "a limit of its own": (
        lambda job: job["spec"]["template"]["spec"].update(activeDeadlineSeconds=3),
        "limit the job by spec.activeDeadlineSeconds",
    ),
    "long name": (lambda job: job["metadata"].update(name="a" * 49), "metadata.name has to start with a letter"),
    "name with a dot": (lambda job: job["metadata"].update(name="a.b"), "metadata.name has to start with a letter"),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_invalid_input_is_refused_with_a_message(cluster: Cluster, case: str) -> None:
    change, sentence = REFUSED[case]
    job = cluster.job()
    change(job)
    with pytest.raises(Rejected) as rejected:
        await cluster.kube.create(JOBS, job, dry_run=True)
    assert sentence in str(rejected.value)


ACCEPTED: dict[str, Change] = {
    "own variables": container(
        lambda c: c.update(env=[{"name": "A", "value": "b"}, {"name": "HETEROTRAIN_SAMPLE_LOG_DIR", "value": "/x"}])
    ),
    "anything a pod may have": lambda job: job["spec"]["template"]["spec"].update(
        affinity={"nodeAffinity": {}}, priorityClassName="high", securityContext={"fsGroup": 1}
    ),
    "numbers and texts as quantities": spec(
        lambda s: s["workerPools"][0].update(
            resources={"limits": {"nvidia.com/gpu": 4, "cpu": "500m", "memory": "1.5Gi"}}
        )
    ),
    "what templating tools leave behind": lambda job: job["spec"]["template"]["spec"].update(
        nodeSelector=None, tolerations=None, volumes=None
    ),
}


@pytest.mark.parametrize("case", ACCEPTED)
async def test_valid_input_is_accepted(cluster: Cluster, case: str) -> None:
    job = cluster.job()
    ACCEPTED[case](job)
    await cluster.kube.create(JOBS, job, dry_run=True)


async def test_the_example_is_accepted_and_defaults_are_filled_in(cluster: Cluster) -> None:
    job = yaml.safe_load((ROOT / "deploy/examples/digits/job.yaml").read_text())
    job["metadata"]["namespace"] = cluster.namespace
    answer = await cluster.kube.create(JOBS, job, dry_run=True)
    assert answer["spec"]["training"]["communication"] == {
        "backend": "Auto", "compression": "None", "encryption": "None",
    }  # fmt: skip
    assert answer["spec"]["backoffLimit"] == 6
    assert answer["spec"]["managedBy"] == "heterotrain.dev/operator"


CHANGES: dict[str, tuple[Body, str]] = {
    "batch": ({"training": {"globalBatchSize": 200}}, "training (except rebalance) is immutable while the job runs"),
    "fixed to adaptive": (
        {"training": {"globalBatchSize": None, "adaptiveBatch": {"min": 100, "max": 200}}},
        "training (except rebalance) is immutable while the job runs",
    ),
    "epochs": ({"training": {"epochs": 9}}, "training (except rebalance) is immutable while the job runs"),
    "backend": (
        {"training": {"communication": {"backend": "Gloo"}}},
        "training (except rebalance) is immutable while the job runs",
    ),
    "group": ({"podGroup": {"scheduler": "Volcano"}}, "podGroup is immutable while the job runs"),
    "ports": ({"network": {"peerPort": 20000}}, "the network's ports are immutable while the job runs"),
    "managedBy": ({"managedBy": "kueue.x-k8s.io/multikueue"}, "managedBy is immutable"),
}


@pytest.mark.parametrize("case", CHANGES)
async def test_immutable_fields_of_a_running_job(cluster: Cluster, case: str) -> None:
    patch, sentence = CHANGES[case]
    await cluster.create(cluster.job())
    with pytest.raises(Rejected) as rejected:
        await cluster.edit(patch)
    assert sentence in str(rejected.value)


async def test_training_can_change_while_the_job_is_suspended_and_rebalancing_always(cluster: Cluster) -> None:
    await cluster.create(cluster.job())
    await cluster.edit({"training": {"rebalance": {"boundary": "Never"}}})
    await cluster.edit({"suspend": True})
    changed = await cluster.edit({"training": {"globalBatchSize": 200}, "network": {"peerPort": 20000}})
    assert changed["spec"]["training"]["globalBatchSize"] == 200
    assert changed["spec"]["network"]["peerPort"] == 20000
    await cluster.edit({"suspend": False})


async def test_the_elastic_range_can_change_while_the_job_runs(cluster: Cluster) -> None:
    await cluster.create(cluster.job())
    changed = await cluster.edit({"elasticPolicy": {"maxReplicas": 1}})
    assert changed["spec"]["elasticPolicy"]["maxReplicas"] == 1
