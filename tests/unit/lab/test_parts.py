"""Every test belongs to one part, parts run where they may, and make installs what they need."""

from __future__ import annotations

import subprocess
from pathlib import PurePosixPath

import pytest
from lab.cluster import REPOSITORY
from lab.testing import parts
from lab.testing.parts import CHECKED, CONNECTIONS, HEAVY, OWN_CLUSTERS, PARTS, Mode, Part, plan

BY_GPU = "tests/cuda"


def names(found: tuple[Part, ...]) -> list[str]:
    return [part.name for part in found]


def chunks_of(file: PurePosixPath) -> list[tuple[str, ...]]:
    """Return the chunks that run a file."""
    above = {str(folder) for folder in file.parents}
    return [
        chunk
        for part in PARTS
        for chunk in part.chunks
        if above & set(chunk) and not above & set(parts.left_out(chunk))
    ]


def test_every_test_file_runs_in_one_program_of_one_part() -> None:
    folders = (REPOSITORY / "tests", REPOSITORY / "research/tests")
    files = [PurePosixPath(path.relative_to(REPOSITORY)) for each in folders for path in each.rglob("test_*.py")]
    counts = {str(file): len(chunks_of(file)) for file in files if PurePosixPath(BY_GPU) not in file.parents}
    assert len(counts) > 400
    assert {file: count for file, count in counts.items() if count != 1} == {}


@pytest.mark.parametrize("folder", [folder for part in PARTS for folder in part.folders])
def test_a_folder_of_the_table_has_tests(folder: str) -> None:
    path = REPOSITORY / folder
    assert path.is_file() or list(path.rglob("test_*.py"))


def test_the_check_runs_before_everything_and_tests_on_the_cluster_beside_distributed_ones() -> None:
    gate = plan(Mode.GATE)
    assert gate.pool == CHECKED
    assert [names(lane) for lane in gate.lanes] == [
        ["heavy", "connections", "distributed"], ["packaging", "integration", "e2e"],
    ]  # fmt: skip
    assert gate.rest == ()
    assert plan(Mode.GATE, own_clusters=True).rest == (OWN_CLUSTERS,)
    assert plan(Mode.CHECK).parts == CHECKED


def test_everything_includes_every_part() -> None:
    """Without a mark, parts of the check run their heavy tests themselves."""
    assert {*names(plan(Mode.ALL).parts), HEAVY.name} == {*names(PARTS)}


@pytest.mark.parametrize(
    ("mode", "chosen", "expected"),
    [
        (Mode.CHECK, ["lint", "operator"], ["operator", "lint"]),
        (Mode.CHECK, ["packaging"], ["packaging"]),
        (Mode.GATE, ["e2e", "distributed"], ["distributed", "e2e"]),
        (Mode.GATE, ["heavy"], ["heavy"]),
        (Mode.ALL, ["stores"], ["stores"]),
    ],
)
def test_chosen_parts_run_alone(mode: Mode, chosen: list[str], expected: list[str]) -> None:
    assert names(plan(mode, chosen).parts) == expected


def test_an_unknown_part_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(parts.UnknownPart, match=r"there is no part 'e2e' here: choose from trainer, planner, operator"):
        plan(Mode.CHECK, ["e2e"])


def test_only_tests_with_real_processes_run_a_second_time() -> None:
    assert not any(part.is_real for part in (*CHECKED, HEAVY))
    assert all(part.is_real for part in (CONNECTIONS, OWN_CLUSTERS, *parts.CLUSTER_TESTS, parts.DISTRIBUTED))


def test_heavy_files_are_those_with_the_mark() -> None:
    found = parts.heavy_files(REPOSITORY)
    assert all("mark.heavy" in (REPOSITORY / file).read_text() for file in found)
    assert "tests/unit/lab/test_parts.py" in found, "this file has the words"


@pytest.mark.parametrize(
    ("chosen", "target"),
    [
        ("", "setup"), ("core docs", "setup-core"), ("operator", "setup-operator"), ("core lab", "setup-operator"),
        ("packaging", "setup-operator"), ("trainer", "setup"), ("operator trainer", "setup"), ("stores", "setup"),
    ],
)  # fmt: skip
def test_make_installs_what_the_chosen_parts_need(chosen: str, target: str) -> None:
    command = ["make", "--dry-run", "--no-print-directory", "check", f"PART={chosen}", "MAKE=echo"]
    shown = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    assert shown.splitlines()[0].split() == ["echo", "--silent", "--no-print-directory", target]
