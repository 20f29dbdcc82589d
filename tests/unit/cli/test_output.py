"""``-o json|yaml``: every command prints one document, with the names that the document promises."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from click.testing import Result
from heterotrain_cli.bench.result import ScalingRow, as_document
from heterotrain_cli.cluster import submit
from heterotrain_cli.cluster.show import description_document
from heterotrain_cli.cluster.view import view_of
from heterotrain_cli.main import COMMANDS, main
from heterotrain_cli.output import OUTPUTS, print_document
from heterotrain_cli.preflight import checks_document
from support.api_stub import ApiStub
from support.cli_runner import CliRunner

JOBS = "/apis/heterotrain.dev/v1alpha1/namespaces/ml/heterotrainjobs"
PODS, EVENTS = "/api/v1/namespaces/ml/pods", "/api/v1/namespaces/ml/events"
NOW = datetime(2026, 11, 22, 12, 0, 0, tzinfo=UTC)
DOCUMENT = (Path(__file__).parents[3] / "docs/command-line.md").read_text(encoding="utf-8")
BODY: dict[str, Any] = {
    "apiVersion": "heterotrain.dev/v1alpha1",
    "kind": "HeteroTrainJob",
    "metadata": {"name": "digits", "namespace": "ml"},
    "spec": {
        "training": {"globalBatchSize": 60, "epochs": 8},
        "workerPools": [{"name": "a100", "maxReplicas": 2}],
        "template": {"spec": {"containers": [{"name": "trainer", "image": "x"}]}},
    },
}
STATUS = {
    "state": "Running", "reason": "2 of 2 workers train", "pricePerHour": "9.50", "estimatedRemainingSeconds": 3600,
    "startTime": "2026-11-22T11:00:00Z",
    "workers": [
        {"name": "digits-w0", "pool": "a100", "state": "Training", "message": "its node is tainted: it leaves"},
    ],
}  # fmt: skip
EVENT = {"metadata": {}, "reason": "WorkerLost", "message": "node n1\ngone", "type": "Warning",
         "lastTimestamp": "2026-11-22T11:30:00Z"}  # fmt: skip
JOB = {**BODY, "metadata": {**BODY["metadata"], "uid": "u", "creationTimestamp": "2026-11-22T10:00:00Z"}}
MACHINE = "ok       shared memory  64 GiB\nfailed   store          [a/0, a/1] denied\n1 of 2 checks failed"


def promised(command: str) -> set[str]:
    """Return the names that the document promises for a command: its row, and rows below it for parts."""
    rows, found = iter(DOCUMENT.splitlines()), set[str]()
    for row in rows:
        if row.startswith(f"| `{command}` |"):
            found |= set(re.findall(r"`(\w+)`", row.split("|")[2]))
            for more in rows:
                if not more.startswith("| |"):
                    return found
                found |= set(re.findall(r"`(\w+)`", more.partition(" each of ")[0]))
    raise AssertionError(f"no row for {command}")


@pytest.fixture
def stub(stub: ApiStub) -> ApiStub:
    """An API server with one running job, and a kubeconfig for it."""
    stub.objects = {f"{JOBS}/digits": {**JOB, "status": dict(STATUS)}}
    stub.lists = {PODS: [], EVENTS: [EVENT]}
    return stub


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments), catch_exceptions=False)


def job_file(folder: Path, body: dict[str, Any]) -> str:
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(body), encoding="utf-8")
    return str(path)


def read(text: str, output: str) -> Any:
    return json.loads(text) if output == "json" else yaml.safe_load(text)


@pytest.mark.parametrize("output", ["json", "yaml"])
def test_describe(stub: ApiStub, output: str) -> None:
    result = run("describe", "digits", "-o", output)
    assert (result.exit_code, result.stderr) == (0, "")
    found = read(result.stdout, output)
    assert set(found) == promised("describe")
    assert found["status"] == STATUS
    assert found["hasProblem"] is True
    assert found["findings"][0] == {"what": "worker digits-w0: its node is tainted: it leaves", "isProblem": True}
    assert found["events"] == [
        {"time": "2026-11-22T11:30:00Z", "type": "Warning", "reason": "WorkerLost", "message": "node n1 gone"}
    ]


def test_durations_and_costs_of_a_description() -> None:
    found = description_document(view_of({**JOB, "status": STATUS}, NOW), [])
    assert (found["ageSeconds"], found["runtimeSeconds"], found["costUntilEnd"]) == (7200.0, 3600.0, 9.5)
    fresh = description_document(view_of(JOB, NOW), [])
    assert (fresh["state"], fresh["status"], fresh["runtimeSeconds"], fresh["costUntilEnd"]) == ("New", {}, None, None)


@pytest.mark.parametrize("output", ["json", "yaml"])
def test_validate(stub: ApiStub, tmp_path: Path, output: str) -> None:
    good = run("validate", job_file(tmp_path, BODY), "-o", output)
    assert (good.exit_code, good.stderr) == (0, "")
    found = read(good.stdout, output)
    assert set(found) == promised("validate")
    assert found == {
        "valid": True, "mistake": None, "name": "digits", "namespace": "ml", "checkedByCluster": False, "notes": [],
    }  # fmt: skip
    stub.refusals[("POST", JOBS)] = [(422, "the quota is used up")]
    bad = run("validate", job_file(tmp_path, BODY), "--cluster", "-o", output)
    found = read(bad.stdout, output)
    assert (bad.exit_code, found["valid"], found["checkedByCluster"]) == (2, False, True)
    assert bad.stderr == f"Error: {found['mistake']}\n"


@pytest.mark.parametrize("output", ["json", "yaml"])
def test_submit_and_wait_print_the_job(stub: ApiStub, tmp_path: Path, output: str) -> None:
    file = job_file(tmp_path, {**BODY, "metadata": {"name": "text"}})
    made = run("submit", file, "-o", output)
    assert (made.exit_code, made.stderr) == (0, "job text is created in namespace ml\n")
    assert read(made.stdout, output) == stub.objects[f"{JOBS}/text"]
    ended = {**stub.objects[f"{JOBS}/text"], "status": {"state": "Failed", "reason": "worker w1 failed"}}
    stub.objects[f"{JOBS}/text"] = ended
    waited = run("wait", "text", "-o", output)
    assert waited.exit_code == submit.JOB_FAILED
    assert read(waited.stdout, output) == ended
    assert waited.stderr == "job text: Failed after –. worker w1 failed\n"


def test_preflight_names_each_check_and_the_ranks_that_differ() -> None:
    found = checks_document(["starting", *MACHINE.splitlines()], failed=True, job=None)
    assert set(found) == promised("preflight")
    assert found == {
        "passed": False, "job": None, "reason": None,
        "checks": [
            {"check": "shared memory", "verdict": "ok", "ranks": [], "result": "64 GiB"},
            {"check": "store", "verdict": "failed", "ranks": ["a/0", "a/1"], "result": "denied"},
        ],
    }  # fmt: skip


def test_preflight_of_a_job_prints_a_document_and_keeps_its_status(stub: ApiStub, tmp_path: Path) -> None:
    made = f"{JOBS}/digits-preflight"
    stub.lists[PODS] = [{"metadata": {"name": "digits-preflight-w0"}, "spec": {"containers": [{"name": "trainer"}]}}]
    stub.logs = {"digits-preflight-w0": f"{MACHINE}\n"}
    answer = stub.answer

    def ended(method: str, path: str, query: dict[str, str], body: Any) -> tuple[int, Any]:
        status, found = answer(method, path, query, body)
        over = {"state": "Failed", "reason": "a check failed"}
        return status, {**found, "status": over} if (method, path) == ("GET", made) else found

    stub.answer = ended  # type: ignore[method-assign]  # the operator's part
    result = run("preflight", job_file(tmp_path, BODY), "-o", "json")
    assert result.exit_code == 3, result.stderr
    found = json.loads(result.stdout)
    assert (found["passed"], found["job"], found["reason"]) == (False, "digits-preflight", "a check failed")
    assert [each["check"] for each in found["checks"]] == ["shared memory", "store"]


def test_rows_of_a_bench() -> None:
    row = ScalingRow(workers=2, batch_samples=64, step_s=0.5, samples_per_s=128.0, speed_up=1.9, efficiency=0.95)
    named = re.search(r"each of `rows`: (.*) \|", DOCUMENT)
    assert named is not None
    assert set(as_document(row)) == set(re.findall(r"`(\w+)`", named[1]))
    assert promised("bench") == {"settings", "environment", "rows", "profile", "profileReason"}


@pytest.mark.parametrize("name", [each for each in COMMANDS if each not in ("plot", "export", "init")])
def test_the_option_is_the_same_everywhere(name: str) -> None:
    command = main.get_command(click.Context(main), name)
    assert command is not None
    for parameter in command.params:
        if "-o" in parameter.opts:
            assert isinstance(parameter.type, click.Choice)
            assert tuple(parameter.type.choices) == OUTPUTS


def test_numbers_that_json_lacks_become_null(capsys: pytest.CaptureFixture[str]) -> None:
    for output in ("json", "yaml"):
        print_document({"a": float("nan"), "b": (1, float("inf")), "c": "ü"}, output)
        assert read(capsys.readouterr().out, output) == {"a": None, "b": [1, None], "c": "ü"}
