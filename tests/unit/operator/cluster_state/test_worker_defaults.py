"""Defaults of an administrator for workers: below the job's template, and in everything that is made from it."""

from __future__ import annotations

import json

import pytest
from heterotrain_operator.cluster_state.parse import parse_job
from heterotrain_operator.cluster_state.views import ValidJob
from heterotrain_operator.cluster_state.worker_defaults import WorkerDefaults, worker_defaults
from heterotrain_operator.decide.objects.pods import build_pod
from support.fake_cluster import job_body, pool

GIVEN = {
    "labels": {"team": "ml", "tier": "low"},
    "annotations": {"note": "default"},
    "env": [{"name": "PROXY", "value": "p"}, {"name": "LEVEL", "value": "1"}],
}
MAIN = {"kubectl.kubernetes.io/default-container": "main"}
TEMPLATE = {
    "metadata": {"labels": {"tier": "high"}, "annotations": MAIN},
    "spec": {
        "containers": [
            {"name": "side", "image": "i"},
            {"name": "main", "image": "i", "env": [{"name": "LEVEL", "value": "2"}]},
        ]
    },
}


def test_workers_get_what_their_template_does_not_have() -> None:
    job = parse_job(job_body(pool("a"), template=TEMPLATE), None, worker_defaults(json.dumps(GIVEN)))
    assert isinstance(job, ValidJob), job.problem
    pod = build_pod(job, job.spec.worker_pools[0], 0, plan_version="1.1")
    metadata, (side, main) = pod["metadata"], pod["spec"]["containers"]
    assert (metadata["labels"]["team"], metadata["labels"]["tier"]) == ("ml", "high")
    assert metadata["annotations"]["note"] == "default"
    assert "env" not in side
    own = {each["name"]: each.get("value") for each in main["env"]}
    assert (own["PROXY"], own["LEVEL"]) == ("p", "2")
    assert [each["name"] for each in main["env"]].count("LEVEL") == 1


def test_without_defaults_a_template_is_the_users_own() -> None:
    assert worker_defaults("").in_template(TEMPLATE) is TEMPLATE
    found = WorkerDefaults(labels={"a": "b"}).in_template({})
    assert found == {"metadata": {"labels": {"a": "b"}, "annotations": {}}, "spec": {"containers": []}}


@pytest.mark.parametrize("text", ["[]", "{", '{"env": [{"value": "1"}]}', '{"labels": ["a"]}', "1", '{"env": 1}'])
def test_other_texts_are_refused_in_a_sentence(text: str) -> None:
    with pytest.raises(ValueError, match="worker defaults"):
        worker_defaults(text)
