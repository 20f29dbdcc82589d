"""The sources keep to the figures of ``pyproject.toml`` for their size and shape: a feature pays with deletion."""

from __future__ import annotations

import ast
import subprocess
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
MOST = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["heterotrain"]["shape"]
PRODUCT = ("core", "planner", "operator", "trainer", "cli")
LONG_FILE, LONG_FUNCTION = 400, 60


@cache
def sources(folder: str) -> dict[str, str]:
    """Return the Python files of a folder that git knows or will know, by path."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", f"{folder}/*.py"]
    paths = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    return {path: (ROOT / path).read_text() for path in paths if path and (ROOT / path).is_file()}


def product() -> dict[str, str]:
    return {path: text for folder in PRODUCT for path, text in sources(folder).items()}


def long_functions() -> Iterator[str]:
    for path, text in product().items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
                length = node.end_lineno - node.lineno + 1
                if length > LONG_FUNCTION:
                    yield f"{path}: {node.name} ({length} lines)"


def names_used_twice() -> Iterator[str]:
    count = Counter(
        node.name
        for text in product().values()
        for node in ast.parse(text).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    return (f"{name} ({times} classes)" for name, times in count.items() if times > 1)


def found(figure: str) -> list[str]:
    """Return what a figure counts: lines of a folder, or long files and functions, names or comments."""
    if figure == "long-files":
        return [path for path, text in product().items() if text.count("\n") > LONG_FILE]
    if figure == "long-functions":
        return list(long_functions())
    if figure == "class-names-used-twice":
        return list(names_used_twice())
    if figure == "fmt-skip":
        return [path for path, text in product().items() for _ in range(text.count("# fmt: skip"))]
    return [path for path, text in sources(figure).items() for _ in range(text.count("\n"))]


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="counts what git knows")
@pytest.mark.parametrize("figure", MOST)
def test_the_sources_grow_in_commits_of_their_own_only(figure: str) -> None:
    """A change may lower a figure of ``[tool.heterotrain.shape]``; a commit with its reason raises one."""
    counted = found(figure)
    assert counted or not MOST[figure], f"{figure} counts nothing"
    which = sorted(set(counted)) if len(counted) < 100 else ""  # a list that fits a screen
    assert len(counted) <= MOST[figure], f"{figure}: {len(counted)}, at most {MOST[figure]}. Delete as much. {which}"
