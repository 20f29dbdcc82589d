"""What commands load before they do something: a program that starts often has no time for libraries it does not use.

Modules are counted and not seconds, which other programs on the machine change.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from support.api_stub import ApiStub, serve

ROOT = Path(__file__).parents[3]
SOURCES = os.pathsep.join(str(ROOT / part) for part in ("core", "planner", "operator", "cli"))
JOBS = "/apis/heterotrain.dev/v1alpha1/namespaces/ml/heterotrainjobs"
PROGRAM = """
import atexit, json, sys
loaded = lambda: open("loaded.json", "w").write(json.dumps(sorted(sys.modules)))
atexit.register(loaded)
from heterotrain_cli.entry import main
main()
"""
NEVER = {
    "aiohttp", "heterotrain_planner", "kopf", "kubernetes", "matplotlib", "numpy", "requests", "scipy", "torch",
}  # fmt: skip
"""Packages that take longer to load than the command itself takes."""
JOB = {
    "apiVersion": "heterotrain.dev/v1alpha1", "kind": "HeteroTrainJob",
    "metadata": {"name": "digits", "namespace": "ml", "uid": "u"},
    "spec": {
        "training": {"globalBatchSize": 60}, "workerPools": [{"name": "a100", "maxReplicas": 2}],
        "template": {"spec": {"containers": [{"name": "trainer", "image": "x"}]}},
    },
}  # fmt: skip


@pytest.fixture
def kubeconfig(tmp_path: Path) -> Iterator[Path]:
    with serve(
        ApiStub(objects={f"{JOBS}/digits": JOB}, lists={JOBS: [JOB], "/api/v1/namespaces/ml/events": []}),
        tmp_path,
        namespace="ml",
    ) as found:
        yield found


@pytest.mark.parametrize(
    ("command", "most", "not_needed"),
    [
        ("get", 330, {"heterotrain_operator.api.status", "pydantic", "rich.live", "rich.progress"}),
        ("validate job.yaml", 360, {"heterotrain_cli.convert", "rich", "urllib3"}),
        ("suspend digits", 420, {"rich.live"}),
        ("--help", 150, {"pydantic", "rich", "urllib3", "yaml"}),
    ],
)
def test_a_command_loads_what_it_uses(
    tmp_path: Path, kubeconfig: Path, command: str, most: int, not_needed: set[str]
) -> None:
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(JOB))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *command.split()], cwd=tmp_path, capture_output=True, text=True, check=False,
        env={**os.environ, "KUBECONFIG": str(kubeconfig), "PYTHONPATH": SOURCES},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    loaded = json.loads((tmp_path / "loaded.json").read_text())
    assert sorted({*loaded} & (NEVER | not_needed)) == []
    assert len(loaded) <= most, len(loaded)


def test_a_terminal_of_ascii_gets_question_marks_instead_of_a_traceback(kubeconfig: Path, tmp_path: Path) -> None:
    code = "from heterotrain_cli.entry import main; main()"
    for command in ("get", "describe digits"):
        done = subprocess.run(
            [sys.executable, "-c", code, *command.split()], capture_output=True, text=True, check=False,
            env={**os.environ, "KUBECONFIG": str(kubeconfig), "PYTHONPATH": SOURCES, "PYTHONIOENCODING": "ascii"},
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        assert "digits" in done.stdout
