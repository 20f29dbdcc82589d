"""Reading a job: all rules are checked again, and each message is one sentence that says what to do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, get_args

import pytest
from heterotrain_operator.api.internal_status import InternalPool, InternalStatus, PoolSpeed
from heterotrain_operator.api.reading import SpecError, read_spec
from heterotrain_operator.api.schema import Model, SpecRule
from heterotrain_operator.api.status import (
    Condition,
    HeteroTrainJobStatus,
    PoolStatus,
    WorkerStatus,
    as_body,
    read_status,
)
from heterotrain_operator.api.template import PodTemplate, PodTemplatePatch
from heterotrain_operator.api.v1alpha1 import HeteroTrainJobSpec
from support.fake_cluster import job_body, pool

NOW = "2027-01-15T08:00:00Z"
RANGE = {"min": 64, "max": 4096}

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no batch": ({"globalBatchSize": None}, "exactly one of globalBatchSize (a fixed batch) and adaptiveBatch"),
    "two batches": (
        {"globalBatchSize": 64, "adaptiveBatch": RANGE},
        "exactly one of globalBatchSize (a fixed batch) and adaptiveBatch",
    ),
    "minimum above maximum": (
        {"adaptiveBatch": {"min": 9, "max": 8}},
        "spec.training.adaptiveBatch: adaptiveBatch.min is larger than adaptiveBatch.max",
    ),
    "batch below workers": ({"globalBatchSize": 2}, "spec: the batch is too small for the maximum number of processes"),
    "least batch below workers": (
        {"adaptiveBatch": {"min": 2, "max": 8}},
        "too small for the maximum number of processes",
    ),
    "steps without everySteps": ({"rebalance": {"boundary": "Steps"}}, "everySteps belongs to boundary: Steps"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_contradiction_is_told(case: str) -> None:
    training, sentence = REFUSED[case]
    with pytest.raises(SpecError) as error:
        read_spec(job_body(spec={"training": training}))
    assert sentence in str(error.value)


@pytest.mark.parametrize("uri", ["s3://key:se/cret@bucket/x", "ftp://u:1@host/x", "s3://bucket/x?token=hush"])
def test_credentials_in_a_uri_are_refused_and_not_repeated(uri: str) -> None:
    with pytest.raises(SpecError, match=r"spec.checkpoint: uri must have no password and no query") as error:
        read_spec(job_body(spec={"checkpoint": {"uri": uri}}))
    assert "hush" not in str(error.value)
    with pytest.raises(SpecError, match="must be a URI") as error:
        read_spec(job_body(spec={"checkpoint": {"uri": f"S3{uri}".replace("S3s3", "S3")}}))
    assert "cret" not in str(error.value)


@pytest.mark.parametrize(
    "uri", ["ftp://host:21/a@b", "abfs://files@account.dfs.net/x", "sftp://me@host/x", "file:///a"]
)
def test_other_uris_are_accepted(uri: str) -> None:
    assert read_spec(job_body(spec={"checkpoint": {"uri": uri}})).checkpoint is not None


def test_more_processes_than_a_plan_holds_are_refused_unless_the_policy_has_fewer() -> None:
    pools = [pool(name, maxReplicas=200, numProcPerWorker=16) for name in "ab"]
    training = {"globalBatchSize": 10_000}
    with pytest.raises(SpecError, match="more than 5000 processes do not fit into a plan: lower elasticPolicy"):
        read_spec(job_body(*pools, spec={"training": training}))
    read_spec(job_body(*pools, spec={"training": training, "elasticPolicy": {"maxReplicas": 312}}))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"objective": "throughput"}, "spec.objective is throughput, but must be one of Throughput, Goodput"),
        (
            {"workerPools": [pool("a", capacityType="spot")]},
            "workerPools[0].capacityType is spot, but must be one of",
        ),
        ({"training": {"precision": "bf16"}}, "spec.training.precision is bf16, but must be one of Auto"),
    ],
)
def test_a_choice_is_spelled_as_the_api_server_wants_it(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SpecError) as error:
        read_spec(job_body(spec=change))
    assert sentence in str(error.value)


def test_a_deadline_beyond_all_calendars_is_refused() -> None:
    spec = {"objective": "Deadline", "deadline": "9999-12-31T23:59:59-14:00"}
    with pytest.raises(SpecError, match="give a time before the year 9999"):
        read_spec(job_body(spec=spec))


def test_training_starts_with_the_batch_that_the_learning_rate_belongs_to() -> None:
    fixed = read_spec(job_body(pool("a"), spec={"training": {"globalBatchSize": 512}}))
    adaptive = read_spec(job_body(pool("a"), spec={"training": {"adaptiveBatch": RANGE}}))
    assert (fixed.training.base_batch_samples, adaptive.training.base_batch_samples) == (512, 64)


def test_cost_without_prices_is_refused() -> None:
    unpriced = job_body(pool("a", pricePerHour="3.67"), pool("b"), spec={"objective": "Cost"})
    with pytest.raises(SpecError, match="objective: Cost compares prices: give every pool its pricePerHour"):
        read_spec(unpriced)


def rules_of(model: type[Model]) -> Iterator[SpecRule]:
    """Yield the rules of a model and of all its parts, without those of the pod template."""
    yield from model.rules
    for field in model.model_fields.values():
        for part in (field.annotation, *get_args(field.annotation)):
            if isinstance(part, type) and issubclass(part, Model) and part not in (PodTemplate, PodTemplatePatch):
                yield from rules_of(part)


def test_every_rule_of_the_api_server_is_checked_on_reading_too() -> None:
    rules = list(rules_of(HeteroTrainJobSpec))
    assert len(rules) > 10
    assert [rule.message for rule in rules if (rule.holds is None) != ("oldSelf" in rule.cel)] == []


POLICY = {"minReplicas": 3, "maxReplicas": 2}
BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "minReplicas above maxReplicas": ({"elasticPolicy": POLICY}, "spec.elasticPolicy: minReplicas is larger"),
    "minReplicas above the pools": ({"elasticPolicy": {"minReplicas": 9}}, "larger than the sum of the pools'"),
    "a pool's minReplicas": ({"workerPools": [pool("a", **POLICY)]}, "spec.workerPools[a]: the pool's minReplicas"),
    "pools' minReplicas": (
        {"workerPools": [pool("a", minReplicas=2, maxReplicas=2)], "elasticPolicy": {"maxReplicas": 1}},
        "the sum of the pools' minReplicas is larger",
    ),
    "processes": (
        {"workerPools": [pool("a", numProcPerWorker=8)], "training": {"globalBatchSize": 7}},
        "too small for the maximum number of processes",
    ),
    "stages with a batch that changes": (
        {"parallelism": {"mode": "Pipeline"}, "training": {"globalBatchSize": None, "adaptiveBatch": RANGE}},
        "Pipeline and Auto are planned for a fixed batch",
    ),
    "a link without bandwidth": ({"parallelism": {"linkMbitPerSecond": 0}}, "must be at least 1"),
    "a link of an unknown pool": (
        {"parallelism": {"links": [{"between": ["a", "z"], "mbitPerSecond": 100}]}},
        "spec.parallelism.links names pool z, which is not in spec.workerPools",
    ),
    "a link twice": (
        {"parallelism": {"links": [{"between": pair, "mbitPerSecond": 100} for pair in (["a", "b"], ["b", "a"])]}},
        "has the pair b, a twice",
    ),
    "a link of one pool": ({"parallelism": {"links": [{"between": ["a"], "mbitPerSecond": 100}]}}, "links"),
    "a slow link without bandwidth": (
        {"parallelism": {"links": [{"between": ["a", "b"], "mbitPerSecond": 0}]}},
        "must be at least 1",
    ),
    "an unknown mode": ({"parallelism": {"mode": "Tensor"}}, "must be one of"),
    "a pool twice": ({"workerPools": [pool("a"), pool("a")]}, "names a pool twice"),
    "some prices": (
        {
            "workerPools": [pool("a", pricePerHour="1"), pool("b")],
            "objective": "Deadline",
            "deadline": "2099-01-01T00:00:00Z",
        },
        "give every pool its pricePerHour, or none of them",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_rule_is_reported_with_its_place(case: str) -> None:
    spec, sentence = BROKEN[case]
    with pytest.raises(SpecError) as error:
        read_spec(job_body(spec=spec))
    assert sentence in str(error.value)


def test_the_status_reads_what_it_writes() -> None:
    speed = PoolSpeed(
        samples=20,
        per_sample_seconds=0.1,
        fixed_seconds=0.2,
        backward_per_sample_seconds=0.3,
        backward_fixed_seconds=0.4,
    )
    pools = (InternalPool(name="a", speed=speed), InternalPool(name="b", exhausted_since=NOW, exhausted_tries=2))
    condition = Condition(type="Ready", status="True", reason="Training", message="", last_transition_time=NOW)
    status = HeteroTrainJobStatus(
        state="Running",
        epoch=3,
        metrics={"accuracy": 0.9},
        selector="heterotrain.dev/job=job",
        pools=(PoolStatus(name="a", desired=1, replicas=1, placed=1, ready=0),),
        workers=(WorkerStatus(name="job-w0", pool="a", state="Training", binding="Compute"),),
        conditions=(condition,),
        internal=InternalStatus(accounted_workers=("uid-1",), pools=pools),
    )
    assert read_status({"status": json.loads(json.dumps(as_body(status)))}) == status


def test_private_values_of_another_version_count_as_none_and_the_rest_is_read() -> None:
    body = {"status": {"restarts": 2, "internal": {"pools": "of another version"}}}
    assert read_status(body) == HeteroTrainJobStatus(restarts=2)


def test_a_template_with_an_empty_creation_timestamp_is_accepted() -> None:
    body = job_body()
    body["spec"]["template"]["metadata"] = {"creationTimestamp": None, "labels": {"team": "vision"}}
    assert read_spec(body).template.metadata.labels == {"team": "vision"}
