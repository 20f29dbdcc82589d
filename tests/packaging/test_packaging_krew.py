"""The krew plugin: a manifest with the archive's checksum, and a program that finds the Python package."""

from __future__ import annotations

import hashlib
import subprocess
import tarfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
URI = "https://example.com/v1.2.3/kubectl-htj.tar.gz"
HOMEPAGE = "https://example.com/heterotrain"


@pytest.fixture
def built(tmp_path: Path) -> Path:
    subprocess.run([ROOT / "deploy/krew/build.sh", "1.2.3", URI, HOMEPAGE, tmp_path / "out"], check=True)
    with tarfile.open(tmp_path / "out/kubectl-htj.tar.gz") as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    return tmp_path


def test_the_manifest_names_archive_checksum_and_version(built: Path) -> None:
    manifest = yaml.safe_load((built / "out/htj.yaml").read_text())
    assert (manifest["metadata"]["name"], manifest["spec"]["version"]) == ("htj", "v1.2.3")
    (platform,) = manifest["spec"]["platforms"]
    assert platform["sha256"] == hashlib.sha256((built / "out/kubectl-htj.tar.gz").read_bytes()).hexdigest()
    assert (platform["uri"], manifest["spec"]["homepage"]) == (URI, HOMEPAGE)
    assert (built / "unpacked" / platform["bin"]).exists()
    assert (built / "unpacked/LICENSE").exists()
    assert "files" not in platform, "krew installs all files then, with the licence, as its index asks for"
    assert "@" not in (built / "out/htj.yaml").read_text()
    assert len(manifest["spec"]["shortDescription"]) <= 50, "krew's own limit"


@pytest.mark.parametrize(
    ("installed", "called"),
    [
        (["heterotrain", "uvx"], "heterotrain get -A"),
        (["uvx", "pipx"], "uvx --from heterotrain[cli]==1.2.3 heterotrain get -A"),
        (["pipx"], "pipx run --spec heterotrain[cli]==1.2.3 heterotrain get -A"),
    ],
)
def test_the_plugin_runs_the_program_that_is_there(built: Path, installed: list[str], called: str) -> None:
    programs = built / "bin"
    programs.mkdir()
    for name in installed:
        (programs / name).write_text(f'#!/bin/sh\necho {name} "$@"\n')
        (programs / name).chmod(0o755)
    done = subprocess.run(
        ["/bin/sh", built / "unpacked/kubectl-htj", "get", "-A"],
        env={"PATH": str(programs)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout.strip()) == (0, called), done.stderr


def test_without_any_of_them_it_says_what_to_install(built: Path) -> None:
    done = subprocess.run(
        ["/bin/sh", built / "unpacked/kubectl-htj", "get"],
        env={"PATH": str(built)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "pip install 'heterotrain[cli]'" in done.stderr
