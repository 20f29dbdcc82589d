"""A release, made and rehearsed without its images: README, chart and plugin work from it, and its bill is a valid one.

``make test-all PART=wheel`` runs it, because it installs packages.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from heterotrain_core.version import __version__
from support.ports import free_port

ROOT = Path(__file__).parents[2]
UV = Path(sys.executable).parent / "uv"
VALIDATE = """
import sys
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
print(JsonStrictValidator(SchemaVersion.V1_6).validate_str(open(sys.argv[1]).read()))
"""


@pytest.mark.timeout(1800)
@pytest.mark.needs_program("crane", "helm")
def test_the_commands_of_the_released_readme_run_from_the_release_alone(tmp_path: Path) -> None:
    registry = f"localhost:{free_port()}/me"
    out, folders = tmp_path / "release", ("deploy/dev/lab", "deploy/dev/cluster")
    done = subprocess.run(
        [sys.executable, "-m", "lab.release_files", __version__, "--images", "--registry", registry, "--out", out],
        cwd=ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(str(ROOT / each) for each in folders)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    transcript = (out / "transcript.txt").read_text()
    assert "$ heterotrain forecast" in transcript
    assert "samples/s" in transcript
    assert "job train is valid" in transcript
    environment = tmp_path / "environment"
    subprocess.run([UV, "venv", "--quiet", "--python", sys.executable, environment], check=True)
    install = [UV, "pip", "install", "--quiet", "--python", environment / "bin/python"]
    subprocess.run([*install, "cyclonedx-python-lib[json-validation]"], check=True)
    for text, verdict in (
        ((out / "heterotrain.cdx.json").read_text(), "None"),
        ('{"bomFormat": "CycloneDX"}', "required"),
    ):
        (tmp_path / "bill.json").write_text(text)
        command = [environment / "bin/python", "-c", VALIDATE, tmp_path / "bill.json"]
        assert verdict in subprocess.run(command, capture_output=True, text=True, check=True).stdout
