"""Commands on a cluster: what they send, what they show, and one sentence for each failure."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import Result
from heterotrain_cli.cluster import api, checkpoint, submit
from heterotrain_cli.cluster.diagnosis import findings
from heterotrain_cli.cluster.listing import jobs_table
from heterotrain_cli.cluster.values import duration, number
from heterotrain_cli.cluster.view import trained, view_of
from heterotrain_cli.errors import InputError
from heterotrain_cli.forecast.job import read_job
from heterotrain_cli.job_file import read_job_file
from heterotrain_cli.main import main
from heterotrain_cli.preflight import checking_job
from heterotrain_core.contract import keys
from support.api_stub import ApiStub, write_kubeconfig
from support.cli_runner import CliRunner

JOBS = "/apis/heterotrain.dev/v1alpha1/namespaces/ml/heterotrainjobs"
ALL_JOBS = "/apis/heterotrain.dev/v1alpha1/heterotrainjobs"
PODS, EVENTS = "/api/v1/namespaces/ml/pods", "/api/v1/namespaces/ml/events"
NOW = datetime(2026, 11, 22, 12, 0, 0, tzinfo=UTC)
SPEC: dict[str, Any] = {
    "training": {"globalBatchSize": 60, "epochs": 8},
    "workerPools": [
        {"name": "a100", "minReplicas": 1, "maxReplicas": 2},
        {"name": "t4", "maxReplicas": 3, "capacityType": "Spot"},
    ],
    "template": {"spec": {"containers": [{"name": "trainer", "image": "x"}]}},
}


CHECK = "check that it runs and watches this namespace (`heterotrain-operator check`)"


def condition(kind: str, status: str, reason: str, message: str = "") -> dict[str, Any]:
    return {
        "type": kind, "status": status, "reason": reason, "message": message,
        "lastTransitionTime": "2026-11-22T11:00:00Z",
    }  # fmt: skip


def job(name: str = "digits", **status: Any) -> dict[str, Any]:
    return {
        "apiVersion": "heterotrain.dev/v1alpha1",
        "kind": "HeteroTrainJob",
        "metadata": {
            "name": name, "namespace": "ml", "uid": f"uid-{name}", "creationTimestamp": "2026-11-22T10:00:00Z",
            "resourceVersion": "7",
        },
        "spec": json.loads(json.dumps(SPEC)),
        "status": status,
    }  # fmt: skip


RUNNING: dict[str, Any] = {
    "state": "Running", "reason": "5 of 5 workers train", "ready": "5/5", "epoch": 3, "step": 1200,
    "progress": "41%", "progressPercentage": 41, "samplesPerSecond": 652.0, "stepSeconds": 0.092, "loss": 0.31,
    "efficiency": 0.62, "plan": {"efficiencyCeiling": 0.97, "layout": "1 member: [a100: units 0-17 | t4: 18-23]"},
    "estimatedRemainingSeconds": 3700,
    "pricePerHour": "9.50", "cost": "4.2500", "globalBatchSize": 60, "disruptions": 1,
    "startTime": "2026-11-22T10:00:10Z",
    "lastCheckpoint": {"step": 1100, "time": "2026-11-22T11:58:00Z"},
    "conditions": [condition("SpeedsLearned", "True", "Learned"), condition("Accepted", "True", "Accepted")],
    "workers": [
        {"name": "digits-w0", "pool": "a100", "state": "Training", "node": "n0", "shareSamples": 40,
         "binding": "Communication", "samplesPerSecond": 500.0},
        {"name": "digits-w1", "pool": "t4", "state": "Training", "node": "n1", "shareSamples": 12,
         "binding": "Compute", "samplesPerSecond": 100.0},
        {"name": "digits-w2", "pool": "t4", "state": "Training", "node": "n2", "shareSamples": 8,
         "binding": "Compute", "samplesPerSecond": 80.0, "message": "its node is tainted: it leaves"},
        {"name": "digits-w3", "pool": "t4", "state": "Finished", "message": "every epoch is committed"},
    ],
}  # fmt: skip


@pytest.fixture
def stub(stub: ApiStub) -> ApiStub:
    """An API server with one running job, and a kubeconfig for it."""
    stub.objects = {f"{JOBS}/digits": job(**RUNNING)}
    stub.lists = {JOBS: [job(**RUNNING)], ALL_JOBS: [job(**RUNNING), job("text")], PODS: [], EVENTS: []}
    return stub


def run(*arguments: str, **more: Any) -> Result:
    return CliRunner().invoke(main, list(arguments), catch_exceptions=False, **more)


def told(*arguments: str) -> str:
    """Return the output of a command that succeeds."""
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(*arguments: str, status: int = 2) -> str:
    """Return the one line of a command that is refused."""
    result = run(*arguments)
    assert result.exit_code == status, result.output
    assert result.stderr.count("\n") == 1, result.stderr
    return result.stderr.removeprefix("Error: ").rstrip("\n")


def test_get_lists_jobs_of_the_namespace_or_of_all(stub: ApiStub) -> None:
    first = told("get")
    assert "digits" in first
    assert all(word in first for word in ("Running", "5/5", "41%", "652", "62%", "1h1m", "9.50"))
    assert "text" not in first
    everywhere = told("get", "-A")
    assert "text" in everywhere
    assert "New" in everywhere  # the operator has not written a status


def test_get_prints_documents(stub: ApiStub) -> None:
    assert json.loads(told("get", "digits", "-o", "json")) == job(**RUNNING)
    assert yaml.safe_load(told("get", "-o", "yaml"))["items"] == [job(**RUNNING)]


def test_describe_shows_which_workers_spare_memory(stub: ApiStub) -> None:
    """The column is there only where a worker does."""
    assert "memory" not in told("describe", "digits")
    status = json.loads(json.dumps(RUNNING))
    status["workers"][1] |= {"memory": "ActivationsRecomputed"}
    status["workers"][2] |= {"memory": "SmallerMicroBatches"}
    status["conditions"].append(condition("MemoryShort", "True", "ActivationsRecomputed", "digits-w1 computes twice"))
    stub.objects[f"{JOBS}/digits"] = job(**status)
    page = told("describe", "digits")
    assert "MemoryShort is true (ActivationsRecomputed): digits-w1 computes twice" in page
    assert "recomputes" in page
    assert "small batches" in page


def test_describe_tells_why_a_job_is_slow(stub: ApiStub) -> None:
    stub.lists[EVENTS] = [
        {"metadata": {}, "reason": "PlanChanged", "message": "new shares", "lastTimestamp": "2026-11-22T11:00:00Z"},
        {"metadata": {}, "reason": "WorkerLost", "message": "node n1 gone", "type": "Warning",
         "eventTime": "2026-11-22T10:59:00.5Z"},
    ]  # fmt: skip
    stub.objects[f"{JOBS}/digits"]["spec"]["maxCost"] = "20"
    text = " ".join(told("describe", "digits").split())
    for part in (
        "epoch 3 of 8, step 1,200", "652 samples/s, 0.092 s a step, efficiency 0.62 of 0.97 possible",
        "9.50 an hour, 4.25 so far, about 9.76 until the end, at most 20",
        "the workers are only 62 % busy, where 97 % are possible",
        "2 workers, the slowest digits-w2 (80 samples/s): its computation takes the whole step",
        "digits-w0 (500 samples/s): the gradient exchange", "layout 1 member: [a100: units 0-17 | t4: 18-23]",
        "worker digits-w2: its node is tainted", "PlanChanged",
    ):  # fmt: skip
        assert part in text, part
    assert "every epoch is committed" not in text  # a worker that is done is no problem
    assert text.index("WorkerLost") < text.index("PlanChanged")


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ({"state": "Failed", "reason": "worker w1 failed"}, [("worker w1 failed", True)]),
        ({"state": "Succeeded", "reason": "done"}, [("done", False)]),
        (
            {"state": "Pending", "conditions": [condition("Scheduled", "False", "NoNodes", "pool a100 has no node")]},
            [("Scheduled is false (NoNodes): pool a100 has no node", True)],
        ),
        (
            {"state": "Running", "efficiency": 0.95, "conditions": [condition("SpeedsLearned", "True", "Learned")]},
            [
                ("the workers are 95 % busy; the measured noise of step times allows 100 %", False),
                ("nothing is wrong", False),
            ],
        ),
        (
            {"state": "Running", "efficiency": 0.5, "conditions": [condition("SpeedsLearned", "False", "Learning")]},
            [("the workers are only 50 % busy while speeds are still being learned: Learning", True)],
        ),
        (
            {"state": "Running", "efficiency": 0.9, "conditions": [condition("SpeedsLearned", "False", "Learning")]},
            [("speeds are still being learned: Learning", False), ("nothing is wrong", False)],
        ),
        (
            {"state": "Running", "conditions": [condition("Progressing", "False", "AllWait", "no step for 10 min")]},
            [("Progressing is false (AllWait): no step for 10 min", True)],
        ),
        ({}, [(f"the operator has not answered yet: {CHECK}", True)]),
    ],
)  # fmt: skip
def test_findings(status: dict[str, Any], expected: list[tuple[str, bool]]) -> None:
    found = findings(view_of(job(**status), NOW))
    assert [(each.what, each.is_problem) for each in found] == expected


@pytest.mark.parametrize(("now", "waits"), [("2026-11-22T10:00:59+00:00", False), ("2026-11-22T10:06:00+00:00", True)])
def test_a_job_that_waits_for_a_minute_has_a_problem(now: str, waits: bool) -> None:
    """Whatever keeps it: the operator may know no word for it."""
    running = condition("Running", "False", "WaitingForWorkers", "0 workers are ready")
    running["lastTransitionTime"] = "2026-11-22T10:00:00Z"
    view = view_of(
        job(state="Starting", reason="0 workers are ready", conditions=[running]), datetime.fromisoformat(now)
    )
    (found,) = findings(view)
    assert found.is_problem is waits
    assert ("it has not trained for 6 min: 0 workers are ready" in found.what) is waits


def test_a_new_job_is_not_a_problem() -> None:
    young = view_of(job(), datetime(2026, 11, 22, 10, 0, 5, tzinfo=UTC))
    assert [each.what for each in findings(young)] == ["the operator has not answered yet", "nothing is wrong"]


def test_suspend_resume_scale_and_delete_change_one_thing(stub: ApiStub) -> None:
    assert "no spec.checkpoint" in told("suspend", "digits")
    assert stub.objects[f"{JOBS}/digits"]["spec"]["suspend"] is True
    told("resume", "digits")
    assert stub.objects[f"{JOBS}/digits"]["spec"]["suspend"] is False
    told("scale", "digits", "4")
    assert stub.requests[-1][3] == {"spec": {"elasticPolicy": {"maxReplicas": 4}}}
    told("scale", "digits", "7", "--pool", "a100=2", "--pool", "t4=5")
    assert stub.requests[-1][3]["spec"]["elasticPolicy"] == {"maxReplicas": 7}
    stub.objects[f"{JOBS}/digits"] = job()
    told("scale", "digits", "--pool", "a100=0", "--pool", "t4=5")
    assert stub.requests[-1][3] == {
        "metadata": {"resourceVersion": "7"},
        "spec": {"workerPools": [
            {"name": "a100", "minReplicas": 0, "maxReplicas": 0},
            {"name": "t4", "minReplicas": 0, "maxReplicas": 5, "capacityType": "Spot"},
        ]},
    }  # fmt: skip
    result = run("delete", "digits", input="n\n")
    assert result.exit_code == 1
    assert f"{JOBS}/digits" in stub.objects
    told("delete", "digits", "--yes")
    assert f"{JOBS}/digits" not in stub.objects


def test_a_checkpoint_is_asked_for_and_awaited(stub: ApiStub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request is an annotation that is there until the status reports a newer checkpoint."""
    monkeypatch.setattr(checkpoint, "LOOK_S", 0.0)
    body = stub.objects[f"{JOBS}/digits"]
    assert refused("checkpoint", "digits") == "job digits keeps no checkpoints: set spec.checkpoint.uri"
    body["spec"]["checkpoint"] = {"uri": "file:///store"}
    body["status"] = {"state": "Pending"}
    assert refused("checkpoint", "digits") == "job digits is Pending: only a job that trains can write a checkpoint"
    body["status"] = {"state": "Running", "lastCheckpoint": {"step": 4, "time": "2026-11-22T11:00:00Z"}}
    real, seen = stub.answer, list[str | None]()

    def saving(method: str, path: str, query: dict[str, str], sent: Any) -> tuple[int, Any]:
        if method == "PATCH":
            seen.append(sent["metadata"]["annotations"][keys.ANNOTATION_CHECKPOINT])
        elif seen:
            body["status"]["lastCheckpoint"] = {"step": 9, "time": "2026-11-22T11:00:05Z"}
        return real(method, path, query, sent)

    monkeypatch.setattr(stub, "answer", saving)
    assert told("checkpoint", "digits") == "job digits: the checkpoint of step 9 is complete\n"
    assert [value is None for value in seen] == [False, True]
    assert keys.ANNOTATION_CHECKPOINT not in stub.objects[f"{JOBS}/digits"]["metadata"]["annotations"]
    assert "no new checkpoint after 0 s" in refused("checkpoint", "digits", "--timeout", "0", status=1)
    assert keys.ANNOTATION_CHECKPOINT not in stub.objects[f"{JOBS}/digits"]["metadata"]["annotations"]


def test_submit_waits_for_the_end(stub: ApiStub, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump({k: v for k, v in job("text").items() if k != "status"}), encoding="utf-8")
    assert told("validate", str(file)) == "job text is valid\n"
    told("validate", str(file), "--cluster")
    assert stub.requests[-1][2]["dryRun"] == "All"
    assert f"{JOBS}/text" not in stub.objects
    real = stub.answer

    def finishing(method: str, path: str, query: dict[str, str], body: Any) -> tuple[int, Any]:
        if method == "GET" and path == f"{JOBS}/text":
            reads = sum(each[:2] == ("GET", path) for each in stub.requests)
            ends = {"state": "Failed" if fails else "Succeeded", "reason": "that is why", "startTime":
                    "2026-11-22T10:00:00Z", "completionTime": "2026-11-22T10:01:05Z"}  # fmt: skip
            stub.objects[path]["status"] = ends if reads else RUNNING
        return real(method, path, query, body)

    stub.answer = finishing
    for fails, status in ((False, 0), (True, submit.JOB_FAILED)):
        stub.requests.clear()
        stub.objects.pop(f"{JOBS}/text", None)
        result = run("submit", str(file), "--wait")
        assert result.exit_code == status, result.output
        line = "text: Running, 41%, epoch 3 of 8, loss 0.31, 652 samples/s, 5/5 workers, 1 h 1 min left"
        assert f"{line}, cost so far 4.2500\n" in result.stderr
        word = "Failed" if fails else "Succeeded"
        assert result.stdout.splitlines()[-1] == f"job text: {word} after 1 min 5 s. that is why"


def test_the_price_of_a_job_that_has_ended_is_its_cost(stub: ApiStub) -> None:
    stub.objects[f"{JOBS}/digits"]["status"] |= {"state": "Succeeded", "pricePerHour": "0"}
    text = told("describe", "digits")
    assert "4.25 in all" in text
    assert "an hour" not in text


def test_a_job_that_has_ended_is_neither_suspended_nor_resumed_nor_scaled(stub: ApiStub) -> None:
    stub.objects[f"{JOBS}/digits"]["status"] = {"state": "Succeeded"}
    assert told("suspend", "digits") == "job digits has ended (Succeeded): there is nothing to suspend\n"
    assert told("resume", "digits") == "job digits has ended (Succeeded): there is nothing to resume\n"
    assert refused("scale", "digits", "2").startswith("job digits has ended (Succeeded): only a job that trains")
    assert {method for method, *_ in stub.requests} == {"GET"}


def test_restart_asks_for_new_pods_of_a_job_that_runs(stub: ApiStub) -> None:
    assert "are being renewed" in told("restart", "digits")
    first = stub.objects[f"{JOBS}/digits"]["metadata"]["annotations"][keys.ANNOTATION_RESTART]
    told("restart", "digits")
    assert stub.objects[f"{JOBS}/digits"]["metadata"]["annotations"][keys.ANNOTATION_RESTART] != first
    stub.objects[f"{JOBS}/digits"]["spec"]["suspend"] = True
    assert "`heterotrain resume digits`" in refused("restart", "digits")
    stub.objects[f"{JOBS}/digits"]["status"] = {"state": "Failed"}
    assert "`heterotrain retry` continues a failed job" in refused("restart", "digits")


def test_retry_asks_for_another_try_of_a_failed_job_alone(stub: ApiStub) -> None:
    assert "only a failed job" in refused("retry", "digits")
    found = stub.objects[f"{JOBS}/digits"]
    found["status"] |= {"state": "Failed"}
    assert told("retry", "digits") == "job digits is tried again, from step 1100\n"
    found = stub.objects[f"{JOBS}/digits"]
    assert found["metadata"]["annotations"][keys.ANNOTATION_RETRY]
    del found["status"]["lastCheckpoint"]
    assert "from the beginning" in told("retry", "digits")


def test_submit_continues_from_an_earlier_job_that_exists_or_is_deleted(stub: ApiStub, tmp_path: Path) -> None:
    new = job("digits-2")
    new["spec"]["checkpoint"] = {"uri": "s3://new"}
    del new["status"], new["metadata"]["uid"], new["metadata"]["resourceVersion"], new["metadata"]["creationTimestamp"]
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(new))
    assert "job digits keeps no checkpoints" in refused("submit", str(path), "--continue", "digits")
    old = job()
    old["spec"]["checkpoint"] = {"uri": "s3://old/"}
    stub.lists[JOBS] = [old]

    def source(*arguments: str) -> str:
        told("submit", str(path), *arguments)
        sent = next(body for method, *_, body in reversed(stub.requests) if method == "POST")
        return str(sent["spec"]["checkpoint"].get("resumeFrom"))

    assert source("--continue", "digits") == "s3://old/ml-digits-uid-digits"
    assert source("--continue", "gone") == "gone"
    assert source() == "None"
    del new["spec"]["checkpoint"]
    path.write_text(yaml.safe_dump(new))
    assert "the new job keeps no checkpoints" in refused("submit", str(path), "--continue", "gone")


def test_a_suspended_job_names_the_command_that_continues_it(stub: ApiStub) -> None:
    stub.objects[f"{JOBS}/digits"]["status"] = {
        "state": "Suspended", "reason": "spec.suspend is true", "ready": "0/0",
        "conditions": [condition("Scheduled", "False", "Suspended", "Suspended")],
    }  # fmt: skip
    text = told("describe", "digits")
    assert "· suspended: `heterotrain resume digits` continues it" in text
    assert "Scheduled is false" not in text
    waited = run("wait", "digits", "--timeout", "0").stderr.splitlines()[0]
    assert waited == "digits: Suspended, 0/0 workers ready: suspended: `heterotrain resume digits` continues it"


def test_top_into_a_pipe_prints_every_page(stub: ApiStub) -> None:
    """Without a terminal there is no page to be replaced, and a reader of the pipe waits for each one."""
    real, left = stub.answer, iter([RUNNING, RUNNING, {"state": "Succeeded", "reason": "that is why"}])

    def ending(method: str, path: str, query: dict[str, str], body: Any) -> tuple[int, Any]:
        if (method, path) == ("GET", f"{JOBS}/digits"):
            stub.objects[path]["status"] = next(left)
        return real(method, path, query, body)

    stub.answer = ending
    pages = told("top", "digits", "--interval", "0.5").split("ml/digits\n")[1:]
    assert ["Running" in page for page in pages] == [True, True, False]
    assert "that is why" in pages[-1]


def test_waiting_ends_after_the_timeout(stub: ApiStub) -> None:
    result = run("wait", "digits", "--timeout", "0")
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith("Error: job digits has not ended after 0 s: it goes on (Running")


def test_logs_of_all_workers_or_of_some(stub: ApiStub) -> None:
    for number_ in (10, 2):
        stub.lists[PODS].append({
            "metadata": {"name": f"digits-w{number_}", "uid": f"u{number_}", "annotations":
                         {"kubectl.kubernetes.io/default-container": "trainer"} if number_ == 2 else {}},
            "spec": {"containers": [{"name": "side"}, {"name": "trainer"}]}, "status": {"phase": "Running"},
        })  # fmt: skip
        stub.logs[f"digits-w{number_}"] = f"one {number_}\ntwo {number_}\n"
    lines = ["digits-w2  one 2", "digits-w2  two 2", "digits-w10 one 10", "digits-w10 two 10"]
    assert told("logs", "digits").splitlines() == lines
    asked = [(path.split("/")[-2], query["container"]) for _, path, query, _ in stub.requests if path.endswith("/log")]
    assert asked == [("digits-w2", "trainer"), ("digits-w10", "side")]
    assert told("logs", "digits", "w10", "--tail", "1").splitlines()[0] == "digits-w10 one 10"
    assert stub.requests[-1][2]["tailLines"] == "1"
    assert refused("logs", "digits", "w3") == "job digits has no worker w3: there are digits-w2, digits-w10"
    stub.objects[f"{JOBS}/digits"]["status"]["state"] = "Succeeded"
    assert sorted(told("logs", "digits", "-f").splitlines()) == sorted(lines)


def test_following_goes_on_while_workers_come_and_go(stub: ApiStub) -> None:
    """A second worker appears later; the job ends; everything is printed once."""

    def pod(name: str, phase: str) -> dict[str, Any]:
        return {"metadata": {"name": name, "uid": name}, "spec": {"containers": [{"name": "t"}]},
                "status": {"phase": phase}}  # fmt: skip

    stub.logs = {"digits-w0": "a\n", "digits-w1": "b\n"}
    looks = iter([[pod("digits-w0", "Running"), pod("digits-w1", "Pending")],
                  [pod("digits-w0", "Running"), pod("digits-w1", "Running")]])  # fmt: skip
    real = stub.answer

    def answer(method: str, path: str, query: dict[str, str], body: Any) -> tuple[int, Any]:
        if path == PODS:
            found = next(looks, None)
            stub.lists[PODS] = found if found is not None else stub.lists[PODS]
            if stub.lists[PODS] and stub.lists[PODS][-1]["status"]["phase"] == "Running":
                stub.objects[f"{JOBS}/digits"]["status"]["state"] = "Succeeded"
        return real(method, path, query, body)

    stub.answer = answer
    stub.lists[PODS] = [pod("digits-w0", "Running")]
    assert sorted(told("logs", "digits", "--follow").splitlines()) == ["digits-w0 a", "digits-w1 b"]


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (("get", "nothing"), 2, "there is no job nothing in namespace ml: `heterotrain get -A` lists all jobs"),
        (("describe", "nothing"), 2, "there is no job nothing in namespace ml: `heterotrain get -A` lists all jobs"),
        (("logs", "digits"), 2, "job digits has no workers at present: `heterotrain describe digits` tells why"),
        (("scale", "digits", "6"), 2, "its pools hold at most 5 in all (a100 2, t4 3): scale a pool, too"),
        (
            ("scale", "digits", "5", "--pool", "a100=1"),
            2,
            "its pools hold at most 4 in all (a100 1, t4 3): scale a pool, too",
        ),
        (("scale", "digits", "--pool", "h100=2"), 2, "the job has no pool h100: its pools are a100, t4"),
        (("scale", "digits", "--pool", "a100"), 2, "--pool a100 is not of the form POOL=N, such as a100=2"),
        (("get", "--context", "moon"), 1, None),
    ],
)
def test_mistakes_get_one_sentence(stub: ApiStub, arguments: tuple[str, ...], status: int, said: str | None) -> None:
    found = refused(*arguments, status=status)
    assert found == said or (said is None and found.startswith("no access to a cluster"))


def test_refusals_of_the_api_server(stub: ApiStub) -> None:
    path = f"{JOBS}/digits"
    rule = "adaptiveBatch.min is larger than adaptiveBatch.max: lower min or raise max"
    ours = f'HeteroTrainJob.heterotrain.dev "digits" is invalid: spec.training: Invalid value: "object": {rule}'
    forbidden = 'not allowed to read or change job digits ("users is forbidden")'
    foreign = f'HeteroTrainJob.heterotrain.dev "digits" is invalid: spec: {"a webhook says " * 9}'
    webhook = 'the API server refuses job digits ("spec: a webhook says a webhook says a webhook says a webhoo…")'
    for answer, status, said in (
        ((401, "Unauthorized"), 2, 'the cluster does not accept your credentials ("Unauthorized"): log in to it again'),
        ((403, "users is forbidden"), 2, f"{forbidden}: ask for the role view or edit in namespace ml"),
        ((409, "the object has been modified"), 2,
         "job digits was changed by another program at the same time: try again"),
        ((422, ours), 2, rule),
        ((422, foreign), 2, f"{webhook}: `kubectl apply` shows its whole answer"),
        ((404, "the server could not find the requested resource"), 2,
         "this cluster has no HeteroTrainJobs: install the operator's chart first"),
        ((500, "etcd is down"), 1, 'the API server failed ("etcd is down"): try again later'),
    ):  # fmt: skip
        stub.refusals[("PATCH", path)] = [answer]
        assert refused("resume", "digits", status=status) == said


def test_a_read_is_repeated_and_a_write_is_not(stub: ApiStub) -> None:
    path = f"{JOBS}/digits"
    stub.refusals[("GET", path)] = [(503, "starting"), (503, "starting")]
    told("get", "digits")
    stub.refusals[("PATCH", path)] = [(503, "starting")]
    refused("resume", "digits", status=1)
    assert [method for method, *_ in stub.requests].count("PATCH") == 1


def test_a_change_of_pools_is_made_again_while_the_operator_writes_the_status(stub: ApiStub) -> None:
    path, refusal = f"{JOBS}/digits", (409, "the object has been modified")
    stub.refusals[("PATCH", path)] = [refusal] * (api.CHANGE_TRIES - 1)
    told("scale", "digits", "--pool", "t4=5")
    assert [pool["maxReplicas"] for pool in stub.objects[path]["spec"]["workerPools"]][1] == 5
    assert [method for method, where, *_ in stub.requests if where == path] == ["GET", "PATCH"] * api.CHANGE_TRIES
    stub.refusals[("PATCH", path)] = [refusal] * api.CHANGE_TRIES
    assert "was changed by another program at the same time" in refused("scale", "digits", "--pool", "t4=6", status=2)


def test_a_cluster_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "RETRY_S", 0.0)
    write_kubeconfig(tmp_path / "config", "http://127.0.0.1:9", namespace="ml")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    assert refused("get", status=1).startswith("the cluster does not answer (")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "nowhere"))
    assert refused("get", status=1).startswith("no access to a cluster (there is no file ")
    (tmp_path / "nowhere").write_text("{}")
    assert refused("get", status=1).startswith("no access to a cluster (the kubeconfig has no current context")


REST = "): set KUBECONFIG, or give --kubeconfig and --context"


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"a: [1\nb: 2\n", "the kubeconfig is not YAML: correct its line 2"),
        (b"\xff\xfe", "the kubeconfig is not YAML in UTF-8"),
        (b"- 1\n", "a value in the kubeconfig has another type than kubectl gives it"),
        (b"current-context: a\ncontexts: [{context: {}}]\n", "an entry of the kubeconfig has no name"),
        (b"just text\n", "a value in the kubeconfig has another type than kubectl gives it"),
        (
            b"clusters: 3\ncontexts: 3\nusers: 3\ncurrent-context: c\n",
            "a value in the kubeconfig has another type than kubectl gives it",
        ),
        (
            b"current-context: c\ncontexts: [{name: c, context: {cluster: x}}]\nclusters: []\n",
            "no address of the cluster x",
        ),
        (None, ": Is a directory)"),
    ],
    ids=str,
)
def test_a_kubeconfig_that_cannot_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None, why: str
) -> None:
    file = tmp_path / "config"
    file.mkdir() if content is None else file.write_bytes(content)
    monkeypatch.setenv("KUBECONFIG", str(file))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    found = refused("get", status=1)
    assert found.startswith("no access to a cluster (")
    assert why in found
    assert found.endswith(REST)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "–"), (0.4, "0 s"), (59.6, "1 min"), (65, "1 min 5 s"), (3700, "1 h 1 min"), (90_000, "1 d 1 h")],
)
def test_durations(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


def test_a_table_stands_whole_numbers_beyond_all_floats() -> None:
    status = {"samplesPerSecond": 10**400, "efficiency": 10**400, "estimatedRemainingSeconds": 10**400}
    jobs_table([{"metadata": {"name": "a", "namespace": "n"}, "status": status}], datetime.now(UTC), everywhere=False)


def test_numbers() -> None:
    assert [number(value) for value in (None, 0.0921, 652.0, 1234.5, 98_765.4)] == [
        "–", "0.0921", "652", "1,234", "98,765",
    ]  # fmt: skip


MOUNT = {"name": "d", "mountPath": "/d"}
JOB_FILE = """
apiVersion: heterotrain.dev/v1alpha1
kind: HeteroTrainJob
metadata: {name: digits, labels: {team: vision}}
spec:
  training: {globalBatchSize: 60, epochs: 8}
  elasticPolicy: {minReplicas: 2}
  checkpoint: {uri: "s3://bucket/digits"}
  workerPools:
  - {name: a100, maxReplicas: 2, nodeSelector: {gpu: a100}}
  template:
    spec:
      containers:
      - {name: trainer, image: my/training, command: [heterotrain-run], args: [train.py], env: [{name: A, value: b}]}
"""
CHECKS = "ok       versions       heterotrain\nfailed   store          denied\n1 of 2 checks failed"


@pytest.mark.parametrize("state", ["Succeeded", "Failed"])
def test_preflight_of_a_job_checks_its_own_pools_and_image(stub: ApiStub, tmp_path: Path, state: str) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(JOB_FILE)
    made = f"{JOBS}/digits-preflight"
    ended = {"state": state, "reason": "over", "conditions": [condition(state, "True", "Completed")]}
    pods = [
        {"metadata": {"name": f"digits-preflight-w{i}"}, "spec": {"containers": [{"name": "trainer"}]}}
        for i in range(2)
    ]
    stub.lists[PODS] = pods
    stub.logs = {"digits-preflight-w0": "starting\n", "digits-preflight-w1": f"starting\n{CHECKS}\n"}
    answer = stub.answer

    def with_status(method: str, path: str, query: dict[str, str], body: Any) -> tuple[int, Any]:
        status, found = answer(method, path, query, body)
        return status, {**found, "status": ended} if (method, path) == ("GET", made) else found

    stub.answer = with_status  # type: ignore[method-assign]  # the operator's part
    done = run("preflight", str(file))
    assert done.exit_code == (0 if state == "Succeeded" else 3), done.output
    assert "failed   store          denied" in done.stdout
    (body,) = [body for method, path, _, body in stub.requests if (method, path) == ("POST", JOBS)]
    assert body["metadata"] == {"name": "digits-preflight", "labels": {"team": "vision"}}
    spec = body["spec"]
    assert spec["runtime"] == "Torchrun"
    assert {"training", "checkpoint"} & spec.keys() == set(), "the API refuses them for this runtime"
    assert spec["workerPools"] == [{"name": "a100", "maxReplicas": 2, "nodeSelector": {"gpu": "a100"}}]
    (container,) = spec["template"]["spec"]["containers"]
    assert container == {
        "name": "trainer", "image": "my/training", "env": [{"name": "A", "value": "b"}],
        "command": ["heterotrain-run", "-m", "heterotrain.preflight", "--store", "s3://bucket/digits"],
    }  # fmt: skip
    checked = tmp_path / "checked.yaml"
    checked.write_text(yaml.safe_dump(body))
    assert "is valid" in told("validate", str(checked))
    assert made not in stub.objects, "it is deleted"


@pytest.mark.parametrize("store", ["s3://key:hunter2@bucket/a", "s3://bucket/a?token=hunter2"])
def test_preflight_takes_no_credentials_of_a_store(stub: ApiStub, tmp_path: Path, store: str) -> None:
    """They would stand in the pods' command line, which more people may read than the store."""
    file = tmp_path / "job.yaml"
    file.write_text(JOB_FILE)
    done = run("preflight", str(file), "--store", store)
    assert done.exit_code == 2
    assert "--store must have no password and no query" in done.stderr
    assert "hunter2" not in done.output
    assert stub.requests == [], "nothing was sent"


def test_preflight_runs_in_the_image_of_each_pool_and_never_its_command(tmp_path: Path) -> None:
    body = yaml.safe_load(JOB_FILE)
    changed = {"name": "trainer", "image": "my/rocm", "command": ["heterotrain-run", "train.py"], "args": ["--amd"]}
    body["spec"]["workerPools"][0]["template"] = {"spec": {"containers": [changed]}}
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(body))
    (pool,) = checking_job(read_job_file(str(file)), None)["spec"]["workerPools"]
    assert pool["template"]["spec"]["containers"] == [{"name": "trainer", "image": "my/rocm"}]


def test_validate_checks_the_templates_of_pools(tmp_path: Path) -> None:
    body = yaml.safe_load(JOB_FILE)
    body["spec"]["workerPools"][0]["template"] = {"spec": {"containers": [{"name": "trainer", "readinessProbe": {}}]}}
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(body))
    with pytest.raises(InputError, match="pool a100: container trainer has a readinessProbe"):
        read_job_file(str(file))


def test_the_forecast_counts_accelerators_of_a_pool_s_template(tmp_path: Path) -> None:
    body = yaml.safe_load(JOB_FILE)
    limits = {"name": "trainer", "resources": {"limits": {"amd.com/gpu": 4}}}
    body["spec"]["workerPools"][0]["template"] = {"spec": {"containers": [limits]}}
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(body))
    (pool,) = read_job(str(file)).pools
    assert pool.ranks == 4


def test_a_training_by_steps_shows_its_steps() -> None:
    body: dict[str, Any] = {
        "metadata": {"name": "digits", "namespace": "ns"}, "spec": {"training": {"steps": 5000}},
        "status": {"step": 1200, "epoch": 3},
    }  # fmt: skip
    assert trained(view_of(body)) == ("step", "1,200 of 5,000")
    assert trained(view_of({**body, "spec": {}})) == ("epoch", "3 of 1")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda spec: spec["template"]["spec"]["containers"][0].pop("image"), "container trainer has no image"),
        (
            lambda spec: spec["template"]["spec"]["containers"][0].update(volumeMounts=[MOUNT]),
            "container trainer mounts the volume d, but spec.template.spec.volumes is empty: add it there",
        ),
        (
            lambda spec: spec["workerPools"][0].update(
                template={"spec": {"volumes": [{"name": "x", "emptyDir": {}}],
                                   "containers": [{"name": "trainer", "volumeMounts": [MOUNT]}]}}
            ),
            "pool a100: container trainer mounts the volume d, but spec.template.spec.volumes has x",
        ),
        (
            lambda spec: spec.update(objective="Deadline", deadline="2020-01-01T00:00:00Z"),
            "spec.deadline 2020-01-01T00:00:00+00:00 has passed: give a later time",
        ),
    ],
)  # fmt: skip
def test_what_the_pods_would_meet_is_a_mistake_of_the_file(
    tmp_path: Path, stub: ApiStub, change: Callable[[Any], Any], sentence: str
) -> None:
    body = yaml.safe_load(JOB_FILE)
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(body))
    assert told("validate", str(file)) == "job digits is valid\n"
    change(body["spec"])
    file.write_text(yaml.safe_dump(body))
    for command in ("validate", "submit"):
        assert sentence in refused(command, str(file))
    assert [method for method, *_ in stub.requests] == []


def test_more_workers_than_the_pools_hold_are_noted(tmp_path: Path) -> None:
    body = yaml.safe_load(JOB_FILE)
    body["spec"]["elasticPolicy"]["maxReplicas"] = 9
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(body))
    result = run("validate", str(file))
    assert (result.exit_code, result.stdout) == (0, "job digits is valid\n")
    assert (
        result.stderr
        == "note: spec.elasticPolicy.maxReplicas is 9, but the pools hold 2 workers: no more than these run\n"
    )
    (note,) = json.loads(told("validate", str(file), "-o", "json"))["notes"]
    assert note in result.stderr


def test_nobody_to_ask_is_a_sentence_and_ctrl_c_a_word(stub: ApiStub, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refused_last("delete", "digits") == "Error: nobody answers: say --yes to delete without a question"
    assert f"{JOBS}/digits" in stub.objects
    monkeypatch.setattr(api.Cluster, "jobs", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    result = run("get")
    assert (result.exit_code, result.stderr) == (130, "interrupted\n")


def refused_last(*arguments: str) -> str:
    result = run(*arguments)
    assert result.exit_code == 2
    return result.stderr.splitlines()[-1]
