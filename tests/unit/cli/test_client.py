"""Jobs from Python: what is sent for a script or a function, waiting, logs, metrics, changes, and each refusal."""

from __future__ import annotations

import json
import runpy
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from heterotrain_cli.cluster.plot import with_throughput
from heterotrain_cli.main import main
from heterotrain_client import (
    HeteroTrainClient,
    InputError,
    JobFailedError,
    TrainingJob,
    UnavailableError,
)
from heterotrain_core.contract.codec import encode_plan
from heterotrain_core.contract.plan import ComputeTime, Member
from support.api_stub import ApiStub
from support.cli_runner import CliRunner
from support.plans import plan_of

JOBS = "/apis/heterotrain.dev/v1alpha1/namespaces/ml/heterotrainjobs"
CONFIGS, PODS, EVENTS = (f"/api/v1/namespaces/ml/{kind}" for kind in ("configmaps", "pods", "events"))
DONE = {"state": "Succeeded", "reason": "every epoch is committed", "epoch": 2, "step": 20, "loss": 0.1,
        "metrics": {"accuracy": 0.9}}  # fmt: skip
SCRIPT = 'import sys\nprint("trained with", *sys.argv[1:])\n'


@pytest.fixture
def stub(stub: ApiStub) -> ApiStub:
    """An API server without jobs, and a kubeconfig for it."""
    stub.lists = {PODS: [], EVENTS: []}
    return stub


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "My_Training.py"
    path.write_text(SCRIPT, encoding="utf-8")
    return path


def statuses(stub: ApiStub, name: str, *following: dict[str, Any]) -> None:
    """Give a job these statuses, one for each reading; the last one stays."""
    left = list(following)

    def answer(method: str, path: str, query: dict[str, str], body: Any) -> tuple[int, Any]:
        if method == "GET" and path == f"{JOBS}/{name}":
            stub.objects[path]["status"] = left.pop(0) if len(left) > 1 else left[0]
        return ApiStub.answer(stub, method, path, query, body)

    stub.answer = answer  # type: ignore[method-assign]  # the stub's one method, replaced for this test


def test_a_script_becomes_a_job_with_its_own_config_map(stub: ApiStub, script: Path) -> None:
    """The script is mounted where the command looks for it, and is deleted with the job."""
    job = HeteroTrainClient().train(
        script, pools={"a100": 2, "t4": {"maxReplicas": 6, "capacityType": "Spot"}}, image="registry/image",
        global_batch_size=512, epochs=20, arguments=["--lr", "0.1"], checkpoint="s3://bucket/x",
        pod={"serviceAccountName": "trainer", "container": {"env": [{"name": "A", "value": "b"}]}},
    )  # fmt: skip
    body, config = stub.objects[f"{JOBS}/my-training"], stub.objects[f"{CONFIGS}/my-training-script"]
    assert (job.name, job.namespace) == ("my-training", "ml")
    spec = body["spec"]
    assert spec["training"] == {"globalBatchSize": 512, "epochs": 20}
    assert spec["checkpoint"] == {"uri": "s3://bucket/x"}
    assert [(pool["name"], pool["maxReplicas"]) for pool in spec["workerPools"]] == [("a100", 2), ("t4", 6)]
    assert {pool["name"]: pool["nodeSelector"] for pool in spec["workerPools"]} == {
        "a100": {"heterotrain.dev/pool": "a100"}, "t4": {"heterotrain.dev/pool": "t4"},
    }  # fmt: skip
    assert all(pool["resources"] == {"limits": {"nvidia.com/gpu": 1}} for pool in spec["workerPools"])
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    (mount,) = container["volumeMounts"]
    (volume,) = pod["volumes"]
    assert volume == {"name": mount["name"], "configMap": {"name": config["metadata"]["name"]}}
    assert container["command"] == ["heterotrain-run", f"{mount['mountPath']}/My_Training.py", "--lr", "0.1"]
    assert container["env"] == [{"name": "A", "value": "b"}]
    assert pod["serviceAccountName"] == "trainer"
    assert config["data"] == {"My_Training.py": SCRIPT}
    (owner,) = config["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"]) == ("HeteroTrainJob", body["metadata"]["uid"])


def add(*, first: int, out: str) -> None:
    """A training, as a test can check it."""
    from pathlib import Path as Where  # noqa: PLC0415  # the workers have only the function

    def inner(value: int) -> int:
        return value + 1

    Where(out).write_text(str(inner(first)), encoding="utf-8")


def test_a_function_becomes_a_file_that_does_the_same(stub: ApiStub, tmp_path: Path) -> None:
    """What the workers run is run here."""
    out = tmp_path / "out"
    HeteroTrainClient().train(
        add,
        pools={"cpu": 1},
        image="x",
        gpus_per_worker=0,
        global_batch_size=8,
        arguments={"first": 4, "out": str(out)},
    )
    (text,) = stub.objects[f"{CONFIGS}/add-script"]["data"].values()
    (tmp_path / "function.py").write_text(text, encoding="utf-8")
    runpy.run_path(str(tmp_path / "function.py"), run_name="__main__")
    assert out.read_text() == "5"
    assert "resources" not in stub.objects[f"{JOBS}/add"]["spec"]["workerPools"][0]


def test_an_unchanged_script_for_torchrun_needs_no_batch(stub: ApiStub, script: Path) -> None:
    HeteroTrainClient().train(script, pools={"a100": 2}, image="x", runtime="Torchrun")
    spec = stub.objects[f"{JOBS}/my-training"]["spec"]
    assert spec["runtime"] == "Torchrun"
    assert "training" not in spec


def uses_numpy() -> float:
    """Not self-contained."""
    return float(np.zeros(1).sum())


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"script": "nowhere.py"}, "the script nowhere.py cannot be read"),
        ({"script": uses_numpy}, "the function uses_numpy uses np from outside"),
        ({"script": add, "arguments": {"frist": 1}}, "the arguments of the function add do not fit"),
        ({"script": add, "arguments": {"first": float("nan"), "out": ""}}, "arguments of the function add do not fit"),
        ({"script": add, "arguments": ["4"]}, "arguments of the function add are a mapping by name"),
        ({"arguments": {"lr": 1}}, "arguments of a script are a list of strings"),
        ({"pools": {}}, "spec.workerPools has 0 entries, but needs at least 1"),
        ({"pools": {"a100": {"maxreplicas": 2}}}, "maxreplicas is not a field: did you mean maxReplicas?"),
        ({"global_batch_size": None}, "exactly one of globalBatchSize"),
        ({"name": "a" * 60}, "at most 48 characters"),
        ({"script": None}, "the script is None, but must be the path of a Python file, or a function"),
        ({"script": "."}, "the script . cannot be read (Is a directory): give the path of a Python file"),
        ({"script": dict}, "dict is not a function with a name: write it with def"),
        ({"script": lambda: 1}, "<lambda> is not a function with a name: write it with def"),
        ({"arguments": "--lr 0.1"}, "arguments of a script are a list of strings"),
        ({"pools": ["a100"]}, "pools is a list, but must be a mapping from names to workers"),
        ({"pools": {"a100": "2"}}, 'the pool a100 is "2", but must be the most workers, such as 2, or fields of spec'),
        ({"pools": {"a100": 2.5}}, "the pool a100 is 2.5, but must be the most workers"),
        ({"pools": {"a100": None}}, "the pool a100 is None, but must be the most workers"),
        ({"training": [1]}, "training is a list, but must be a mapping with fields, as in YAML"),
        ({"spec": "x"}, 'spec is "x", but must be a mapping with fields, as in YAML'),
        ({"pod": []}, "pod is a list, but must be a mapping with fields, as in YAML"),
        ({"pod": {"container": [1]}}, "pod['container'] is a list, but must be a mapping with fields"),
        ({"pod": {"volumes": {"a": 1}}}, "spec.template.spec.volumes[1] must be a mapping"),
    ],
)
def test_a_mistake_is_one_sentence_and_nothing_is_sent(
    stub: ApiStub, script: Path, change: dict[str, Any], sentence: str
) -> None:
    given: dict[str, Any] = {"pools": {"a100": 2}, "image": "x", "global_batch_size": 64, "script": script, **change}
    with pytest.raises(InputError) as error:
        HeteroTrainClient().train(given.pop("script"), **given)
    assert sentence in str(error.value)
    assert not stub.requests


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (None, "the job is None, but must be a mapping with apiVersion, kind, metadata and spec"),
        ({"apiVersion": "v1"}, 'apiVersion is "v1", but must be heterotrain.dev/v1alpha1'),
        ({"kind": "Pod"}, 'kind is "Pod", but must be HeteroTrainJob'),
        ({"metadata": {"name": "a", "namespace": "other"}}, 'use HeteroTrainClient(namespace="other")'),
        ({"spec": None}, "spec is missing"),
    ],
)
def test_a_mistake_in_a_whole_object_is_one_sentence(
    stub: ApiStub, script: Path, change: dict[str, Any] | None, sentence: str
) -> None:
    client = HeteroTrainClient()
    client.train(script, pools={"a100": 2}, image="x", global_batch_size=64)
    body = client.job("my-training").body()
    whole: Any = None if change is None else {**body, "metadata": {"name": "other"}, **change}
    stub.requests.clear()
    with pytest.raises(InputError) as error:
        client.submit(whole)
    assert sentence in str(error.value)
    assert not stub.requests


def test_a_job_whose_script_cannot_be_stored_is_deleted_again(stub: ApiStub, script: Path) -> None:
    """Its pods would wait for the script for ever."""
    stub.refusals[("POST", CONFIGS)] = [(403, "configmaps is forbidden")]
    with pytest.raises(InputError, match="not allowed to read or change ConfigMap my-training-script"):
        HeteroTrainClient().train(script, pools={"a100": 2}, image="x", global_batch_size=64)
    assert f"{JOBS}/my-training" not in stub.objects


def test_waiting_returns_the_last_status_or_raises_the_reason(
    stub: ApiStub, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = HeteroTrainClient().train(script, pools={"a100": 2}, image="x", global_batch_size=64)
    running = {"state": "Running", "ready": "2/2", "epoch": 1, "step": 10, "loss": 0.5, "samplesPerSecond": 100.0}
    statuses(stub, "my-training", running, running, DONE)
    assert job.wait().step == 20
    assert "my-training: Running" in capsys.readouterr().err
    history = job.metrics()
    assert history["step"].tolist() == [10, 20]
    assert history["loss"].tolist() == [0.5, 0.1]
    np.testing.assert_array_equal(history["accuracy"], [np.nan, 0.9])
    assert len(set(map(len, history.values()))) == 1
    statuses(stub, "my-training", {"state": "Failed", "reason": "BackoffLimitExceeded: exit code 1"})
    with pytest.raises(JobFailedError, match=r"job my-training: Failed\. BackoffLimitExceeded: exit code 1"):
        job.wait(progress=False)
    statuses(stub, "my-training", running)
    with pytest.raises(UnavailableError, match="has not ended after 0 s: it goes on"):
        job.wait(timeout_s=0, progress=False)


def test_logs_are_lines_with_their_worker(stub: ApiStub, script: Path) -> None:
    job = HeteroTrainClient().train(script, pools={"a100": 2}, image="x", global_batch_size=64)
    for index in (0, 1):
        name = f"my-training-w{index}"
        containers = {"containers": [{"name": "trainer"}]}
        stub.lists[PODS].append({"metadata": {"name": name, "uid": name}, "spec": containers,
                                 "status": {"phase": "Running"}})  # fmt: skip
        stub.logs[name] = f"one {index}\ntwo {index}\n"
    assert [(line.worker, line.text) for line in job.logs("w1")] == [
        ("my-training-w1", "one 1"), ("my-training-w1", "two 1"),
    ]  # fmt: skip
    statuses(stub, "my-training", DONE)
    assert sorted(line.text for line in job.logs(follow=True)) == ["one 0", "one 1", "two 0", "two 1"]


def test_a_running_job_is_changed(stub: ApiStub, script: Path) -> None:
    client = HeteroTrainClient()
    client.train(script, pools={"a100": 2, "t4": 6}, image="x", global_batch_size=64)
    stub.objects[f"{JOBS}/my-training"]["metadata"]["resourceVersion"] = "7"
    job = client.job("my-training")
    job.suspend()
    assert stub.objects[f"{JOBS}/my-training"]["spec"]["suspend"] is True
    job.resume()
    assert stub.objects[f"{JOBS}/my-training"]["spec"]["suspend"] is False
    # The operator has written the status since the client has read the job.
    stub.refusals[("PATCH", f"{JOBS}/my-training")] = [(409, "the object has been modified")]
    job.scale(3, pools={"t4": 1})
    spec = stub.objects[f"{JOBS}/my-training"]["spec"]
    assert spec["elasticPolicy"] == {"maxReplicas": 3}
    assert [pool["maxReplicas"] for pool in spec["workerPools"]] == [2, 1]
    with pytest.raises(InputError, match="the job has no pool v100: its pools are a100, t4"):
        job.scale(pools={"v100": 1})
    job.delete()
    with pytest.raises(InputError, match="there is no job my-training"):
        client.job("my-training")


@pytest.mark.parametrize(
    ("call", "command", "sentence"),
    [
        (lambda job: job.suspend(), ["suspend"], "there is nothing to suspend"),
        (lambda job: job.resume(), ["resume"], "there is nothing to resume"),
        (lambda job: job.scale(4), ["scale", "4"], "only a job that trains or waits can be scaled"),
        (lambda job: job.scale(pools={"a100": 1}), ["scale", "--pool", "a100=1"], "only a job that trains or waits"),
    ],
)
def test_a_job_that_has_ended_is_not_changed(
    stub: ApiStub, script: Path, call: Callable[[TrainingJob], object], command: list[str], sentence: str
) -> None:
    """The client raises what the command line prints, and neither sends a change."""
    job = HeteroTrainClient().train(script, pools={"a100": 2}, image="x", global_batch_size=64)
    stub.requests.clear()
    for state in ("Succeeded", "Failed"):
        statuses(stub, "my-training", {"state": state})
        with pytest.raises(InputError) as error:
            call(job)
        assert str(error.value).startswith(f"job my-training has ended ({state}): {sentence}")
        printed = CliRunner().invoke(main, [command[0], "my-training", *command[1:]])
        assert str(error.value) in printed.output
    assert {method for method, *_ in stub.requests} == {"GET"}


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda job: job.scale(), "the number of workers is missing: give workers, or pools"),
        (lambda job: job.scale("x"), 'workers is "x", but must be a whole number, at least 1'),
        (lambda job: job.scale(0), "workers is 0, but must be a whole number, at least 1"),
        (lambda job: job.scale(1.5), "workers is 1.5, but must be a whole number"),
        (lambda job: job.scale(pools=[1]), "pools is a list, but must be a mapping"),
        (lambda job: job.scale(pools={"a100": "2"}), 'pool a100 is "2", but must be a whole number, at least 0'),
        (lambda job: job.scale(pools={"t4": 1}), "the job has no pool t4"),
        (lambda job: job.wait(timeout_s="a"), 'timeout_s is "a", but must be a number of seconds, at least 0'),
        (lambda job: job.wait(timeout_s=-5), "timeout_s is -5, but must be a number of seconds"),
        (lambda job: job.checkpoint(timeout_s=float("nan")), "timeout_s is NaN, but must be a number of seconds"),
        (lambda job: job.metrics(every_s=0), "every_s is 0, but must be a number of seconds, at least 0.1"),
        (lambda job: list(job.logs(tail=-1)), "tail is -1, but must be a whole number, at least 0"),
        (lambda job: job.forecast(samples_per_epoch=0), "samples_per_epoch is 0, but must be a whole number"),
        (lambda _: HeteroTrainClient().job(""), '"" is not a name of a job'),
        (lambda _: HeteroTrainClient().job("a/b"), '"a/b" is not a name of a job'),
    ],
)
def test_a_mistake_in_a_call_of_a_job_is_one_sentence(
    stub: ApiStub, script: Path, call: Callable[[TrainingJob], object], sentence: str
) -> None:
    job = HeteroTrainClient().train(script, pools={"a100": 2}, image="x", global_batch_size=64)
    stub.requests.clear()
    with pytest.raises(InputError) as error:
        call(job)
    assert sentence in str(error.value)
    assert {method for method, *_ in stub.requests} <= {"GET"}


def test_the_forecast_uses_the_speeds_of_the_running_job(stub: ApiStub, script: Path) -> None:
    job = HeteroTrainClient().train(script, pools={"a100": 2}, image="x", global_batch_size=60)
    compute = ComputeTime(per_sample_s=0.01, fixed_s=0.0, backward_per_sample_s=0.0, backward_fixed_s=0.0)
    members = tuple(Member(index=index, pool="a100", share_samples=30, compute=compute) for index in range(2))
    plan = plan_of([30, 30], job_uid="uid-my-training", members=members)
    stub.objects[f"{CONFIGS}/my-training-plan"] = {"data": {"plan.json": encode_plan(plan)}}
    assert job.forecast().document["stepSeconds"] == pytest.approx(0.3)


def test_a_notebook_shows_what_describe_shows(stub: ApiStub, script: Path) -> None:
    job = HeteroTrainClient().train(script, pools={"a100": 2}, image="x", global_batch_size=64)
    statuses(stub, "my-training", DONE)
    assert "every epoch is committed" in str(job)
    html = job._repr_html_()
    assert html.startswith("<pre")
    assert "accuracy" in html


def test_the_history_comes_from_prometheus_in_or_outside_the_cluster(stub: ApiStub, script: Path) -> None:
    """One series is a gauge of the contract, another one a metric of the script."""
    job = HeteroTrainClient().train(script, pools={"a100": 2}, image="x", global_batch_size=64)
    statuses(stub, "my-training", DONE)
    asked: list[str] = []

    def answer(query: str) -> dict[str, Any]:
        asked.append(query)
        loss = [{"metric": {}, "values": [[10.0, "0.5"], [20.0, "0.25"]]}]
        accuracy = [{"metric": {"name": "accuracy"}, "values": [[20.0, "0.75"]]}]
        found = loss if "heterotrain_loss{" in query else accuracy if "user_metric" in query else []
        return {"status": "success", "data": {"resultType": "matrix", "result": found}}

    real, path = stub.answer, "/api/v1/namespaces/monitoring/services/prometheus:9090/proxy/api/v1/query_range"

    def proxy(method: str, at: str, query: dict[str, str], body: Any) -> tuple[int, Any]:
        return (200, answer(query["query"])) if at == path else real(method, at, query, body)

    stub.answer = proxy  # type: ignore[method-assign]  # the stub's one method, replaced for this test
    with prometheus(answer) as outside:
        for where in ("monitoring/prometheus:9090", outside):
            found = job.metrics(prometheus=where)
            assert found["time_s"].tolist() == [10, 20]
            assert found["loss"].tolist() == [0.5, 0.25]
            np.testing.assert_array_equal(found["accuracy"], [np.nan, 0.75])
    assert all('job_uid="uid-my-training"' in query for query in asked)
    with pytest.raises(UnavailableError, match="does not answer"):
        job.metrics(prometheus=outside)


class prometheus:  # noqa: N801  # reads like a function
    """A server on loopback that answers range queries, inside the ``with`` block."""

    def __init__(self, answer: Any) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                raw = json.dumps(answer(self.path.replace("%22", '"').replace("%7B", "{").replace("%3D", "="))).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the base class names it
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)

    def __enter__(self) -> str:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return f"http://127.0.0.1:{self._server.server_port}"

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def test_plot_draws_what_prometheus_has(stub: ApiStub, tmp_path: Path) -> None:
    """Throughput is the slope of the committed samples; without any measurement there is a sentence, not a picture."""
    stub.objects[f"{JOBS}/digits"] = {
        "metadata": {"name": "digits", "namespace": "ml", "uid": "u", "creationTimestamp": "2026-11-22T10:00:00Z"},
        "spec": {}, "status": DONE,
    }  # fmt: skip
    series: dict[str, list[list[Any]]] = {
        "heterotrain_loss{": [[60.0, "0.5"], [120.0, "0.25"]],
        "heterotrain_committed_samples{": [[60.0, "600"], [120.0, "1800"], [180.0, "1700"]],
        "heterotrain_samples_total{": [[60.0, "32"], [120.0, "40"]],
    }

    def answer(query: str) -> dict[str, Any]:
        found = [
            {"metric": {"worker": "digits-w0"}, "values": values} for name, values in series.items() if name in query
        ]
        return {"status": "success", "data": {"resultType": "matrix", "result": found}}

    with prometheus(answer) as where:
        picture = tmp_path / "digits.svg"
        result = CliRunner().invoke(main, ["plot", "digits", "-o", str(picture), "--prometheus", where])
        assert result.exit_code == 0, result.output
        assert result.stdout == f"{picture}: 3 points\n"
        assert picture.read_text().startswith("<?xml")
        assert "<!-- share (samples) -->" in picture.read_text()
        assert "<!-- digits-w0 -->" in picture.read_text()
        arrays = HeteroTrainClient().job("digits").metrics(prometheus=where)
        np.testing.assert_array_equal(with_throughput(arrays)["samples_per_second"], [np.nan, 20.0, np.nan])
        for change, sentence in (
            (lambda: None, "digits.txt has no known format: end it with one of .png, .svg, .pdf"),
            (series.clear, "Prometheus has no measurements of job digits: check that it scrapes the workers"),
        ):
            change()
            file = "digits.txt" if series else str(tmp_path / "other.png")
            result = CliRunner().invoke(main, ["plot", "digits", "-o", file, "--prometheus", where])
            assert (result.exit_code, sentence in result.stderr) == (2, True), result.stderr


def test_the_shell_gets_the_commands_that_begin_like_the_word() -> None:
    """As the script for bash asks."""
    asked = {"_HETEROTRAIN_COMPLETE": "bash_complete", "COMP_WORDS": "heterotrain su", "COMP_CWORD": "1"}
    result = CliRunner().invoke(main, env=asked, prog_name="heterotrain")
    assert set(result.stdout.split()) == {"plain,submit", "plain,suspend"}
