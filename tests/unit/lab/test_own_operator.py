"""The operator from the sources replaces the installed one, which is restored at every kind of end."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from lab.cluster import REPOSITORY

KUBECTL = """#!/usr/bin/env bash
echo "kubectl $*" >> "$CALLS"
case "$*" in
  proxy*) [ "$REPLICAS" != proxy ] || exit 1; echo "Starting to serve on 127.0.0.1:43121"; exec sleep 60 ;;
  *" get deployment"*) [ "$REPLICAS" != none ] || exit 1; echo "${REPLICAS/proxy/2}" ;;
esac
"""
PYTHON = """#!/usr/bin/env bash
echo "python $*" >> "$CALLS"
case "$*" in
  "-m heterotrain_operator run"*) eval "$OPERATOR" ;;
esac
"""
ENDS_BY_ONE_SIGTERM = (
    "trap 'echo INT >> \"$CALLS\"' INT; trap 'echo TERM >> \"$CALLS\"; exit 0' TERM; kill -$SENT $PPID; "
    "while :; do sleep 0.05; done"
)


def run(folder: Path, *options: str, **environ: str) -> tuple[int, list[str]]:
    """Run the script on a cluster that is none; return its exit code and the calls of programs."""
    for name, text in {"kubectl": KUBECTL, "python": PYTHON}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    calls = folder / "calls"
    script = REPOSITORY / "deploy/dev/operator-local.sh"
    own = {"PATH": f"{folder}:{os.environ['PATH']}", "CALLS": str(calls), "REPLICAS": "2", "OPERATOR": ""} | environ
    # A shell cannot trap what it has been started to ignore, as tests below nohup are.
    command = ["env", "--default-signal=HUP,INT,TERM", script, folder / "python", *options]
    done = subprocess.run(command, env=own, check=False, timeout=120)
    return done.returncode, calls.read_text().splitlines()


def scalings(calls: list[str]) -> list[str]:
    """Return the requested numbers of replicas, in order."""
    return [line.rpartition("=")[2] for line in calls if " scale " in line]


def test_an_operator_that_fails_leaves_the_installed_one_as_it_was(tmp_path: Path) -> None:
    code, calls = run(tmp_path, "--log-level", "debug", OPERATOR="exit 3")
    assert (code, scalings(calls)) == (3, ["0", "2"])
    (line,) = (line for line in calls if "heterotrain_operator run" in line)
    prometheus = "http://127.0.0.1:43121/api/v1/namespaces/monitoring/services/prometheus:http/proxy"
    assert line.endswith(f" --prometheus-url {prometheus} --log-level debug")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_operator_once_and_brings_back_the_installed_one(
    tmp_path: Path, number: signal.Signals
) -> None:
    code, calls = run(tmp_path, OPERATOR=ENDS_BY_ONE_SIGTERM, SENT=number.name.removeprefix("SIG"))
    assert (code, scalings(calls)) == (0, ["0", "2"])
    assert [line for line in calls if line in ("INT", "TERM")] == ["TERM"]


def test_no_replicas_left_by_a_killed_run_count_as_one(tmp_path: Path) -> None:
    assert scalings(run(tmp_path, REPLICAS="0")[1]) == ["0", "1"]


def test_a_cluster_without_an_operator_gets_one_first(tmp_path: Path) -> None:
    code, calls = run(tmp_path, REPLICAS="none")
    assert (code, scalings(calls)) == (0, ["0", "1"])
    assert calls.index("python -m lab.install") < next(n for n, line in enumerate(calls) if " scale " in line)


def test_a_proxy_that_does_not_start_is_an_error(tmp_path: Path) -> None:
    code, calls = run(tmp_path, REPLICAS="proxy")
    assert code == 1
    assert not any("heterotrain_operator run" in line for line in calls)
