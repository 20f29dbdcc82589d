"""The wheel as users install it: complete, and without extras still one sentence instead of a traceback."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Sequence
from configparser import ConfigParser
from pathlib import Path

import numpy as np
import pytest
from heterotrain_core.version import __version__

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "core/heterotrain_core", "planner/heterotrain_planner", "operator/heterotrain_operator", "trainer/heterotrain",
    "cli/heterotrain_cli", "cli/heterotrain_client",
)  # fmt: skip


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python environment with nothing but the wheel and numpy, which is all that the wheel requires."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    for source in (Path(np.__file__).parent, Path(np.__file__).parents[1] / "numpy.libs"):
        if source.exists():
            (packages / source.name).symlink_to(source)
    return folder / "bin/python"


def run(python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(python), *arguments], capture_output=True, text=True, check=False, env={}, cwd=python.parent, timeout=60
    )


def command(wheel: Path, name: str) -> str:
    """Return Python code that does what the installed script does."""
    entries = ConfigParser()
    with zipfile.ZipFile(wheel) as archive:
        (path,) = [each for each in archive.namelist() if each.endswith("entry_points.txt")]
        entries.read_string(archive.read(path).decode())
    module, _, function = entries["console_scripts"][name].partition(":")
    return f"import sys; sys.argv[0] = {name!r}; from {module} import {function}; sys.exit({function}())"


def test_the_wheel_holds_every_file_of_the_packages(wheel: Path) -> None:
    """Sources, marks of typed packages, scenarios, the licence: whatever git tracks there."""
    tracked = subprocess.run(["git", "ls-files", *PACKAGES], cwd=ROOT, capture_output=True, text=True, check=True)
    expected = {path.partition("/")[2] for path in tracked.stdout.split()}
    assert len(expected) > 200
    with zipfile.ZipFile(wheel) as archive:
        found = set(archive.namelist())
    assert expected - found == set()
    for package in PACKAGES:
        assert f"{package.partition('/')[2]}/py.typed" in found, package
    assert any(name.endswith("licenses/LICENSE") for name in found)


def test_the_package_is_imported_without_any_extra(python: Path) -> None:
    done = run(python, "-c", "import heterotrain; print(heterotrain.__version__)")
    assert (done.stdout.strip(), done.stderr) == (__version__, "")


@pytest.mark.parametrize(
    ("code", "extra"),
    [
        ("import heterotrain; heterotrain.init()", "trainer"),
        ("from heterotrain import fit", "trainer"),
        ("from heterotrain_client import HeteroTrainClient", "cli"),
    ],
)
def test_a_script_without_the_trainer_s_packages_is_told_what_to_install(python: Path, code: str, extra: str) -> None:
    done = run(python, "-c", code)
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].endswith(f"run pip install 'heterotrain[{extra}]'")
    assert "ModuleNotFoundError" not in done.stderr


@pytest.mark.parametrize(
    ("name", "arguments", "extra"),
    [
        ("heterotrain", ["get"], "cli"),
        ("heterotrain", ["forecast", "job.yaml"], "cli"),
        ("heterotrain-operator", ["run"], "operator"),
    ],
)
def test_a_command_without_its_packages_says_what_to_install(
    wheel: Path, python: Path, name: str, arguments: Sequence[str], extra: str
) -> None:
    done = run(python, "-c", command(wheel, name), *arguments)
    assert done.returncode == 1
    assert done.stderr.startswith(f"{name} needs the package ")
    assert done.stderr.endswith(f"run pip install 'heterotrain[{extra}]'\n")
    assert done.stderr.count("\n") == 1


def test_the_bare_command_has_help_that_names_every_extra(wheel: Path, python: Path) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    done = run(python, "-c", command(wheel, "heterotrain"), "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert [extra for extra in extras if f"'heterotrain[{extra}]'" not in done.stdout] == []
    done = run(python, "-c", command(wheel, "heterotrain"), "--version")
    assert done.stdout == f"heterotrain, version {__version__}\n"


def test_the_launcher_starts_without_any_extra(wheel: Path, python: Path, tmp_path: Path) -> None:
    (tmp_path / "hello.py").write_text("print('hello')")
    done = run(python, "-c", command(wheel, "heterotrain-run"), str(tmp_path / "hello.py"))
    assert (done.returncode, done.stdout) == (0, "hello\n"), done.stderr
