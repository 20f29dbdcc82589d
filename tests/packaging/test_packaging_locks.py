"""Locks for two generations of CUDA: the same packages but for PyTorch, and documents that name the right one."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REQUIREMENTS = ROOT / "requirements"
OF_CUDA = re.compile(r"(torch|triton|cuda-[a-z]+|nvidia-[^m][a-z0-9-]+)$")


def locked(name: str) -> dict[str, str]:
    """Return the versions in a lock by package; markers may give a package several."""
    found: dict[str, str] = {}
    for package, version in re.findall(r"(?m)^([a-z0-9-]+)==([^ \\]+)", (REQUIREMENTS / name).read_text()):
        found[package] = f"{found[package]} {version}" if package in found else version
    return found


@pytest.mark.parametrize("kind", ["trainer", "examples"])
def test_the_locks_differ_only_in_pytorch_and_cuda(kind: str) -> None:
    newest, cu12 = locked(f"{kind}.txt"), locked(f"{kind}-cu12.txt")
    assert {name: version for name, version in newest.items() if not OF_CUDA.match(name)} == {
        name: version for name, version in cu12.items() if not OF_CUDA.match(name)
    }
    assert {"nvidia-cudnn-cu12", "nvidia-nccl-cu12"} <= cu12.keys()
    assert not [name for name in cu12 if name.endswith("-cu13")]
    assert "nvidia-ml-py" in newest, "installations without CUDA leave out only what OF_CUDA matches"
    assert {"nvidia-cudnn-cu13", "nvidia-nccl-cu13"} <= newest.keys()


@pytest.mark.parametrize("path", sorted(REQUIREMENTS.glob("*.txt")), ids=lambda path: path.name)
def test_every_locked_package_has_hashes_and_no_address(path: Path) -> None:
    text = path.read_text()
    assert len(re.findall(r"(?m)^[a-z0-9-]+==[^\n]*\\\n +--hash=", text)) == len(re.findall(r"(?m)^[a-z0-9-]+==", text))
    assert "://" not in text


def test_the_oldest_pytorch_that_the_trainer_allows_is_a_locked_one() -> None:
    """Both locks are allowed, and no release that nothing tests: the trainer uses undocumented parts of PyTorch."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    releases = [tuple(map(int, locked(lock)["torch"].split("."))) for lock in ("trainer.txt", "trainer-cu12.txt")]
    for name in ("trainer", "export"):
        (bound,) = [each for each in extras[name] if each.startswith("torch")]
        least = tuple(map(int, bound.removeprefix("torch>=").split(".")))
        assert least == min(releases)[: len(least)]


def test_the_readme_builds_an_image_that_runs_on_every_gpu_that_it_names() -> None:
    """V100s need CUDA 12: the builds for CUDA 13 hold no kernels for them."""
    readme = (ROOT / "docs/install.md").read_text()
    assert "V100" in readme
    (build,) = re.findall(r"docker build -f trainer/Dockerfile --build-arg REQUIREMENTS=(\S+)", readme)
    assert "nvidia-cudnn-cu12" in locked(Path(build).name)


@pytest.mark.parametrize("document", ["docs/install.md", "trainer/Dockerfile"])
def test_every_lock_that_a_document_names_exists(document: str) -> None:
    names = re.findall(r"requirements/([a-z0-9-]+\.txt)", (ROOT / document).read_text())
    assert names
    assert [name for name in names if not (REQUIREMENTS / name).exists()] == []
