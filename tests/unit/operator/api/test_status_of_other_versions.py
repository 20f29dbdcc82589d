"""A status that another version wrote, or that was damaged: what can be read is kept, field by field."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
from heterotrain_core.contract.outcome import Ending
from heterotrain_operator.api.status import HeteroTrainJobStatus, as_body, read_status
from support.fake_cluster import FakeCluster, a_running_job
from support.repeat import first_seed, times

Body = dict[str, Any]


def a_finished_job() -> FakeCluster:
    cluster = a_running_job()
    cluster.end("job-w2", exit_code=1)
    cluster.settle()
    for name in cluster.pods:
        if name != "job-w2":
            cluster.end(name, Ending.FINISHED)
    cluster.settle()
    assert cluster.condition("Succeeded")[0] == "True"
    assert cluster.status["restarts"] == 1
    return cluster


def longer(status: Body) -> None:
    status["reason"] = "r" * 1025
    status["lastFailure"] = "f" * 5000
    status["metrics"] = {f"metric{i:02}": 0.5 for i in range(40)}
    status["conditions"] = [{**c, "message": "m" * 40_000} for c in status["conditions"]]
    status["pools"][0]["name"] = "p" * 100


def unknown(status: Body) -> None:
    status["state"] = "Hibernating" * 5
    status["phase"] = {"new": ["field"]}
    status["conditions"].append({"type": "Brandnew", "status": "Perhaps", "reason": "New", "severity": 3})
    status["workers"].append({"name": "w9", "pool": "a", "state": "Dreaming", "aura": None})
    status["internal"] |= {"pools": [{"name": "a", "speed": "fast"}], "version": 9}


def damaged(status: Body) -> None:
    status["epoch"], status["step"] = "many", 10**301
    status["loss"] = float("nan")
    status["lastCheckpoint"] = {"step": 5, "time": "yesterday"}
    status["prediction"] = {"plan": "1.2"}
    status["trainingSince"] = "2027-01-15T08:00:00"
    status["plan"]["applied"] = ["1.2"]
    status["pools"][1] = 7
    status["workers"] = "none"


@pytest.mark.parametrize("change", [longer, unknown, damaged])
def test_a_finished_job_stays_finished_with_its_counts(change: Callable[[Body], None]) -> None:
    cluster = a_finished_job()
    before = copy.deepcopy(cluster.status)
    change(cluster.job["status"])
    found = as_body(read_status(cluster.job))
    for field in ("restarts", "startTime", "completionTime", "lastFailureTime", "observedGeneration"):
        assert found[field] == before[field], field
    assert found["plan"]["desired"] == before["plan"]["desired"]
    assert found["internal"]["accountedWorkers"] == before["internal"]["accountedWorkers"]
    pods = set(cluster.pods)
    cluster.settle()
    assert set(cluster.pods) <= pods
    assert cluster.condition("Succeeded")[0] == "True"
    assert (cluster.status["restarts"], cluster.status["completionTime"]) == (1, before["completionTime"])


def test_a_running_job_keeps_its_plan_and_its_counts() -> None:
    cluster = a_running_job()
    cluster.end("job-w2", exit_code=1)
    cluster.settle()
    version = cluster.version()
    damaged(cluster.job["status"])
    longer(cluster.job["status"])
    cluster.settle()
    assert (cluster.status["restarts"], cluster.version()) == (1, version)


def test_no_random_damage_makes_reading_fail_or_touches_other_fields() -> None:
    rng = random.Random(first_seed(gate=3))  # noqa: S311  # reproducible
    whole = a_finished_job().job
    wild: tuple[Any, ...] = (None, True, -1, 10**400, 1e308, float("inf"), "", "x" * 50_000, [], {}, [[]], {"a": 1})
    for _ in range(times(gate=150, every=5000)):
        job = copy.deepcopy(whole)
        name = rng.choice([name for name in job["status"] if name not in ("conditions", "restarts")])
        where: Any = job["status"]
        key: Any = name
        while isinstance(where[key], dict | list) and where[key] and rng.random() < 0.8:
            where = where[key]
            key = rng.choice(list(where)) if isinstance(where, dict) else rng.randrange(len(where))
        where[key] = rng.choice(wild)
        found = read_status(job)
        assert found.restarts == 1
        assert found.conditions == read_status(whole).conditions
        changed = {n for n in HeteroTrainJobStatus.model_fields if getattr(found, n) != getattr(read_status(whole), n)}
        assert len(changed) <= 1
    for status in wild:
        assert isinstance(read_status({"status": status}), HeteroTrainJobStatus)
