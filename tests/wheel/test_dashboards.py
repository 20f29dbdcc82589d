"""The dashboards are read by Grafana's own package for them, and nothing in them is unknown to it.

``make test-all PART=wheel`` runs it, because it installs a package.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
UV = Path(sys.executable).parent / "uv"
READ = """
import json, sys
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard
register_default_plugins()
print(JSONEncoder().encode(Dashboard.from_json(json.load(open(sys.argv[1])))))
"""
OF_PROMETHEUS = {"titleFormat", "textFormat", "step"}
"""Fields of an annotation that belong to its data source."""


def unknown(given: Any, read: Any, place: str = "") -> list[str]:
    """Return the places of what was given and not read."""
    if isinstance(given, dict):
        lacks = [f"{place}.{key}" for key in given if key not in read and key not in OF_PROMETHEUS]
        return lacks + [
            each for key in given.keys() & read for each in unknown(given[key], read[key], f"{place}.{key}")
        ]
    if isinstance(given, list):
        assert len(given) == len(read), place
        return [each for number, one in enumerate(given) for each in unknown(one, read[number], f"{place}[{number}]")]
    return [] if given == read else [place]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    environment = tmp_path_factory.mktemp("grafana") / "environment"
    subprocess.run([UV, "venv", "--quiet", "--python", sys.executable, environment], check=True)
    install = [UV, "pip", "install", "--quiet", "--python", environment / "bin/python", "grafana-foundation-sdk"]
    subprocess.run(install, check=True)
    return environment / "bin/python"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["cluster", "job", "operator"])
def test_grafanas_package_reads_all_of_a_dashboard(python: Path, name: str) -> None:
    path = ROOT / f"helm/heterotrain/files/dashboards/{name}.json"
    done = subprocess.run([python, "-c", READ, path], capture_output=True, text=True, check=True)
    given = json.loads(path.read_text())
    assert unknown(given, json.loads(done.stdout)) == []
    assert unknown(given | {"panel": []}, json.loads(done.stdout)) == [".panel"]
