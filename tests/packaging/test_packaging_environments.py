"""The light environments suffice: their parts of `make check` load no heavy packages."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from lab.testing.parts import PARTS

ROOT = Path(__file__).parents[2]
COLLECT = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}} in this environment", name=name)

sys.meta_path.insert(0, Absent())
import pytest
sys.exit(pytest.main(["--collect-only", "-qq", "-p", "no:cacheprovider", "-n", "0", *{folders!r}]))
"""
ABSENT = {
    "LIGHT_PARTS": ["torch", "kopf", "structlog"],
    "OPERATOR_PARTS": ["torch", "torchvision", "sklearn", "fsspec", "pynvml", "tensorboard"],
}


def folders(variable: str) -> list[str]:
    """Return the folders of parts that the Makefile lists in a variable."""
    value = re.search(rf"^{variable} := (.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert value is not None, f"the Makefile has no variable {variable}"
    names = value[1].split()
    assert set(names) <= {part.name for part in PARTS}
    return [folder for part in PARTS if part.name in names for folder in part.folders]


@pytest.mark.parametrize("variable", sorted(ABSENT))
def test_parts_are_collected_without_the_packages_of_larger_ones(variable: str) -> None:
    code = COLLECT.format(absent=ABSENT[variable], folders=folders(variable))
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


@pytest.mark.parametrize(
    ("smaller", "larger"),
    [
        ("dev-core", "dev-operator"),
        ("dev-operator", "dev"),
        ("operator", "dev"),
        ("examples", "dev"),
        ("trainer", "examples"),
    ],
)
def test_a_larger_list_holds_the_smaller_ones_versions(smaller: str, larger: str) -> None:
    """Otherwise `make setup` after `make setup-core` would replace packages, and images would run untested versions."""

    def versions(name: str) -> set[str]:
        return set(re.findall(r"^[a-z0-9.-]+==[^ ;]+", (ROOT / f"requirements/{name}.txt").read_text(), re.MULTILINE))

    assert versions(smaller)
    assert versions(smaller) <= versions(larger)
