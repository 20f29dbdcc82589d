"""Thousands of random jobs, plans and outcomes: no part of a pass fails, and each status passes the CRD's schema."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import pytest
from heterotrain_core.contract import keys
from heterotrain_core.contract.codec import decode_plan
from heterotrain_core.contract.outcome import MAX_COUNT, Ending, Outcome, decode_outcome, encode_outcome
from heterotrain_operator.api.crd import crd
from heterotrain_operator.api.status import as_body
from heterotrain_operator.decide.job import decide
from jsonschema import Draft7Validator
from support.fake_cluster import JOB_UID, FakeCluster, a_running_job
from support.repeat import first_seed, times

PROPERTIES = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
STATUS = Draft7Validator(PROPERTIES["status"])
WILD: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    1,
    2**53,
    2**63,
    10**400,
    0.1,
    1e308,
    float("inf"),
    float("nan"),
    "",
    "x" * 300,
)
WILD += ("0.1n", "9" * 32, "٣", "\x00", [], {}, [None], {"": None}, "9999-12-31T23:59:59Z", "0001-01-01T00:00:00Z")


def by_schema(rng: random.Random, schema: dict[str, Any], depth: int = 0) -> Any:
    """Return a value that the schema allows, often at its limits."""
    if "enum" in schema:
        return rng.choice(schema["enum"])
    if "anyOf" in schema:
        return rng.choice((0, 1, 4, "500m", "1Gi", "0.1n", "1n", "0", ".5", "1e99", "999999999999999999Ei"))
    kind = schema.get("type")
    if kind == "object":
        needed, chance = schema.get("required", ()), 0.4 if depth < 3 else 0.2
        fields = schema.get("properties", {}).items()
        found = {n: by_schema(rng, s, depth + 1) for n, s in fields if n in needed or rng.random() < chance}
        if isinstance(more := schema.get("additionalProperties"), dict) and rng.random() < 0.5:
            names = ("cpu", "memory", "nvidia.com/gpu", "ephemeral-storage", "pods", "pool", "example.com/x")
            found[rng.choice(names)] = by_schema(rng, more, depth + 1)
        return found
    if kind == "array":
        number = max(schema.get("minItems", 0), min(rng.choice((0, 1, 2)), schema.get("maxItems", 2)))
        return [by_schema(rng, schema["items"], depth + 1) for _ in range(number)]
    if kind in ("integer", "number"):
        low, high = schema.get("minimum", -(2**31)), schema.get("maximum", 2**31)
        return rng.choice((low, high, min(high, low + 1), min(high, max(low, 3))))
    if kind == "boolean":
        return rng.random() < 0.1
    if schema.get("format") == "date-time":
        return rng.choice(("2027-01-31T18:00:00Z", "9998-12-31T23:59:59Z", "2300-01-01T00:00:00+14:00"))
    if schema.get("pattern", "").startswith("^[0-9]+"):
        return rng.choice(("0", "1.5", "9" * 32, "0." + "0" * 29 + "1"))
    return rng.choice(("a", "main", "x" * min(63, schema.get("maxLength", 63)), "file:///c", "Always", "NoSchedule"))


def mutated(rng: random.Random, part: Any, chance: float) -> Any:
    """Return a value with some parts replaced by others of any type."""
    if rng.random() < chance:
        return copy.deepcopy(rng.choice(WILD))
    if isinstance(part, dict):
        return {name: mutated(rng, value, chance) for name, value in part.items()}
    return [mutated(rng, value, chance) for value in part] if isinstance(part, list) else part


def assert_a_valid_pass(cluster: FakeCluster) -> None:
    decision = decide(cluster.observe())
    assert decision.faults == ()
    if decision.status is not None:
        STATUS.validate(as_body(decision.status))


@pytest.mark.heavy
def test_no_random_spec_makes_a_pass_fail() -> None:
    """Every second spec is valid by the schema; the others have parts of any type."""
    rng = random.Random(first_seed(gate=5))  # noqa: S311  # reproducible
    specs, understood = times(gate=1500, every=100_000), 0
    for number in range(specs):
        pools = [{**by_schema(rng, PROPERTIES["spec"]["properties"]["workerPools"]["items"]), "name": n} for n in "ab"]
        for each in pools:
            each.update(maxReplicas=rng.choice((1, 2, 5)), minReplicas=rng.choice((0, 0, 1)))
            if rng.random() < 0.7:
                each["nodeSelector"] = {"pool": each["name"]}
        spec = by_schema(rng, PROPERTIES["spec"])
        given = {name: spec[name] for name in spec if name not in ("template", "workerPools")}
        if rng.random() < 0.7:
            given["training"] = {"globalBatchSize": rng.choice((100, 10_000_000))}
            given = {n: v for n, v in given.items() if n not in ("objective", "deadline", "elasticPolicy", "managedBy")}
        cluster = FakeCluster(*pools).with_nodes("a", "b")
        cluster.job["spec"] = {**cluster.job["spec"], **given}
        if rng.random() < 0.3:
            cluster.job["spec"]["template"] = spec["template"]
        if number % 2:
            cluster.job["spec"] = {name: mutated(rng, part, 0.03) for name, part in cluster.job["spec"].items()}
        understood += cluster.job_view.spec is not None
        assert_a_valid_pass(cluster)
        if cluster.job_view.spec is not None and number % 10 == 0:
            for _ in range(3):
                cluster.step()
                cluster.schedule().run()
            assert_a_valid_pass(cluster)
    assert understood > specs / 20


def test_no_random_plan_in_the_config_map_makes_a_pass_fail() -> None:
    rng = random.Random(first_seed(gate=6))  # noqa: S311  # reproducible
    cluster = a_running_job()
    assert cluster.plan is not None
    whole, plans, refused = cluster.plan_json, times(gate=400, every=20_000), 0
    for number in range(plans):
        text = json.dumps(mutated(rng, whole, 0.02))
        text = text if rng.random() < 0.9 else text[: rng.randrange(len(text))]
        cluster.plan["data"][keys.PLAN_KEY] = text
        refused += not hasattr(decode_plan(text, job_uid=JOB_UID), "members")
        if number % 5 == 0:
            assert_a_valid_pass(cluster)
    assert plans / 4 < refused < plans


def test_no_random_termination_message_makes_a_pass_fail() -> None:
    rng = random.Random(first_seed(gate=7))  # noqa: S311  # reproducible
    cluster = a_running_job()
    cluster.end("job-w2")
    ended = cluster.pods["job-w2"]["status"]["containerStatuses"][0]["state"]["terminated"]
    outcome = Outcome(ending=Ending.FINISHED, reason="r", epoch=3, step=4, metrics={"a": 1.0})
    whole, messages, understood = json.loads(encode_outcome(outcome)), times(gate=1000, every=50_000), 0
    for number in range(messages):
        text = json.dumps(mutated(rng, whole, 0.2))
        text = text if rng.random() < 0.9 else rng.choice(("[", '{"a":', "9")) * rng.randrange(5000)
        found = decode_outcome(text)
        understood += found is not None
        assert found is None or 0 <= found.step <= MAX_COUNT
        if number % 20 == 0:
            ended["message"] = text
            assert_a_valid_pass(cluster)
    assert understood > messages / 10
