"""Parts of each worker's step in `heterotrain top`, and a page of bounded length for a job of many workers."""

from __future__ import annotations

from typing import Any

import pytest
from heterotrain_cli.cluster.phases import Phases, split
from heterotrain_cli.cluster.render import WORKERS, noticed
from heterotrain_cli.cluster.view import view_of
from heterotrain_cli.main import main
from heterotrain_operator.api.status import MAX_WORKER_ROWS
from support.api_stub import ApiStub
from support.cli_runner import CliRunner

JOB = "/apis/heterotrain.dev/v1alpha1/namespaces/ml/heterotrainjobs/digits"
PROXY = "/api/v1/namespaces/monitoring/services/prometheus:9090/proxy/api/v1/query"
SECONDS = {
    "digits-w0": {"load": 0.05, "forward": 0.2, "backward": 0.4, "sync": 0.1, "update": 0.05, "step": 0.8},
    "digits-w1": {"load": 0.0, "forward": 0.1, "backward": 0.1, "sync": 0.56, "update": 0.04, "step": 0.8},
}
"""Seconds of each phase in a second, as Prometheus' rate gives them; a fifth of the time was no step."""


def worker(number: int, **more: Any) -> dict[str, Any]:
    return {
        "name": f"digits-w{number}", "pool": "a100" if number % 2 else "t4", "state": "Training", "shareSamples": 8,
        "samplesPerSecond": 100.0 if number % 2 else 25.0, **more,
    }  # fmt: skip


def job(workers: list[dict[str, Any]], state: str = "Succeeded") -> dict[str, Any]:
    return {
        "apiVersion": "heterotrain.dev/v1alpha1", "kind": "HeteroTrainJob",
        "metadata": {"name": "digits", "namespace": "ml", "uid": "uid-7", "creationTimestamp": "2026-11-22T10:00:00Z"},
        "spec": {"training": {"globalBatchSize": 60}, "workerPools": [{"name": "a100"}, {"name": "t4"}]},
        "status": {"state": state, "ready": "2/2", "workers": workers},
    }  # fmt: skip


@pytest.fixture
def stub(stub: ApiStub) -> ApiStub:
    """An API server with the job, and with a Prometheus behind its proxy."""
    stub.lists["/api/v1/namespaces/ml/events"] = []
    stub.objects[JOB] = job([worker(0), worker(1)])
    return stub


def test_the_parts_of_a_step_are_those_of_the_step_itself() -> None:
    """All workers commit together: the least synchronisation is the exchange, and the rest is waiting."""
    found = split(SECONDS)
    first, second = found["digits-w0"], found["digits-w1"]
    assert first == Phases(load=0.05 / 0.8, compute=pytest.approx(0.75), exchange=0.125, wait=0.0, update=0.05 / 0.8)
    assert (second.exchange, second.wait) == (0.125, pytest.approx(0.575))
    for each in (first, second):
        assert each.load + each.compute + each.exchange + each.wait + each.update == pytest.approx(1.0)
    assert split({"digits-w0": {"step": 0.0, "sync": 0.0}, "digits-w1": {"load": 1.0}}) == {}
    assert split({}) == {}


@pytest.mark.parametrize("answer", [{}, {"data": {"result": [{"metric": {}, "value": [1, "1"]}]}}, {"data": None}])
def test_an_answer_of_another_form_is_said(stub: ApiStub, answer: dict[str, Any]) -> None:
    stub.objects[PROXY] = answer
    done = CliRunner().invoke(main, ["top", "digits", "--prometheus", "monitoring/prometheus:9090"])
    assert done.exit_code == 1
    assert "Prometheus at monitoring/prometheus:9090 cannot be read" in done.output


def test_top_shows_the_parts_of_each_step(stub: ApiStub) -> None:
    result = [
        {"metric": {"worker": worker, "phase": phase}, "value": [1, str(value)]}
        for worker, of in SECONDS.items()
        for phase, value in of.items()
    ]
    stub.objects[PROXY] = {"status": "success", "data": {"resultType": "vector", "result": result}}
    done = CliRunner().invoke(main, ["top", "digits", "--prometheus", "monitoring/prometheus:9090"])
    assert done.exit_code == 0, done.output
    lines = [line.split() for line in done.stdout.splitlines()]
    (heading,) = [line for line in lines if line[:1] == ["worker"]]
    assert heading[-5:] == ["load", "compute", "exchange", "wait", "update"]
    assert [line[-5:] for line in lines if line[:1] == ["digits-w1"]] == [["0%", "25%", "12%", "58%", "5%"]]
    asked = [query["query"] for _, path, query, _ in stub.requests if path == PROXY]
    assert asked == ['sum by (worker, phase) (rate(heterotrain_phase_seconds_total{job_uid="uid-7"}[1m]))']
    assert "exchange" not in CliRunner().invoke(main, ["top", "digits"]).stdout
    missing = CliRunner().invoke(main, ["top", "digits", "--prometheus", "monitoring/prom:9090"])
    assert missing.exit_code == 2
    stub.refusals[("GET", PROXY)] = [(403, "services is forbidden")]
    denied = CliRunner().invoke(main, ["top", "digits", "--prometheus", "monitoring/prometheus:9090"])
    assert "ask for the right to get services/proxy there, or give a URL" in denied.stderr
    assert "there is no service prom:9090 in namespace monitoring: `kubectl get services -A`" in missing.stderr


def test_the_page_of_a_large_job_has_few_lines_and_what_needs_attention(stub: ApiStub) -> None:
    """The operator writes 64 workers of 400 into the status."""
    workers = [worker(number) for number in range(MAX_WORKER_ROWS)]
    workers[7] |= {"state": "Lost"}
    del workers[7]["samplesPerSecond"]
    workers[41] |= {"samplesPerSecond": 50.0}  # slow for an A100, and still faster than each T4
    stub.objects[JOB] = job(workers)
    done = CliRunner().invoke(main, ["describe", "digits"])
    assert done.exit_code == 0, done.output
    assert len(done.stdout.splitlines()) < WORKERS + 20
    names = [each.name for each in noticed(view_of(job(workers)).status.workers)]
    assert len(names) == WORKERS
    assert names[:2] == ["digits-w7", "digits-w41"]
    assert "30 of the workers: those that do not train" in done.stdout


def test_all_workers_are_shown_up_to_the_limit() -> None:
    found = view_of(job([worker(number) for number in range(WORKERS)])).status.workers
    assert noticed(found) == found
