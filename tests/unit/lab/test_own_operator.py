"""The operator from the sources replaces the installed one, which is restored at every kind of end."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from lab import own_operator
from lab.cluster import Cluster, ClusterError

KUBECTL = """#!/usr/bin/env bash
echo "$*" >> "$CALLS"
case "$*" in
  proxy*) echo "Starting to serve on 127.0.0.1:43121"; exec sleep 60 ;;
  *"get deployment"*) echo '{"spec": {"replicas": REPLICAS}}' ;;
  *"get pods"*) echo '{"items": []}' ;;
esac
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return fake_cluster(tmp_path, replicas=2)


def fake_cluster(folder: Path, *, replicas: int) -> Cluster:
    """Return a cluster whose kubectl writes its calls to a file."""
    program = folder / "kubectl"
    program.write_text(KUBECTL.replace("REPLICAS", str(replicas)))
    program.chmod(0o755)
    path = f"{folder}:{os.environ['PATH']}"
    return Cluster(environment={"PATH": path, "CALLS": str(folder / "calls"), "KUBECONFIG": "admin.conf"})


def scalings(cluster: Cluster) -> list[str]:
    """Return the requested numbers of replicas, in order."""
    lines = Path(cluster.environment["CALLS"]).read_text().splitlines()
    return [line.rpartition("=")[2] for line in lines if "scale" in line]


def replace_operator(monkeypatch: pytest.MonkeyPatch, code: str) -> list[list[str]]:
    """Run a line of Python in place of the operator, and return the command lines that would have started it."""
    asked: list[list[str]] = []
    real = own_operator.command

    def command(*arguments: object) -> list[str]:
        asked.append(real(*arguments))  # type: ignore[arg-type]  # the arguments of the function that it replaces
        return [sys.executable, "-c", code]

    monkeypatch.setattr(own_operator, "command", command)
    # The machine's own kubectl must not be found before the fake one.
    monkeypatch.setenv("PATH", "/nonexistent")
    return asked


def test_an_operator_that_fails_leaves_the_installed_one_as_it_was(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = replace_operator(monkeypatch, "raise SystemExit(3)")
    assert own_operator.run(cluster, ["--log-level", "debug"]) == 3
    assert scalings(cluster) == ["0", "2"]
    (line,) = asked
    assert line[line.index("--prometheus-url") + 1] == f"http://127.0.0.1:43121{own_operator.PROMETHEUS_PATH}"
    assert line[line.index("--kubeconfig") + 1] == "admin.conf"
    assert line[-2:] == ["--log-level", "debug"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_operator_once_and_brings_back_the_installed_one(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: signal.Signals
) -> None:
    log = tmp_path / "signals"
    before = signal.getsignal(signal.SIGINT)  # ignored where a shell started the tests in the background
    replace_operator(
        monkeypatch,
        "import os, signal, sys, time\n"
        f"log = open({str(log)!r}, 'w')\n"
        "signal.signal(signal.SIGTERM, lambda *_: (log.write('SIGTERM '), time.sleep(0.2), sys.exit(0)))\n"
        "signal.signal(signal.SIGINT, lambda *_: log.write('SIGINT '))\n"
        f"os.kill({os.getpid()}, {int(number)})\n"
        "time.sleep(60)",
    )
    assert own_operator.run(cluster, []) == 0
    assert log.read_text() == "SIGTERM "
    assert scalings(cluster) == ["0", "2"]
    assert signal.getsignal(signal.SIGINT) is before


def test_no_replicas_left_by_a_killed_run_count_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = fake_cluster(tmp_path, replicas=0)
    replace_operator(monkeypatch, "")
    assert own_operator.run(cluster, []) == 0
    assert scalings(cluster) == ["0", "1"]


def test_a_proxy_that_does_not_start_is_an_error(tmp_path: Path) -> None:
    cluster = fake_cluster(tmp_path, replicas=1)
    (tmp_path / "kubectl").write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(ClusterError, match="did not start"), own_operator.prometheus(cluster):
        pass


def test_the_command_line_hands_on_the_operators_options(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr(own_operator, "this_cluster", lambda _namespace: Cluster())
    monkeypatch.setattr(own_operator, "run", lambda _cluster, options: seen.append(options) or 0)
    monkeypatch.setattr(sys, "argv", ["own_operator", "run", "--log-level", "debug", "--workers=2"])
    assert own_operator.main() == 0
    assert seen == [["--log-level", "debug", "--workers=2"]]
