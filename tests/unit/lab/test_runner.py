"""Parts run with pytest, failed tests run again alone, and the end tells what happened and what it cost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab.cluster import REPOSITORY
from lab.testing import __main__ as program
from lab.testing import parts
from lab.testing.budget import Sampler
from lab.testing.lanes import Programs
from lab.testing.parts import Mode, Part, Plan
from lab.testing.running import Runner

PLUGIN = ("-p", "support.accounting", "-p", "no:cacheprovider")
STEADY = "def test_steady():\n    pass\n"
BROKEN = "def test_broken():\n    assert 1 == 2\n"
UNSTABLE = """
import pathlib

def test_unstable():
    seen = pathlib.Path(__file__).with_suffix(".seen")
    if not seen.exists():
        seen.touch()
        raise AssertionError("the first time")
"""
NO_CLUSTER = program.Cluster(is_needed=False, was_running=False)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for tests; report and list of unstable tests go there, too."""
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY / "tests"))
    monkeypatch.setattr(program, "UNSTABLE", tmp_path / "unstable.txt")
    monkeypatch.setattr(program, "REPORT", tmp_path / "out" / "tests.json")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "unstable.txt").touch()
    (tmp_path / "logs").mkdir()
    return tmp_path


def part(folder: Path, name: str, text: str, *, is_real: bool = True) -> Part:
    """Return a part with one file of tests."""
    file = folder / f"test_{name}.py"
    file.write_text(text)
    return Part(name=name, chunks=((str(file),),), is_real=is_real)


def run(folder: Path, plan: Plan, *, stops_early: bool = False) -> tuple[int, Runner]:
    """Run a plan and return the exit code and the runner."""
    runner = Runner(Programs(folder / "logs"), (*PLUGIN, f"--rootdir={folder}", "-c", os.devnull))
    known = {each.name: each for each in (*parts.PARTS, *plan.parts)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "PARTS", tuple(known.values()))
        program._run(plan, runner, NO_CLUSTER, stops_early=stops_early)
        return program._tell(runner, Sampler(), enforces_budget=False), runner


def test_a_test_that_passes_alone_passes_and_goes_to_the_list(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = Plan((), ((part(folder, "real", UNSTABLE + STEADY),),), ())
    code, _ = run(folder, plan)
    printed = capsys.readouterr().out
    assert code == 0
    assert printed.splitlines()[-1] == "2 passed, 0 failed, 0 skipped"
    assert "the first time" in printed, "the first failure is shown"
    assert "failed, then passed alone: test_real.py::test_unstable" in printed
    assert (folder / "unstable.txt").read_text().split(" ")[1] == "test_real.py::test_unstable\n"
    assert json.loads((folder / "out/tests.json").read_text())["passed_at_the_second_try"]


def test_a_test_of_one_process_gets_no_second_try(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _ = run(folder, Plan((part(folder, "unit", UNSTABLE + STEADY, is_real=False),), (), ()))
    assert code == 1
    assert capsys.readouterr().out.splitlines()[-1] == "1 passed, 1 failed, 0 skipped"
    assert (folder / "unstable.txt").read_text() == ""


def test_a_broken_test_fails_at_both_tries(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, runner = run(folder, Plan((), ((part(folder, "real", BROKEN + STEADY),),), ()))
    assert code == 1
    assert runner.again["test_real.py::test_broken"].outcome == "failed"
    assert capsys.readouterr().out.splitlines()[-1] == "1 passed, 1 failed, 0 skipped"


def test_a_test_that_stands_twice_on_the_list_is_reported_and_fails_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "unstable.txt").write_text("2026-01-02 test_real.py::test_broken\n" * 2)
    code, _ = run(folder, Plan((), ((part(folder, "real", BROKEN + STEADY),),), ()))
    printed = capsys.readouterr().out
    assert code == 0
    assert "failed, does not gate: test_real.py::test_broken" in printed
    assert printed.splitlines()[-1] == "1 passed, 0 failed, 1 skipped"


@pytest.mark.parametrize(("stops_early", "runs"), [(True, False), (False, True)])
def test_a_failed_check_ends_the_gate_after_all_of_the_check(folder: Path, stops_early: bool, runs: bool) -> None:
    pool = (part(folder, "first", BROKEN, is_real=False), part(folder, "second", STEADY, is_real=False))
    later = part(folder, "later", STEADY)
    code, runner = run(folder, Plan(pool, ((later,),), ()), stops_early=stops_early)
    assert code == 1
    assert len(runner.results["second"].tests) == 1
    assert ("later" in runner.results) is runs


@pytest.mark.parametrize(
    ("text", "why"), [("import no_such_module\n", "test_real.py"), ("import os\nos._exit(7)\n", "ended with code 7")]
)
def test_a_program_that_breaks_off_is_a_failure(
    folder: Path, capsys: pytest.CaptureFixture[str], text: str, why: str
) -> None:
    code, runner = run(folder, Plan((), ((part(folder, "real", text),),), ()))
    assert code == 1
    assert why in runner.results["real"].failed[0]
    assert capsys.readouterr().out.splitlines()[-1] == "0 passed, 1 failed, 0 skipped"


def test_a_program_that_is_no_test_fails_the_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lint = Part(name="lint", command=("sh", "-c", "echo bad style; exit 1"))
    code, _ = run(folder, Plan((lint, part(folder, "unit", STEADY, is_real=False)), (), ()))
    printed = capsys.readouterr().out
    assert code == 1
    assert "failed: lint" in printed
    assert printed.splitlines()[-1] == "1 passed, 0 failed, 0 skipped"


BURNS = """
import os, subprocess, sys, time

BURN = "import time\\nwhile time.process_time() < 0.3: pass"

def test_own():
    end = time.process_time() + 0.3
    while time.process_time() < end: pass

def test_child():
    subprocess.run([sys.executable, "-c", BURN], check=True)

def test_grandchild_that_lives_on():
    # It sleeps on after the test, and its parent has not waited for it.
    code = BURN + "\\nprint(flush=True)\\ntime.sleep(600)"
    middle = "import subprocess, sys\\nsubprocess.run([sys.executable, '-c', sys.argv[1]])"
    global living
    living = subprocess.Popen([sys.executable, "-c", middle, code], stdout=subprocess.PIPE, start_new_session=True)
    living.stdout.readline()

def test_cheap():
    os.killpg(living.pid, 9)
    living.wait()
    living.stdout.close()
"""


@pytest.mark.parametrize("processes", [1, 2])
def test_processor_seconds_include_descendants(folder: Path, processes: int) -> None:
    """The work is a fixed amount of processor time, so a slow machine only takes longer for it."""
    (folder / "test_burns.py").write_text(BURNS)
    results = folder / "results"
    words = ["-p", "support.accounting", f"--rootdir={folder}", "-c", os.devnull, f"--results={results}"]
    words += ["-p", "xdist", "-n", "1"] if processes > 1 else []
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *words, folder / "test_burns.py"], cwd=folder, check=True, timeout=120
    )
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    cost_s = {line["id"].partition("::")[2]: line["processor_s"] for line in lines if "id" in line}
    assert lines[0] == {"tests": 4}
    assert min(cost_s[name] for name in ("test_own", "test_child", "test_grandchild_that_lives_on")) >= 0.29
    assert cost_s["test_cheap"] < cost_s["test_own"]
    assert lines[-1]["rest_s"] > 0.1


def test_the_words_of_the_command_line_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        program.main([Mode.CHECK.value, "distributed"])
    assert "there is no part 'distributed' here: choose from trainer" in capsys.readouterr().err
