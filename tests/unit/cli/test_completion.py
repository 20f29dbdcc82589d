"""Completion in shells: commands, options, and names from the API server."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import click
import pytest
from click.shell_completion import ShellComplete
from heterotrain_cli.cluster import names
from heterotrain_cli.main import COMMANDS, main
from support.api_stub import ApiStub

ML = "/apis/heterotrain.dev/v1alpha1/namespaces/ml/heterotrainjobs"
OTHER = "/apis/heterotrain.dev/v1alpha1/namespaces/other/heterotrainjobs"


def job(name: str) -> dict[str, Any]:
    pools = [{"name": "a100", "maxReplicas": 2}, {"name": "t4", "maxReplicas": 6}]
    return {"metadata": {"name": name}, "spec": {"workerPools": pools}, "status": {"state": "Running"}}


@pytest.fixture
def stub(stub: ApiStub) -> ApiStub:
    """An API server with jobs in two namespaces."""
    stub.objects = {f"{ML}/digits": job("digits")}
    stub.lists = {
        ML: [job("digits"), job("diffusion"), job("text")],
        OTHER: [job("speech")],
        "/api/v1/namespaces/ml/pods": [
            {"metadata": {"name": f"digits-w{i}"}, "status": {"phase": "Running"}} for i in range(2)
        ],
    }
    return stub


def completed(line: str) -> list[str]:
    """Return the candidates for a command line whose last word is incomplete."""
    *before, incomplete = line.split(" ")
    found = ShellComplete(main, {}, "heterotrain", "_X").get_completions(before, incomplete)
    return [str(each.value) for each in found]


@pytest.mark.parametrize(
    "command", ["get", "describe", "top", "logs", "wait", "suspend", "resume", "checkpoint", "scale", "plot", "delete"]
)
def test_every_command_on_a_job_completes_its_name(stub: ApiStub, command: str) -> None:
    assert completed(f"{command} di") == ["digits", "diffusion"]


def test_names_are_those_of_the_chosen_namespace(stub: ApiStub) -> None:
    assert completed("get -n other ") == ["speech"]


def test_pools_have_their_present_limit(stub: ApiStub) -> None:
    assert completed("scale digits --pool ") == ["a100=2", "t4=6"]
    assert completed("scale digits --pool t") == ["t4=6"]


def test_workers_of_a_job(stub: ApiStub) -> None:
    assert completed("logs digits ") == ["digits-w0", "digits-w1"]


def test_commands_and_options() -> None:
    assert completed("") == list(COMMANDS)
    assert completed("desc") == ["describe"]
    assert "--version" in completed("--")
    assert completed("get --out") == ["--output"]
    assert completed("get -o ") == ["table", "json", "yaml"]


@pytest.mark.parametrize("line", ["get di", "scale digits --pool ", "scale nosuch --pool ", "logs nosuch "])
def test_a_cluster_that_refuses_completes_nothing(stub: ApiStub, line: str, capfd: pytest.CaptureFixture[str]) -> None:
    stub.lists.clear()
    stub.objects.clear()
    assert completed(line) == []
    assert capfd.readouterr() == ("", "")


def test_without_a_cluster_nothing_is_completed_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "nowhere"))
    assert completed("get di") == []
    assert capfd.readouterr() == ("", "")


def test_the_wait_for_names_is_short(stub: ApiStub, monkeypatch: pytest.MonkeyPatch) -> None:
    """One try with a limit; a server that answers too late is not waited for."""
    asked = list[dict[str, Any]]()
    real = names.Cluster

    class Watched(real):  # type: ignore[misc,valid-type]  # a class of the module
        def __init__(self, target: Any, **limits: Any) -> None:
            asked.append(limits)
            super().__init__(target, **{**limits, "timeout_s": 0.05})

    answer, given_up = stub.answer, threading.Event()

    def late(*request: Any) -> tuple[int, Any]:
        assert given_up.wait(60)
        return answer(*request)

    monkeypatch.setattr(names, "Cluster", Watched)
    monkeypatch.setattr(stub, "answer", late)
    try:
        assert completed("get di") == []
    finally:
        given_up.set()
    assert asked == [{"timeout_s": names.LIMIT_S, "read_tries": 1}]


def test_every_argument_that_is_a_job_is_completed() -> None:
    for name in COMMANDS:
        command = main.get_command(click.Context(main), name)
        assert command is not None
        for parameter in command.params:
            if isinstance(parameter, click.Argument) and parameter.name == "name":
                assert parameter._custom_shell_complete is names.complete_jobs, name
